#include "figures.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <bit>

#include "base/log.h"
#include "io_site.h"
#include "path_shares.h"
#include "train/from_config.h"

namespace ferry::tools {
namespace {

// Of files on each path, within its size; and as much again is written to measure: a plan is not to
// wear a drive as its run would.
constexpr int64_t kSampleBytes = 256 * kMiB;
constexpr double kSampleSeconds = 0.5;
// What a GPU's context and this program's libraries took on an H200: 0.64 GiB.
constexpr int64_t kAssumedOverhead = 704 * kMiB;

// Reads and writes at once, with the configuration's own settings.
PathFigures measure_path(const Config& config, const NvmePath& path) {
    const IoSites sites({path.path});
    const FileBytes sample{.least = kSlotBytes, .most = std::min(path.size_bytes, kSampleBytes)};
    const auto largest = static_cast<int64_t>(
        std::bit_floor(static_cast<uint64_t>(std::min(config.io.block_bytes, kSlotBytes))));
    RigOptions options{.directories = sites.directories(),
                       .bytes_per_path = sites.bytes_per_path(sample, kSlotBytes),
                       .depth = std::min(config.io.queue_depth, 32),
                       .rings = config.io.rings,
                       .backend = train::backend_of(config.io.backend),
                       .direct = config.io.direct};
    const int64_t block = fit_into_files(options, largest);
    const IoMemory memory(operations_of(options) * block);
    Rig rig(options, memory.bytes());
    const Load load{.access = {Direction::mixed, false},
                    .block_bytes = block,
                    .seconds = kSampleSeconds,
                    .bytes_most = 2 * options.bytes_per_path};
    const Sample found = rig.run(load);
    return {.mixed_bytes_per_s = found.gb_per_s() * 1e9,
            .in_memory = file_system_of(path.path) == "tmpfs",
            .cores_per_byte = found.cpu_s_per_gb() * 1e-9};
}

// What measures between these ranks.
std::string comm_command(const FiguresOf& what, const train::RankCount& count,
                         const std::string& file) {
    return fmt::format("mpirun -n {} ferry bench comm --device {} --save {}", count.ranks,
                       what.device == "cpu" ? "cpu" : "cuda", file);
}

class Finder {
public:
    Finder(const Config& config, const planner::Plan& plan, const std::optional<MachineFile>& file)
        : config_(config), plan_(plan), file_(file) {}

    FoundFigures find(train::Forecaster& forecaster) {
        find_kernels(forecaster);
        find_comm(forecaster);
        find_paths(forecaster.count().on_a_host * plan_.nvme_bytes);
        return std::move(found_);
    }

private:
    void find_kernels(train::Forecaster& forecaster) {
        const FiguresOf what = identity_of(forecaster);
        const auto machine = file_ ? file_->machine(what) : std::nullopt;
        auto kernels = file_ ? file_->kernels(what) : std::nullopt;
        if (kernels && !forecaster.covers(plan_, *kernels)) kernels.reset();
        if (!forecaster.is_here()) {
            assume(forecaster, what, !machine, !kernels);
        } else if (!machine || !kernels) {
            found_.figures = forecaster.measure(plan_, train::Forecaster::Memory::of_plan);
            if (!machine) found_.measured.emplace_back("memory and copies");
            if (!kernels) found_.measured.emplace_back("this model's kernels");
        }
        if (machine) found_.figures.machine = *machine;
        if (kernels) found_.figures.kernels = *kernels;
    }

    void assume(const train::Forecaster& forecaster, const FiguresOf& what, bool links,
                bool kernels) {
        is_here_ = false;
        found_.figures = forecaster.assumed(plan_);
        if (links) found_.assumed.push_back("memory and copies beside " + what.device);
        if (kernels) found_.assumed.emplace_back("this model's kernels, by their operations");
        if (what.needs.overhead == kAssumedOverhead)
            found_.assumed.push_back("the GPU's context and libraries: " +
                                     format_bytes(kAssumedOverhead));
        if (what.device_bytes == kUnlimited)
            found_.assumed.emplace_back("as much memory of the GPU as budgets.device asks for");
        const auto known = file_ ? file_->gpu(forecaster.model_text()) : std::nullopt;
        if (!known || known->needs.scratch == 0)
            found_.assumed.push_back("scratch of the kernels: " + format_bytes(what.needs.scratch) +
                                     ", as the CPU's");
    }

    // Nobody measures between ranks but ranks.
    void find_comm(const train::Forecaster& forecaster) {
        const FiguresOf what = identity_of(forecaster);
        if (what.ranks.empty()) return;
        train::LinkSpeeds& links = found_.figures.machine.links;
        const auto known = file_ ? file_->comm(what) : std::nullopt;
        const CommFigures figures = known.value_or(CommFigures{links.copy_bytes_per_s, 0});
        links.comm_bytes_per_s = figures.bytes_per_s;
        links.comm_overhead_s = figures.overhead_s;
        if (!known)
            found_.assumed.push_back(fmt::format("{}: as fast as copies (`{}` measures it)",
                                                 what.ranks,
                                                 comm_command(what, forecaster.count(), "FILE")));
    }

    // `bytes`: stored on them, by all ranks of a host.
    void find_paths(int64_t bytes) {
        train::LinkSpeeds& links = found_.figures.machine.links;
        double bytes_per_s = 0, dram_bytes = 0, cores = 0;
        for (const NvmePath& path : config_.budgets.nvme) {
            const PathFigures figures = path_figures(path);
            const double rate = figures.mixed_bytes_per_s;
            // A device's DMA touches memory once, a copy into a file that is memory twice.
            dram_bytes += rate * (figures.in_memory ? 2 : 1);
            cores += rate * figures.cores_per_byte;
            bytes_per_s += rate;
            found_.path_rates.push_back(rate);
        }
        links.nvme_bytes_per_s = 0;
        if (bytes_per_s == 0) return found_.path_rates.clear();
        links.dram_per_nvme_byte = dram_bytes / bytes_per_s;
        links.cores_per_nvme_byte = cores / bytes_per_s;
        // All together are as fast as the one that is last: where one is full, another has more.
        const std::vector<double> shares =
            path_shares(config_.budgets.nvme, found_.path_rates, bytes);
        double slowest = 0;
        for (size_t p = 0; p < shares.size(); ++p)
            slowest = std::max(slowest, shares[p] > 0 ? shares[p] / found_.path_rates[p] : 0);
        links.nvme_bytes_per_s = slowest > 0 ? 1 / slowest : bytes_per_s;
    }

    PathFigures path_figures(const NvmePath& path) {
        if (const auto known = file_ ? file_->path(path.path) : std::nullopt) return *known;
        if (!is_here_) {
            found_.assumed.push_back(path.path);
            return {planner::default_figures(config_.device).nvme_bytes_per_s};
        }
        try {
            const PathFigures figures = measure_path(config_, path);
            found_.measured.push_back(path.path);
            return figures;
        } catch (const Error& error) {
            if (plan_.nvme_bytes > 0 && found_.missing.empty()) found_.missing = error.what();
            return {};
        }
    }

    const Config& config_;
    const planner::Plan& plan_;
    const std::optional<MachineFile>& file_;
    FoundFigures found_{};
    bool is_here_ = true;
};

// Of all paths together; 0: the file does not know all of them.
double storage_rate(const MachineFile& file, const Config& config) {
    double bytes_per_s = 0;
    for (const NvmePath& path : config.budgets.nvme) {
        const auto known = file.path(path.path);
        if (!known) return 0;
        bytes_per_s += known->mixed_bytes_per_s;
    }
    return bytes_per_s;
}

std::string all_command(const train::RankCount& count, const std::string& file) {
    std::string line = "ferry bench --all --config CONFIG --save " + file;
    if (count.ranks > 1) line += fmt::format(" --ranks {}", count.ranks);
    if (count.ranks > count.on_a_host) line += fmt::format(" --ranks-per-host {}", count.on_a_host);
    return line;
}

[[noreturn]] void lacks(const MachineFile& file, const std::string& what,
                        const std::string& command) {
    throw Error(Trouble::usage, {.what = "the machine file has no figures of " + what,
                                 .where = file.name(),
                                 .remedy = "measure them: " + command});
}

}  // namespace

FiguresOf identity_of(const train::Forecaster& forecaster) {
    const train::RankCount count = forecaster.count();
    return {.device = forecaster.device_text(),
            .kernels = forecaster.kernels_text(),
            .ranks = count.ranks > 1
                         ? ranks_text(count, forecaster.device_text() == "cpu" ? "mpi" : "nccl")
                         : "",
            .threads = forecaster.threads(),
            .device_bytes = forecaster.device_bytes(),
            .needs = forecaster.needs()};
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

std::unique_ptr<train::Forecaster> forecaster_for(const Config& config,
                                                  const train::RankCount& count,
                                                  const std::optional<MachineFile>& file) {
    if (config.device != DeviceKind::cuda || !file) return train::Forecaster::make(config, count);
    try {
        return train::Forecaster::make(config, count);
    } catch (const Error& error) {
        if (error.trouble() != Trouble::usage) throw;
        // What is wrong with the configuration itself is wrong there too, and says so again.
        auto absent = file->gpu(train::Forecaster::make(config, count, {})->model_text());
        if (!absent) throw;
        log_warn(std::string(error.what()) + "; planning for the " + absent->architecture + " of " +
                 file->name());
        if (absent->needs.overhead == 0) absent->needs.overhead = kAssumedOverhead;
        return train::Forecaster::make(config, count, *absent);
    }
}

FoundFigures figures_for(const Config& config, train::Forecaster& forecaster,
                         const planner::Plan& plan, const std::optional<MachineFile>& file) {
    return Finder(config, plan, file).find(forecaster);
}

std::string plan_by(const std::optional<MachineFile>& file, const Config& config,
                    train::Forecaster& forecaster) {
    const std::string_view defaults = train::default_figures_name(config);
    if (!file)
        return fmt::format(
            "the default figures of a {}; --machine FILE plans by this one's, which "
            "ferry bench --all --save FILE measures",
            defaults);
    const FiguresOf what = identity_of(forecaster);
    std::optional<train::Machine> machine = file->machine(what);
    const auto kernels = file->kernels(what);
    if (machine) machine->links.nvme_bytes_per_s = storage_rate(*file, config);
    forecaster.plan_by(machine, kernels);
    std::vector<std::string> lacking;
    if (!machine) lacking.emplace_back("memory and copies");
    if (!kernels) lacking.emplace_back("this model's kernels");
    if (machine && !config.budgets.nvme.empty() && machine->links.nvme_bytes_per_s == 0)
        lacking.emplace_back("storage");
    std::string text = "the figures of " + file->name();
    if (!lacking.empty())
        text += fmt::format(", but for {}: those by default, of a {}", fmt::join(lacking, ", "),
                            defaults);
    return text;
}

train::Figures known_figures(const Config& config, const train::RankCount& count,
                             const MachineFile& file) {
    const auto forecaster = train::Forecaster::make(config, count);
    const planner::Plan plan = forecaster->plan(train::request_of(config));
    const FiguresOf what = identity_of(*forecaster);
    const std::string measure_all = all_command(count, file.name());
    if (!file.machine(what))
        lacks(file, fmt::format("{} with {} threads", what.device, what.threads), measure_all);
    const auto kernels = file.kernels(what);
    if (!kernels || !forecaster->covers(plan, *kernels))
        lacks(file, "this model's kernels", measure_all);
    for (const NvmePath& path : config.budgets.nvme) {
        if (plan.nvme_bytes > 0 && !file.path(path.path)) lacks(file, path.path, measure_all);
    }
    if (!what.ranks.empty() && !file.comm(what))
        lacks(file, what.ranks, comm_command(what, count, file.name()));
    return figures_for(config, *forecaster, plan, file).figures;
}

}  // namespace ferry::tools
