// The codecs of what ranks exchange. A configuration only names them; docs/numerics.md has the
// formats.
#pragma once

#include <cstdint>

namespace ferry {

// sign: of the momentum that 1-bit and 0/1 Adam exchange; nobody asks for it by name.
enum class CodecKind : uint8_t { none, int8, int4, sign };

}  // namespace ferry
