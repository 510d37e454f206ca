#include "find_measurements.h"

#include <spdlog/fmt/fmt.h>

#include <sys/stat.h>

#include <algorithm>
#include <bit>

#include "base/files.h"
#include "base/log.h"
#include "io_load.h"
#include "io_site.h"
#include "train/measuring/planning_measurements.h"
#include "train/setup/from_config.h"

namespace ferry::tools {
namespace {

// Size of the files on each path, within the path's; as much again is written to measure. A plan is
// not to wear a drive as its run would.
constexpr int64_t kSampleBytes = 256 * kMiB;
constexpr double kSampleSeconds = 0.5;
// A GPU's context and this program's libraries took 0.64 GiB on an H200.
constexpr int64_t kAssumedOverhead = 704 * kMiB;

// Reads and writes at once, with the configuration's own settings.
cost::Path measure_path(const Config& config, const NvmePath& path) {
    const IoSites sites({path.path});
    const FileBytes sample{.least = kSlotBytes, .most = std::min(path.size_bytes, kSampleBytes)};
    const auto largest = static_cast<int64_t>(
        std::bit_floor(static_cast<uint64_t>(std::min(config.io.block_bytes, kSlotBytes))));
    RigOptions options{.directories = sites.directories(),
                       .bytes_per_path = sites.bytes_per_path(sample, kSlotBytes),
                       .depth = std::min(config.io.queue_depth, 32),
                       .rings = config.io.rings,
                       .backend = config.io.backend,
                       .direct = config.io.direct};
    const int64_t block = fit_into_files(options, largest);
    const IoMemory memory(operations_of(options) * block);
    Rig rig(options, memory.bytes());
    const Load load{.access = {Direction::mixed, false},
                    .block_bytes = block,
                    .seconds = kSampleSeconds,
                    .bytes_most = 2 * options.bytes_per_path};
    const Sample found = rig.run(load);
    struct stat status {};
    const bool here = stat(path.path.c_str(), &status) == 0;
    return {.bytes_per_s = found.gb_per_s() * 1e9,
            .drive = here ? static_cast<int64_t>(status.st_dev) : -1,
            .in_memory = is_memory(path.path),
            .cores_per_byte = found.cpu_s_per_gb() * 1e-9,
            .at_once = config.io.rings};
}

// The command that measures between these ranks.
std::string comm_command(const MeasurementsOf& what, const train::RankCount& count,
                         const std::string& file) {
    const auto option = [](const char* name, int ranks) {
        return ranks > 1 ? fmt::format(" --{} {}", name, ranks) : std::string();
    };
    return fmt::format("mpirun -n {} ferry bench comm --device {}{}{}{} --save {}", count.ranks,
                       what.kernels.on_host() ? "cpu" : "cuda",
                       option("tensor", what.groups.tensor),
                       option("sequence", what.groups.sequence),
                       option("ranks-per-host", what.ranks_per_host), file);
}

// Files that do not say how many chunks a path takes at once are of a time when all were taken to
// be as by default.
std::optional<cost::Path> known_path(const MachineFile& file, const Config& config,
                                     const NvmePath& path) {
    auto known = file.path(path.path);
    if (known && known->at_once == 0)
        known->at_once = train::assumed_paths(config.device, {path}).front().at_once;
    return known;
}

cost::Measurements known_of(const std::optional<MachineFile>& file, const MeasurementsOf& what) {
    if (file) return file->measurements(what);
    return {.threads = what.kernels.threads, .computes_on_host = what.kernels.on_host()};
}

// Of ranks that were timed at the same time; empty: one alone.
std::string at_once_text(const train::Predictor& predictor, int ranks) {
    const int asked = predictor.at_once(), threads = predictor.threads(), cores = predictor.cores();
    if (asked == 1) return {};
    std::string text = fmt::format("{} rank{} of {} thread{}", ranks, ranks == 1 ? "" : "s",
                                   threads, threads == 1 ? "" : "s");
    if (ranks < asked)
        text += fmt::format(" of the {} that share this machine: {}", asked,
                            predictor.short_at_once() == train::Predictor::Short::of_memory
                                ? "buffers of more would take over half of its memory"
                                : "more would take over four turns on its cores");
    if (ranks * threads > cores)
        text += fmt::format(
            ", which take turns on its {} core{}: with a core for each thread a "
            "step is shorter",
            cores, cores == 1 ? "" : "s");
    return text;
}

class Finder {
public:
    Finder(const Config& config, const planner::Plan& plan, const std::optional<MachineFile>& file)
        : config_(config), plan_(plan), file_(file) {}

    FoundMeasurements find(train::Predictor& predictor) {
        find_kernels(predictor);
        find_comm(predictor);
        find_paths(predictor.count().on_a_host * plan_.nvme_bytes);
        return std::move(found_);
    }

private:
    void find_kernels(train::Predictor& predictor) {
        const MeasurementsOf what = what_is_measured(predictor);
        cost::Measurements known = known_of(file_, what);
        if (!predictor.covers_choice(plan_, known.kernels)) known.kernels = {};
        const bool memory = known.dram_bytes_per_s > 0, copies = known.copy_bytes_per_s > 0,
                   kernels = !known.kernels.seconds.empty();
        const char* links = memory ? "copies" : copies ? "memory" : "memory and copies";
        if (!predictor.is_here()) return assume(predictor, what, std::move(known), links);
        found_.measurements = std::move(known);
        found_.ranks_at_once = what.at_once;
        if (memory && copies && kernels) return;
        const cost::Measurements measured =
            predictor.measure(plan_, train::Predictor::Memory::of_plan);
        if (!memory || !copies) found_.measured.emplace_back(links);
        if (!kernels) {
            found_.measured.emplace_back("this model's kernels");
            found_.measurements.kernels = measured.kernels;
            found_.measurements.product_flops_per_s = measured.product_flops_per_s;
        }
        found_.measurements = cost::known_or(std::move(found_.measurements), measured);
        found_.ranks_at_once = predictor.measured_at_once();
        found_.at_once = at_once_text(predictor, found_.ranks_at_once);
    }

    void assume(const train::Predictor& predictor, const MeasurementsOf& what,
                cost::Measurements known, const char* links) {
        is_here_ = false;
        if (known.dram_bytes_per_s == 0 || known.copy_bytes_per_s == 0)
            found_.assumed.push_back(fmt::format("{} beside {}", links, what.kernels.device));
        const bool kernels = known.kernels.seconds.empty();
        found_.measurements = cost::known_or(std::move(known), predictor.assumed(plan_));
        if (kernels) {
            found_.measurements =
                predictor.with_assumed_kernels(std::move(found_.measurements), plan_);
            found_.assumed.emplace_back("this model's kernels, by their operations");
        }
        if (what.needs.overhead == kAssumedOverhead)
            found_.assumed.push_back("the GPU's context and libraries: " +
                                     format_bytes(kAssumedOverhead));
        if (what.device_bytes == kUnlimited)
            found_.assumed.emplace_back("as much memory of the GPU as budgets.device asks for");
        const auto gpu = file_ ? file_->gpu(what.kernels) : std::nullopt;
        if (!gpu || gpu->needs.scratch == 0)
            found_.assumed.push_back("scratch of the kernels: " + format_bytes(what.needs.scratch) +
                                     ", as the CPU's");
    }

    // Nobody measures between ranks but ranks.
    void find_comm(const train::Predictor& predictor) {
        const MeasurementsOf what = what_is_measured(predictor);
        cost::Measurements& measurements = found_.measurements;
        if (what.count.ranks == 1 || measurements.comm_bytes_per_s > 0) return;
        measurements.comm_bytes_per_s = measurements.copy_bytes_per_s;
        found_.assumed.push_back(fmt::format("{}: as fast as copies (`{}` measures it)",
                                             text_of_ranks(what),
                                             comm_command(what, predictor.count(), "FILE")));
    }

    // `bytes`: stored on them, by all ranks of a host.
    void find_paths(int64_t bytes) {
        std::vector<cost::Path> paths;
        for (const NvmePath& path : config_.budgets.nvme) {
            paths.push_back(find_path(path));
            paths.back().size_bytes = path.size_bytes;
        }
        const cost::Drive drive = cost::one_drive(paths, bytes);
        found_.measurements = cost::with_drive(std::move(found_.measurements), drive);
        if (drive.bytes_per_s > 0) found_.path_rates = cost::path_rates(paths);
    }

    cost::Path find_path(const NvmePath& path) {
        if (const auto known = file_ ? known_path(*file_, config_, path) : std::nullopt)
            return *known;
        if (!is_here_) {
            found_.assumed.push_back(path.path);
            return {.bytes_per_s = cost::default_measurements(config_.device).nvme_bytes_per_s};
        }
        try {
            const cost::Path found = measure_path(config_, path);
            found_.measured.push_back(path.path);
            return found;
        } catch (const Error& error) {
            if (plan_.nvme_bytes > 0 && found_.missing.empty()) found_.missing = error.what();
            return {};
        }
    }

    const Config& config_;
    const planner::Plan& plan_;
    const std::optional<MachineFile>& file_;
    FoundMeasurements found_{};
    bool is_here_ = true;
};

// All paths together; nothing where the file does not know all of them.
cost::Drive known_drive(const MachineFile& file, const Config& config) {
    std::vector<cost::Path> paths;
    for (const NvmePath& path : config.budgets.nvme) {
        const auto known = known_path(file, config, path);
        if (!known) return {};
        paths.push_back(*known);
    }
    return cost::one_drive(paths);
}

std::string all_command(const train::RankCount& count, const std::string& file) {
    std::string line = "ferry bench --all --config CONFIG --save " + file;
    if (count.ranks > 1) line += fmt::format(" --ranks {}", count.ranks);
    if (count.ranks > count.on_a_host) line += fmt::format(" --ranks-per-host {}", count.on_a_host);
    return line;
}

[[noreturn]] void lacks(const MachineFile& file, const std::string& what,
                        const std::string& command) {
    throw Error(Trouble::usage, {.what = "the machine file has no measurements of " + what,
                                 .where = file.name(),
                                 .remedy = "measure them: " + command});
}

}  // namespace

MeasurementsOf what_is_measured(const train::Predictor& predictor) {
    const cost::KernelsOf kernels = predictor.kernels_of();
    return {.kernels = kernels,
            .count = predictor.count(),
            .at_once = predictor.at_once(),
            .groups = predictor.groups(),
            .ranks_per_host = predictor.ranks_per_host(),
            .by = kernels.on_host() ? "mpi" : "nccl",
            .device_bytes = predictor.device_bytes(),
            .needs = predictor.needs()};
}

train::RankCount on_hosts(train::RankCount given) {
    if (given.on_a_host == 0) given.on_a_host = given.ranks;
    if (given.on_a_host <= given.ranks) return given;
    throw Error(Trouble::usage, {.what = "more ranks on a host than there are",
                                 .where = "--ranks-per-host",
                                 .measured = std::to_string(given.on_a_host),
                                 .limit = std::to_string(given.ranks) + " ranks (--ranks)",
                                 .remedy = "leave it out where one host has all of them"});
}

std::unique_ptr<train::Predictor> predictor_for(const Config& config, const train::RankCount& count,
                                                const std::optional<MachineFile>& file,
                                                bool says_so) {
    if (config.device != DeviceKind::cuda || !file) return train::Predictor::make(config, count);
    try {
        return train::Predictor::make(config, count);
    } catch (const Error& error) {
        if (error.trouble() != Trouble::usage) throw;
        // An error in the configuration itself is one there too, and is reported again.
        auto absent = file->gpu(train::Predictor::make(config, count, {})->kernels_of());
        if (!absent) throw;
        if (says_so)
            log_warn(std::string(error.what()) + "; planning for the " + absent->architecture +
                     " of " + file->name());
        if (absent->needs.overhead == 0) absent->needs.overhead = kAssumedOverhead;
        return train::Predictor::make(config, count, *absent);
    }
}

FoundMeasurements measurements_for(const Config& config, train::Predictor& predictor,
                                   const planner::Plan& plan,
                                   const std::optional<MachineFile>& file) {
    return Finder(config, plan, file).find(predictor);
}

void require_memory_to_measure(const train::Predictor& predictor,
                               const std::optional<MachineFile>& file) {
    if (!predictor.chooses() || !predictor.is_here()) return;
    const cost::Measurements known = known_of(file, what_is_measured(predictor));
    const bool links = known.dram_bytes_per_s > 0 && known.copy_bytes_per_s > 0;
    if (links && !known.kernels.seconds.empty() && predictor.covers_all(known.kernels)) return;
    predictor.require_memory_to_measure();
}

std::string plan_by(const std::optional<MachineFile>& file, const Config& config,
                    train::Predictor& predictor) {
    const std::string_view defaults = train::default_machine_name(config);
    if (!file)
        return fmt::format(
            "the defaults of a {}; --machine FILE plans by this one's, which "
            "ferry bench --all --save FILE measures",
            defaults);
    const cost::Measurements known = cost::with_drive(
        file->measurements(what_is_measured(predictor)), known_drive(*file, config));
    std::vector<std::string> lacking;
    if (known.dram_bytes_per_s == 0) lacking.emplace_back("memory");
    if (known.copy_bytes_per_s == 0) lacking.emplace_back("copies");
    if (known.kernels.seconds.empty()) lacking.emplace_back("this model's kernels");
    if (!config.budgets.nvme.empty() && known.nvme_bytes_per_s == 0)
        lacking.emplace_back("storage");
    predictor.plan_by(known);
    std::string text = "the measurements of " + file->name();
    if (!lacking.empty())
        text += fmt::format(", but for {}: those by default, of a {}", fmt::join(lacking, ", "),
                            defaults);
    return text;
}

cost::Measurements known_measurements(const Config& config, const train::RankCount& count,
                                      const MachineFile& file) {
    const auto predictor = train::Predictor::make(config, count);
    const planner::Plan plan = predictor->plan(train::request_of(config));
    const MeasurementsOf what = what_is_measured(*predictor);
    const std::string measure_all = all_command(count, file.name());
    const cost::Measurements known = file.measurements(what);
    if (known.dram_bytes_per_s == 0 || known.copy_bytes_per_s == 0)
        lacks(file, fmt::format("{} with {} threads", what.kernels.device, what.kernels.threads),
              measure_all);
    if (known.kernels.seconds.empty() || !predictor->covers_choice(plan, known.kernels))
        lacks(file, "this model's kernels", measure_all);
    for (const NvmePath& path : config.budgets.nvme) {
        if (plan.nvme_bytes > 0 && !file.path(path.path)) lacks(file, path.path, measure_all);
    }
    if (count.ranks > 1 && known.comm_bytes_per_s == 0)
        lacks(file, text_of_ranks(what), comm_command(what, count, file.name()));
    return measurements_for(config, *predictor, plan, file).measurements;
}

}  // namespace ferry::tools
