// Measures what storage paths give: bandwidth over block size and depth, and the settings that the
// figures speak for. `ferry bench io`.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "bench_rows.h"
#include "tools/machine/io_load.h"
#include "tools/machine/io_settings.h"
#include "tools/machine/io_site.h"

namespace ferry::tools {

struct IoBench {
    std::vector<std::string> paths{};
    std::vector<AccessPattern> accesses{};
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
FileBytes file_bytes_of(const IoBench& bench);
constexpr int kRingsMax = 64;  // a path, as a volume takes

RigOptions rig_options(const IoBench& bench, const std::vector<std::string>& directories,
                       int64_t bytes_per_path, int depth);

struct BlockAndDepth {
    int64_t block_bytes = 0;
    int depth = 0;
};
// Those of a bench for which there is room in the files and in memory.
struct IoChoice {
    std::vector<BlockAndDepth> pairs{};
    std::vector<std::string> left_out{};  // the others, and what each lacks
    int64_t buffer_bytes = 0;             // that the largest of them needs

    bool has(int64_t block_bytes, int depth) const noexcept;
};
// Keeps those that fit with each of these numbers of paths at a time. Throws where none does.
IoChoice choose(const IoBench& bench, const std::vector<size_t>& paths, int64_t bytes_per_path);

// The ground of a bench: its directories, the files that fit into them, and the memory for them.
struct IoGround {
    // `together`: the numbers of paths that are used at a time.
    IoGround(const IoBench& bench, const std::vector<size_t>& together);

    IoSites sites;
    int64_t bytes;  // a path
    IoChoice choice;
    IoMemory memory;
};

struct IoPoint {
    size_t place = 0;  // index into IoResult::places
    AccessPattern access{};
    int64_t block_bytes = 0;
    int depth = 0;
    Sample sample{};
    bool direct = true;  // obtained
};

struct IoResult {
    std::vector<std::string> places{};  // the paths; where there are several, all of them together
    std::vector<IoPoint> points{};
    std::vector<IoSettings> settings{};  // one a path; empty unless read, write and mixed are known
    std::vector<std::string> left_out{};  // for want of room
    std::optional<Error> ended_by{};      // why the rest was not measured
};

// Ends early, with what it has, when interrupted or when something fails. Throws Error where
// nothing was measured before that.
IoResult measure_io(const IoBench& bench);
std::vector<BenchRow> rows_of(const IoResult& result);
std::string text_of(const IoSettings& settings);
// "read 1.00 MiB, depth 8", with ", buffered" where O_DIRECT was not obtained.
std::string name_of(AccessPattern access, int64_t block_bytes, int depth, bool direct);

}  // namespace ferry::tools
