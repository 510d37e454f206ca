// Several storage paths as one drive.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "cost/measurements.h"

namespace ferry::cost {

struct Path {
    double bytes_per_s = 0;     // reads and writes mixed, alone
    int64_t drive = -1;         // paths of the same number lie on one drive; below 0: on its own
    bool in_memory = false;     // tmpfs: a copy passes through memory twice, DMA once
    double cores_per_byte = 0;  // seconds of one
    int64_t at_once = 1;        // chunks read, and as many written, that this rate takes
    int64_t size_bytes = INT64_MAX;
};

struct Drive {
    double bytes_per_s = 0;
    int64_t at_once = 0;
    double dram_per_byte = 1;
    double cores_per_byte = 0;
};

// A drive's rate divides over its paths. In bytes a second, of each path.
std::vector<double> path_rates(std::span<const Path> paths);

// The parts of `bytes` that lie on each path. They go by `rates` (relative; empty: all are equal),
// as far as the sizes go. All that is stored moves equally often, so what is moved divides
// likewise.
std::vector<double> path_shares(std::span<const int64_t> size_bytes, std::span<const double> rates,
                                int64_t bytes);

// All paths as one drive, with `stored_bytes` spread over them. It is as fast as the drive that is
// done last. 0: not known; then the drives' rates add up.
Drive one_drive(std::span<const Path> paths, int64_t stored_bytes = 0);

// The measurements with this drive as the storage of all of a host's ranks.
Measurements with_drive(Measurements measured, const Drive& drive);

}  // namespace ferry::cost
