// The middle of measured values.
#pragma once

#include <algorithm>
#include <vector>

namespace ferry {

// Of an even count the mean of the two in the middle; 0 of none.
inline double median(std::vector<double> values) {
    if (values.empty()) return 0;
    std::sort(values.begin(), values.end());
    return (values[(values.size() - 1) / 2] + values[values.size() / 2]) / 2;
}

}  // namespace ferry
