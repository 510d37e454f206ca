// The codecs of what ranks exchange. A configuration only names them; src/zero/codec.h has the
// formats.
#pragma once

#include <cstdint>

namespace ferry {

enum class CodecKind : uint8_t { none, int8, int4 };

}  // namespace ferry
