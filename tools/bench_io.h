// Measures what storage paths give: bandwidth over block size and depth, and the settings that the
// figures speak for. `ferry bench io`.
#pragma once

#include <string>
#include <vector>

#include "bench_rows.h"
#include "io_load.h"

namespace ferry::tools {

struct IoBench {
    std::vector<std::string> paths{};
    std::vector<Access> accesses{};
    std::vector<int64_t> blocks{};
    std::vector<int> depths{};
    int64_t bytes_per_path = 0;  // 0: as much as is free, at most kDefaultBytes
    double seconds = 0;          // a point; in a comparison a slice
    int rings = 1;
    int hashers = 1;
    int pairs = 15;  // comparison only
    aio::BackendKind backend = aio::BackendKind::automatic;
    bool direct = true, integrity = false;
};

constexpr int64_t kDefaultBytes = 2 * kGiB;

// The bytes of buffers that the largest depth and block need on `paths` paths.
int64_t buffer_bytes(const IoBench& bench, size_t paths);
RigOptions rig_options(const IoBench& bench, const std::vector<std::string>& directories,
                       int64_t bytes_per_path, int depth);

struct IoPoint {
    size_t place = 0;  // index into IoResult::places
    Access access{};
    int64_t block_bytes = 0;
    int depth = 0;
    Sample sample{};
};

// What a path does best with, and what it then sustains.
struct IoSettings {
    std::string path{}, file_system{}, backend{};
    int64_t block_bytes = 0;
    int queue_depth = 0, rings = 1;
    bool direct = true;
    Sample read{}, write{}, mixed{};
};

struct IoResult {
    std::vector<std::string> places{};  // the paths; where there are several, all of them together
    std::vector<IoPoint> points{};
    std::vector<IoSettings> settings{};  // one a path; empty unless read, write and mixed are known
};

// Ends early, with what it has, when interrupted. Throws Error.
IoResult measure_io(const IoBench& bench);
std::vector<Row> rows_of(const IoResult& result);
std::string text_of(const IoSettings& settings);

}  // namespace ferry::tools
