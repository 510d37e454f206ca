#include "cost/drives.h"

#include <algorithm>
#include <numeric>

namespace ferry::cost {
namespace {

// Paths that share a drive, by their index, and the one of them that is fastest.
struct Group {
    std::vector<size_t> paths{};
    const Path* fastest = nullptr;
};
std::vector<Group> drives_of(std::span<const Path> paths) {
    std::vector<Group> groups;
    for (size_t p = 0; p < paths.size(); ++p) {
        const Path& path = paths[p];
        auto group = std::ranges::find_if(groups, [&path](const Group& known) {
            return path.drive >= 0 && known.fastest->drive == path.drive;
        });
        if (group == groups.end()) group = groups.insert(groups.end(), {{}, &path});
        group->paths.push_back(p);
        if (path.bytes_per_s > group->fastest->bytes_per_s) group->fastest = &path;
    }
    return groups;
}

}  // namespace

std::vector<double> path_rates(std::span<const Path> paths) {
    std::vector<double> rates(paths.size());
    for (const Group& drive : drives_of(paths)) {
        for (const size_t p : drive.paths)
            rates[p] = drive.fastest->bytes_per_s / static_cast<double>(drive.paths.size());
    }
    return rates;
}

std::vector<double> path_shares(std::span<const int64_t> size_bytes, std::span<const double> rates,
                                int64_t bytes) {
    const std::vector<double> alike(size_bytes.size(), 1.0);
    if (rates.empty()) rates = alike;
    std::vector<double> shares(size_bytes.size(), 0.0);
    std::vector<bool> full(size_bytes.size(), false);
    double left = 1, rate = std::accumulate(rates.begin(), rates.end(), 0.0);
    // A path that is full leaves its part to the others, which may fill the next.
    for (bool changed = bytes > 0; changed;) {
        changed = false;
        for (size_t p = 0; p < size_bytes.size(); ++p) {
            const double room = static_cast<double>(size_bytes[p]) / static_cast<double>(bytes);
            if (full[p] || rate <= 0 || left * rates[p] / rate <= room) continue;
            full[p] = changed = true;
            shares[p] = room;
            left -= room;
            rate -= rates[p];
        }
    }
    for (size_t p = 0; p < size_bytes.size(); ++p)
        if (!full[p] && rate > 0) shares[p] = left * rates[p] / rate;
    return shares;
}

Drive one_drive(std::span<const Path> paths, int64_t stored_bytes) {
    const std::vector<Group> drives = drives_of(paths);
    Drive all;
    double dram_bytes = 0, cores = 0;
    for (const Group& drive : drives) {
        const Path& fastest = *drive.fastest;
        all.bytes_per_s += fastest.bytes_per_s;
        all.at_once += fastest.at_once;
        dram_bytes += fastest.bytes_per_s * (fastest.in_memory ? 2 : 1);
        cores += fastest.bytes_per_s * fastest.cores_per_byte;
    }
    if (all.bytes_per_s <= 0) return {};
    all.dram_per_byte = dram_bytes / all.bytes_per_s;
    all.cores_per_byte = cores / all.bytes_per_s;
    if (stored_bytes == 0) return all;
    // Where one is full, another has more.
    std::vector<int64_t> sizes;
    for (const Path& path : paths) sizes.push_back(path.size_bytes);
    const std::vector<double> shares = path_shares(sizes, path_rates(paths), stored_bytes);
    double slowest = 0;
    for (const Group& drive : drives) {
        double share = 0;
        for (const size_t p : drive.paths) share += shares[p];
        if (share > 0) slowest = std::max(slowest, share / drive.fastest->bytes_per_s);
    }
    if (slowest > 0) all.bytes_per_s = 1 / slowest;
    return all;
}

Measurements with_drive(Measurements measured, const Drive& drive) {
    measured.nvme_bytes_per_s = drive.bytes_per_s;
    measured.nvme_at_once = drive.at_once;
    measured.dram_per_nvme_byte = drive.dram_per_byte;
    measured.cores_per_nvme_byte = drive.cores_per_byte;
    measured.storage_of = Of::host;
    return measured;
}

}  // namespace ferry::cost
