// Near misses of known words.
#pragma once

#include <span>
#include <string>
#include <string_view>

namespace ferry {

// The word of `known` nearest to `word` by edit distance; empty when none is near, unless it may be
// however far.
std::string nearest_word(std::string_view word, std::span<const std::string> known,
                         bool however_far = false);

}  // namespace ferry
