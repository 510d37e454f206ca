// How far a long copy is, in words.
#pragma once

#include <cstdint>
#include <string>

namespace ferry {

// "1.50 GiB of 6.00 GiB (25 %), 1.20 GB/s, 4 s left"
std::string progress_text(int64_t bytes, int64_t of, double seconds);

}  // namespace ferry
