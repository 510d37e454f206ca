#include "bench_io.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <optional>

#include "base/text.h"
#include "progress.h"
#include "tools/machine/io_site.h"
#include "tools/process/interrupt.h"

namespace ferry::tools {
namespace {

constexpr int kRounds = 3;      // runs of a point; its result is their median
constexpr int kSustained = 4;   // times as long as a point
constexpr int kCandidates = 3;  // settings tried: the best of the sweep, more rings, a backend
// Settings that reach so much of the best bandwidth are good enough. Of those the one with the
// least in flight is taken, as what is in flight is memory and waiting time.
constexpr double kGoodEnough = 0.95;
constexpr double kWorthAChange = 1.05;  // more rings or another backend must gain this much

constexpr AccessPattern kRead{Direction::read}, kWrite{Direction::write}, kMixed{Direction::mixed};
constexpr std::array kKinds{kRead, kWrite, kMixed};
constexpr int kStepsOfChoice =
    static_cast<int>(kKinds.size()) * kRounds * (kCandidates + kSustained);

Sample median_of(std::vector<Sample> samples) {
    std::sort(samples.begin(), samples.end(),
              [](const Sample& a, const Sample& b) { return a.gb_per_s() < b.gb_per_s(); });
    return samples[samples.size() / 2];
}

std::string describe(const IoPoint& point) {
    return name_of(point.access, point.block_bytes, point.depth, point.direct);
}

// The files or memory that these need and that is not there; empty: nothing.
std::string lacks(const RigOptions& options, int64_t block_bytes) {
    const int64_t files = file_bytes_needed(options, block_bytes);
    const int64_t buffers = operations_of(options) * block_bytes;
    const auto words = [](const char* what, int64_t needed, int64_t given) {
        return fmt::format("{} needed for {}, {} at hand", format_bytes(needed), what,
                           format_bytes(given));
    };
    if (files > options.bytes_per_path)
        return words("the files of a path", files, options.bytes_per_path);
    if (buffers > IoMemory::limit()) return words("buffers", buffers, IoMemory::limit());
    return {};
}

class Sweep {
public:
    explicit Sweep(const IoBench& bench)
        : bench_(bench),
          ground_(bench, {1, bench.paths.size()}),  // each path alone, and all together
          progress_(steps()) {
        result_.left_out = ground_.choice.left_out;
    }

    IoResult run() {
        try {
            measure_all();
        } catch (const Error& error) {
            if (result_.points.empty()) throw;
            result_.ended_by = error;
        }
        return std::move(result_);
    }

private:
    void measure_all() {
        for (const std::string& path : bench_.paths) {
            result_.places.push_back(path);
            sweep({ground_.sites.directories()[result_.places.size() - 1]});
        }
        if (bench_.paths.size() > 1 && !interrupted()) {
            result_.places.emplace_back("all together");
            sweep(ground_.sites.directories());
        }
        for (size_t p = 0; p < bench_.paths.size() && !interrupted(); ++p) choose_settings(p);
    }

    // Steps of the progress, each as long as a round.
    int steps() const {
        const size_t paths = bench_.paths.size(), places = paths + (paths > 1 ? 1 : 0);
        const size_t sweeps =
            places * ground_.choice.pairs.size() * kRounds * bench_.accesses.size();
        return static_cast<int>(sweeps + (chooses_settings() ? paths * kStepsOfChoice : 0));
    }
    bool chooses_settings() const {
        return std::all_of(kKinds.begin(), kKinds.end(), [&](const AccessPattern kind) {
            return std::find(bench_.accesses.begin(), bench_.accesses.end(), kind) !=
                   bench_.accesses.end();
        });
    }

    // Block sizes inside, so that each depth opens its volume once; rounds between them, so that a
    // moment's trouble hits one round of several points and not all rounds of one.
    void sweep(const std::vector<std::string>& directories) {
        for (const int depth : bench_.depths) {
            if (interrupted()) return;
            std::vector<IoPoint> points;
            for (const AccessPattern access : bench_.accesses) {
                for (const int64_t block : bench_.blocks)
                    if (ground_.choice.has(block, depth))
                        points.push_back({result_.places.size() - 1, access, block, depth});
            }
            if (points.empty()) continue;
            progress_.clear();
            Rig rig(rig_options(bench_, directories, ground_.bytes, depth), ground_.memory.bytes());
            for (IoPoint& point : points) point.direct = rig.direct();
            std::vector<std::vector<Sample>> samples(points.size());
            for (int round = 0; round < kRounds; ++round) {
                for (size_t i = 0; i < points.size() && !interrupted(); ++i) {
                    const Sample sample = measure(rig, points[i], bench_.seconds / kRounds);
                    // One that was cut short counts where there is no other.
                    const bool counts = !interrupted() || samples[i].empty();
                    if (counts && sample.operations > 0) samples[i].push_back(sample);
                }
            }
            for (size_t i = 0; i < points.size(); ++i) {
                if (samples[i].empty()) continue;
                points[i].sample = median_of(samples[i]);
                result_.points.push_back(points[i]);
            }
        }
    }

    Sample measure(Rig& rig, const IoPoint& point, double seconds) {
        const Sample sample = rig.run({.access = point.access,
                                       .block_bytes = point.block_bytes,
                                       .seconds = seconds,
                                       .integrity = bench_.integrity});
        progress_.show(++done_, fmt::format("{}: {} {:.2f} GB/s", result_.places[point.place],
                                            describe(point), sample.gb_per_s()));
        return sample;
    }

    double rate(size_t place, AccessPattern access, int64_t block, int depth) const {
        for (const IoPoint& point : result_.points) {
            if (point.place == place && point.access == access && point.block_bytes == block &&
                point.depth == depth)
                return point.sample.gb_per_s();
        }
        return 0;
    }

    double best_rate(size_t place, AccessPattern access) const {
        double best = 0;
        for (const IoPoint& point : result_.points) {
            if (point.place == place && point.access == access)
                best = std::max(best, point.sample.gb_per_s());
        }
        return best;
    }

    // The lowest share of the best that one of the three kinds gets with these settings.
    double share(size_t place, int64_t block, int depth) const {
        double lowest = 1;
        for (const AccessPattern access : kKinds) {
            const double best = best_rate(place, access);
            lowest = std::min(lowest, best > 0 ? rate(place, access, block, depth) / best : 0);
        }
        return lowest;
    }

    std::optional<std::pair<int64_t, int>> block_and_depth(size_t place) const {
        double best = 0;
        for (const int64_t block : bench_.blocks) {
            for (const int depth : bench_.depths) best = std::max(best, share(place, block, depth));
        }
        if (best == 0) return std::nullopt;  // not all three kinds were measured
        const double wanted = std::min(best, kGoodEnough);
        std::optional<std::pair<int64_t, int>> found;
        for (const int64_t block : bench_.blocks) {
            for (const int depth : bench_.depths) {
                if (share(place, block, depth) < wanted) continue;
                if (!found || block * depth < found->first * found->second)
                    found.emplace(block, depth);
            }
        }
        return found;
    }

    // For so many times as long as a point, which `what` is for.
    IoSettings sustained(size_t path, const IoBench& with, int64_t block, int times,
                         const char* what) {
        const RigOptions options = rig_options(with, {ground_.sites.directories()[path]},
                                               ground_.bytes, with.depths.front());
        progress_.clear();
        Rig rig(options, ground_.memory.bytes());
        const auto measured = [&](AccessPattern access) {
            const Load load{
                .access = access, .block_bytes = block, .seconds = times * bench_.seconds};
            const Sample sample = rig.run(load);
            progress_.show(done_ += times * kRounds,
                           fmt::format("{}: {}: {} {:.2f} GB/s", bench_.paths[path], what,
                                       name_of(access), sample.gb_per_s()));
            return sample;
        };
        const std::string absolute = absolute_path(bench_.paths[path]);
        return {.path = absolute,
                .file_system = file_system_of(absolute),
                .backend = std::string(rig.backend_name()),
                .block_bytes = block,
                .queue_depth = with.depths.front(),
                .rings = with.rings,
                .direct = rig.direct(),
                .read = measured(kRead),
                .write = measured(kWrite),
                .mixed = measured(kMixed)};
    }

    // Starts from the sweep, looks whether more rings or the other backend gain something, and
    // measures once more for longer.
    void choose_settings(size_t path) {
        const auto chosen = block_and_depth(path);
        if (!chosen) return;
        IoBench with = bench_;
        with.depths = {chosen->second};
        const auto try_with = [&](const IoBench& other) {
            const IoSettings found = sustained(path, other, chosen->first, 1, "rings and backends");
            return found.read.gb_per_s() + found.write.gb_per_s() + found.mixed.gb_per_s();
        };
        const int done_after = done_ + kStepsOfChoice;
        double best = try_with(with);
        std::array<IoBench, kCandidates - 1> others{with, with};
        others[0].rings = 2 * with.rings;
        others[1].backend = aio::BackendKind::posix;
        for (const IoBench& other : others) {
            const RigOptions options =
                rig_options(other, {bench_.paths[path]}, ground_.bytes, chosen->second);
            const bool possible =
                other.rings <= kRingsMax && lacks(options, chosen->first).empty() &&
                operations_of(options) * chosen->first <= std::ssize(ground_.memory.bytes());
            if (interrupted() || !possible) continue;
            const double gained = try_with(other);
            if (gained < kWorthAChange * best) continue;
            best = gained;
            with = other;
        }
        if (interrupted()) return;
        done_ = done_after - static_cast<int>(kKinds.size()) * kRounds * kSustained;
        const IoSettings settings = sustained(path, with, chosen->first, kSustained, "sustained");
        if (!interrupted()) result_.settings.push_back(settings);
    }

    const IoBench& bench_;
    IoGround ground_;
    Progress progress_;
    int done_ = 0;
    IoResult result_{};
};

}  // namespace

RigOptions rig_options(const IoBench& bench, const std::vector<std::string>& directories,
                       int64_t bytes_per_path, int depth) {
    return {.directories = directories,
            .bytes_per_path = bytes_per_path,
            .depth = depth,
            .rings = bench.rings,
            .backend = bench.backend,
            .direct = bench.direct,
            .hashers = bench.hashers};
}

bool IoChoice::has(int64_t block_bytes, int depth) const noexcept {
    return std::any_of(pairs.begin(), pairs.end(), [&](const BlockAndDepth& one) {
        return one.block_bytes == block_bytes && one.depth == depth;
    });
}

FileBytes file_bytes_of(const IoBench& bench) {
    if (bench.bytes_per_path == 0) return {.least = 4 * kSlotBytes, .most = kDefaultBytes};
    return {.least = bench.bytes_per_path,
            .most = bench.bytes_per_path,
            .remedy = "free some space, or lower --size"};
}

IoChoice choose(const IoBench& bench, const std::vector<size_t>& paths, int64_t bytes_per_path) {
    IoChoice choice;
    for (const int64_t block : bench.blocks) {
        for (const int depth : bench.depths) {
            std::string lack;
            int64_t buffers = 0;
            for (const size_t together : paths) {
                const RigOptions options =
                    rig_options(bench, std::vector<std::string>(together), bytes_per_path, depth);
                if (lack.empty()) lack = lacks(options, block);
                buffers = std::max(buffers, operations_of(options) * block);
            }
            if (!lack.empty()) {
                choice.left_out.push_back(
                    fmt::format("blocks of {}, depth {}: {}", format_bytes(block), depth, lack));
                continue;
            }
            choice.pairs.push_back({block, depth});
            choice.buffer_bytes = std::max(choice.buffer_bytes, buffers);
        }
    }
    if (choice.pairs.empty())
        throw Error(bench.bytes_per_path > 0 ? Trouble::usage : Trouble::does_not_fit,
                    {.what = "there is no room for any of these block sizes and depths",
                     .where = bench.paths.front(),
                     .measured = choice.left_out.front(),
                     .remedy = "raise --size or free some space; or lower --blocks, --depths, "
                               "--rings or --threads"});
    return choice;
}

IoGround::IoGround(const IoBench& bench, const std::vector<size_t>& together)
    : sites(bench.paths),
      bytes(sites.bytes_per_path(file_bytes_of(bench), kSlotBytes)),
      choice(choose(bench, together, bytes)),
      memory(choice.buffer_bytes) {}

std::string name_of(AccessPattern access, int64_t block_bytes, int depth, bool direct) {
    return fmt::format("{} {}, depth {}{}", name_of(access), format_bytes(block_bytes), depth,
                       direct ? "" : ", buffered");
}

IoResult measure_io(const IoBench& bench) { return Sweep(bench).run(); }

std::vector<BenchRow> rows_of(const IoResult& result) {
    std::vector<BenchRow> rows;
    for (const IoPoint& point : result.points) {
        const std::string place =
            result.places.size() > 1 ? result.places[point.place] + ": " : std::string();
        BenchRow row{.name = place + describe(point),
                     .value = point.sample.gb_per_s(),
                     .unit = "GB/s",
                     .more = {{"cpu s/GB", point.sample.cpu_s_per_gb()},
                              {"cpu us/op", point.sample.cpu_us_per_operation()}}};
        rows.push_back(std::move(row));
    }
    return rows;
}

std::string text_of(const IoSettings& settings) {
    return fmt::format(
        "{} ({}): blocks of {}, depth {}, {} ring{}, {}{}\n"
        "  sustained: read {:.2f} GB/s, write {:.2f} GB/s, mixed {:.2f} + {:.2f} GB/s; CPU {:.3f}, "
        "{:.3f}, {:.3f} s/GB\n",
        one_line(settings.path), settings.file_system, format_bytes(settings.block_bytes),
        settings.queue_depth, settings.rings, settings.rings == 1 ? "" : "s", settings.backend,
        settings.direct ? "" : ", buffered", settings.read.gb_per_s(), settings.write.gb_per_s(),
        static_cast<double>(settings.mixed.bytes_read) / settings.mixed.seconds * 1e-9,
        static_cast<double>(settings.mixed.bytes_written) / settings.mixed.seconds * 1e-9,
        settings.read.cpu_s_per_gb(), settings.write.cpu_s_per_gb(), settings.mixed.cpu_s_per_gb());
}

}  // namespace ferry::tools
