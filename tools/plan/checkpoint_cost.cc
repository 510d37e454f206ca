#include "checkpoint_cost.h"

#include <spdlog/fmt/fmt.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <thread>
#include <utility>
#include <vector>

#include "base/files.h"
#include "base/log.h"
#include "checkpoint/array_file.h"
#include "checkpoint/steps.h"
#include "cost/bound.h"
#include "ferry/error.h"
#include "ferry/executor.h"
#include "ferry/team.h"
#include "ferry/units.h"
#include "train/state/saving.h"
#include "train/step/momentum_schedule.h"

namespace ferry::tools {
namespace {

namespace fs = std::filesystem;
using cost::Link;

struct WriteRate {
    double bytes_per_s = 0;
    double file_seconds = 0;  // of a file, however small
};

double seconds_since(Nanos then, const Executor& executor) {
    return static_cast<double>(executor.now() - then) * 1e-9;
}

// Files as a checkpoint has them, side by side and flushed.
void write_files(const std::vector<std::string>& paths, int64_t bytes,
                 std::span<const std::byte> room, Team& team) {
    checkpoint::FileWriter writer(std::ssize(paths));
    std::vector<std::unique_ptr<checkpoint::ArrayFile>> files;
    files.reserve(paths.size());
    for (const std::string& path : paths)
        files.push_back(std::make_unique<checkpoint::ArrayFile>(
            writer, path, std::vector<checkpoint::ArrayInfo>{{"w", "U8", {bytes}, bytes}}));
    for (int64_t left = bytes; left > 0;) {
        const auto part = room.first(static_cast<size_t>(std::min(left, std::ssize(room))));
        std::vector<checkpoint::NextBytes> next;
        next.reserve(files.size());
        for (const auto& file : files) next.push_back({file.get(), part});
        checkpoint::write_side_by_side(std::move(next), team);
        left -= std::ssize(part);
    }
    for (const auto& file : files) file->finish();
}

// As a checkpoint of so many bytes is written there. None, with a warning, where nothing can be.
std::optional<WriteRate> rate_at(const std::string& directory, int64_t bytes, Team& team) {
    constexpr double kLongest = 2;  // seconds
    constexpr int64_t kPart = 4 * kMiB, kFile = 128 * kMiB, kFiles = 4;
    const auto executor = make_thread_executor();
    try {
        // A kill leaves what the next run removes.
        const DraftDirectory draft(fs::path(directory) / checkpoint::name_of_step(0));
        int64_t number = 0;
        const auto names = [&](int64_t count) {
            std::vector<std::string> paths;
            while (std::ssize(paths) < count)
                paths.push_back(fs::path(draft.draft()) / fmt::format("model-{}", number++));
            return paths;
        };
        const std::vector<std::byte> room(kPart, std::byte{0x5a});
        Nanos began = executor->now();
        write_files(names(1), 1, room, team);
        WriteRate rate{.file_seconds = seconds_since(began, *executor)};
        int64_t written = 0;
        began = executor->now();
        while (written == 0 || (written < bytes && seconds_since(began, *executor) < kLongest)) {
            const int64_t part = std::clamp<int64_t>(ceil_div(bytes - written, kFiles), 1, kFile);
            write_files(names(kFiles), part, room, team);
            written += kFiles * part;
        }
        const double files = static_cast<double>(number - 1) * rate.file_seconds,
                     seconds = seconds_since(began, *executor);
        // A small checkpoint is nothing but its files.
        rate.bytes_per_s =
            static_cast<double>(written) / std::max({seconds - files, seconds / 10, 1e-6});
        return rate;
    } catch (const Error& error) {
        log_warn("how fast a checkpoint is written cannot be measured: " +
                 std::string(error.what()));
        return std::nullopt;
    }
}

// How fast the team's threads copy memory that no cache holds.
double copied_per_second(int64_t bytes, Team& team) {
    constexpr int64_t kPart = kMiB, kMost = 256 * kMiB;
    const int64_t parts = ceil_div(std::min(bytes, kMost), kPart);
    std::vector<std::byte> from(static_cast<size_t>(parts * kPart), std::byte{1});
    std::vector<std::byte> to(from.size(), std::byte{2});
    const auto executor = make_thread_executor();
    const Nanos began = executor->now();
    team.parallel(parts, [&](int64_t part) {
        const auto at = static_cast<size_t>(part * kPart);
        std::memcpy(&to[at], &from[at], static_cast<size_t>(kPart));
    });
    return static_cast<double>(std::ssize(from)) / std::max(seconds_since(began, *executor), 1e-6);
}

// Whether a drive that holds state is the one that the checkpoint is written to.
bool shares_drive(const Config& config) {
    struct stat checkpoint {};
    if (::stat(config.checkpoint.dir.c_str(), &checkpoint) != 0) return false;
    return std::ranges::any_of(config.budgets.nvme, [&](const NvmePath& path) {
        struct stat drive {};
        return ::stat(path.path.c_str(), &drive) == 0 && drive.st_dev == checkpoint.st_dev;
    });
}

double seconds_of(const train::Prediction& prediction, Link link) {
    const auto found = std::ranges::find(prediction.links, link, &train::LinkPrediction::link);
    return found == prediction.links.end() ? 0 : found->seconds;
}

// The part of a step in which the drives would move its bytes, with nothing beside it.
double stored_share(const train::Prediction& prediction) {
    const double step = prediction.step_seconds;
    return step > 0 ? std::min(seconds_of(prediction, Link::nvme) / step, 1.0) : 0;
}

// A checkpoint is of finished updates: those of the step before it have no step beside them, and
// the step behind it no updates. `held_back`: what they wait while they hand state over, as far as
// the drives do not take longer.
double lost_overlap(const train::Prediction& prediction, double held_back) {
    constexpr auto kTeam = static_cast<size_t>(swap::Lane::team);
    const double updates = std::max(seconds_of(prediction, Link::nvme),
                                    prediction.timeline.busy_seconds[kTeam] + held_back);
    const double others = std::max({seconds_of(prediction, Link::compute),
                                    seconds_of(prediction, Link::host_to_device),
                                    seconds_of(prediction, Link::device_to_host)});
    return std::max(updates + others - prediction.step_seconds, 0.0);
}

// Of the state that updates change, what lies on NVMe.
double share_on_drives(const planner::Plan& plan) {
    int64_t all = 0, stored = 0;
    for (const planner::Chunk& chunk : plan.chunks) {
        if (!chunk.trainable) continue;
        all += chunk.count;
        if (plan.objects[chunk.state].home == swap::Tier::nvme) stored += chunk.count;
    }
    return all > 0 ? static_cast<double>(stored) / static_cast<double>(all) : 0;
}

// Of a checkpoint of so many bytes, what host memory holds. Ranks that read their parts have room
// for these; else the first rank's is all.
int64_t held_of(const Config& config, const planner::Plan& plan, const train::RankCount& count,
                int64_t bytes) {
    const std::optional<int64_t>& asked = config.checkpoint.memory_bytes;
    const int64_t left =
        std::max<int64_t>(config.budgets.host_bytes / count.on_a_host - plan.host_bytes, 0);
    if (count.ranks == 1 || !train::reads_own_part(plan))
        return std::min(asked.value_or(left), bytes);
    const int64_t own = train::own_checkpoint_bytes(plan);
    const int64_t room = std::min(asked ? *asked / count.on_a_host : left, own);
    return room == own ? bytes : std::min(room * count.ranks, bytes);
}

// Of a checkpoint's parts, each with nothing beside it.
struct Seconds {
    double write = 0;       // all of it
    double rest = 0;        // of that, what host memory has no room for
    double copy = 0;        // aside, in host memory, while whoever reads waits
    double read = 0;        // what lies on NVMe
    bool together = false;  // from the drive that it is written to

    // Of writing, while what lies on the same drive is read: both get half of it.
    double written_meanwhile() const {
        return together ? std::max(std::min(read, write), rest) : 0;
    }
    double waited() const {
        if (together) return std::max(copy, read + written_meanwhile());
        return std::max(read + copy, rest);
    }
    // While the remainder is written, steps that need the drive for more than half of their time
    // get half of it.
    double lost_beside(double share) const {
        if (!together || share <= 0.5) return 0;
        return 2 * std::max(write - written_meanwhile(), 0.0) * (1 - 0.5 / share);
    }
};

}  // namespace

std::optional<CheckpointCost> checkpoint_cost(const Config& config, const planner::Plan& plan,
                                              const std::vector<model::Layer>& layers,
                                              const train::RankCount& count,
                                              const PredictionReport* report) {
    const CheckpointConfig& saved = config.checkpoint;
    if (!train::saves_on_the_way(config)) return std::nullopt;
    const int64_t bytes = train::checkpoint_bytes(plan, layers, {.errors = plan.has_feedback()});
    const int64_t held = held_of(config, plan, count, bytes);
    // Of most checkpoints: by the clock, or behind an evaluation or a hash, none is handed over.
    const bool passes = train::passes_by(plan) && saved.every.steps > 0 &&
                        !train::drains_before_checkpoint(config, saved.every.steps) &&
                        (count.ranks == 1 || held == bytes);
    const int64_t on_drives = train::stored_checkpoint_bytes(plan);
    CheckpointCost cost{.bytes = bytes, .held = held, .stored = passes ? 0 : on_drives};
    const bool predicts = report && report->found.missing.empty();
    // Above a directory that is not there nobody would remove what a killed plan leaves.
    const bool knows = predicts && kind_of(saved.dir) == FileKind::directory &&
                       (on_drives == 0 || report->found.measurements.nvme_bytes_per_s > 0);
    if (!knows) return cost;
    const bool meanwhile = cost.held > 0 && train::reads_meanwhile(plan);
    const int threads = config.threads.value_or(
        static_cast<int>(std::max(1U, std::thread::hardware_concurrency())));
    Team team(meanwhile || passes ? std::min(threads, train::kMeanwhileThreads) : threads);
    const auto rate = rate_at(saved.dir, bytes, team);
    if (!rate) return cost;
    const auto all = static_cast<double>(bytes);
    Seconds takes{
        .write = all / rate->bytes_per_s + static_cast<double>(train::checkpoint_files(
                                               plan, layers, {.errors = plan.has_feedback()})) *
                                               rate->file_seconds,
        .rest = static_cast<double>(bytes - cost.held) / rate->bytes_per_s};
    // By the ranks of a host at once.
    const double copied = train::reads_own_part(plan) ? all * count.on_a_host / count.ranks : all;
    if (cost.held > 0)
        takes.copy = copied / copied_per_second(bytes, team) * (passes ? share_on_drives(plan) : 1);
    if (cost.stored > 0)
        takes.read = static_cast<double>(cost.stored) / report->found.measurements.nvme_bytes_per_s;
    takes.together = on_drives > 0 && shares_drive(config);
    // Updates that come by hand it over: another drive writes it beside them.
    if (passes && !takes.together)
        takes.rest = std::max(takes.rest - seconds_of(report->prediction, cost::Link::nvme), 0.0);
    const double step = report->prediction.step_seconds;
    cost.write_seconds = takes.write;
    const auto waited = [&] { return std::max(takes.waited() - (meanwhile ? step : 0), 0.0); };
    cost.waited_seconds = waited();
    // Where the drives take longer than updates and copies nobody else waits for these.
    const double held_back = passes ? std::exchange(takes.copy, 0.0) : 0;
    cost.slowed_seconds = waited() + lost_overlap(report->prediction, held_back) +
                          takes.lost_beside(stored_share(report->prediction));
    return cost;
}

std::string text_of(const CheckpointCost& cost) {
    const int64_t rest = cost.bytes - cost.held;
    std::string text = fmt::format("a checkpoint: {}, ", format_bytes(cost.bytes));
    if (rest == 0)
        text += "held in host memory while training goes on";
    else
        text += fmt::format(
            "{} of it held in host memory; training waits until the other {} are written "
            "(budgets.host, checkpoint.memory)",
            format_bytes(cost.held), format_bytes(rest));
    if (!cost.waited_seconds) return text + "\n";
    text += fmt::format("; written in {:.2g} s, of which training waits {:.2g}",
                        std::max(*cost.write_seconds, *cost.waited_seconds), *cost.waited_seconds);
    text += fmt::format("; it costs training {:.2g} s in all", *cost.slowed_seconds);
    return text + "\n";
}

nlohmann::json to_json(const CheckpointCost& cost) {
    const auto known = [](const std::optional<double>& value) {
        return value ? nlohmann::json(*value) : nlohmann::json();
    };
    return {{"bytes", cost.bytes},
            {"held_bytes", cost.held},
            {"stored_bytes", cost.stored},
            {"write_seconds", known(cost.write_seconds)},
            {"waited_seconds", known(cost.waited_seconds)},
            {"slowed_seconds", known(cost.slowed_seconds)},
            {"exchanges", train::name_of(zero::Exchanged::gradients)}};
}

}  // namespace ferry::tools
