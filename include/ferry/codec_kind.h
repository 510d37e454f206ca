// The codecs of what ranks exchange. A configuration only names them; src/zero/codec.h has the
// formats.
#pragma once

#include <cstdint>

namespace ferry {

// sign: of the moments that 1-bit Adam exchanges; nobody asks for it by name.
enum class CodecKind : uint8_t { none, int8, int4, sign };

}  // namespace ferry
