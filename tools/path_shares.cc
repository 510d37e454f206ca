#include "path_shares.h"

#include <numeric>

namespace ferry::tools {

std::vector<double> path_shares(std::span<const NvmePath> paths, std::span<const double> rates,
                                int64_t bytes) {
    const std::vector<double> alike(paths.size(), 1.0);
    if (rates.empty()) rates = alike;
    std::vector<double> shares(paths.size(), 0.0);
    std::vector<bool> full(paths.size(), false);
    double left = 1, rate = std::accumulate(rates.begin(), rates.end(), 0.0);
    // A path that is full leaves its part to the others, which may fill the next.
    for (bool changed = bytes > 0; changed;) {
        changed = false;
        for (size_t p = 0; p < paths.size(); ++p) {
            const double room =
                static_cast<double>(paths[p].size_bytes) / static_cast<double>(bytes);
            if (full[p] || rate <= 0 || left * rates[p] / rate <= room) continue;
            full[p] = changed = true;
            shares[p] = room;
            left -= room;
            rate -= rates[p];
        }
    }
    for (size_t p = 0; p < paths.size(); ++p)
        if (!full[p] && rate > 0) shares[p] = left * rates[p] / rate;
    return shares;
}

}  // namespace ferry::tools
