// How ferry/aio.h talks to the kernel, and what it does with the files of a killed run. A
// configuration only names them.
#pragma once

#include <cstdint>

namespace ferry::aio {

enum class BackendKind : uint8_t { automatic, uring, posix };

// Files of a killed run found at the path. `reuse` takes over what was laid out (aio/README.md): a
// slot's contents are undefined, but it need not be written again. Both are for files of this
// run_id only; those of another run, of an older ferry or with a damaged header also need `_any`.
// Files that are not ferry's, or a newer ferry's, are always refused; files with a published record
// are refused without `_any`. `resume` takes those over with every slot as it was, or throws what
// stands against it; it needs the options that they were laid out with.
enum class Leftover : uint8_t { refuse, remove, reuse, remove_any, reuse_any, resume };

}  // namespace ferry::aio
