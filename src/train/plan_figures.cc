#include "plan_figures.h"

#include <spdlog/fmt/fmt.h>
#include <sys/stat.h>

#include <algorithm>
#include <set>

#include "base/log.h"
#include "measure.h"
#include "volume_options.h"

namespace ferry::train {
namespace {

using model::LayerKind;
using planner::Op;

// Of the sizes that were timed the longest: one more gradient than another layer of its kind needs,
// and everything recomputed.
double longest(const KernelTimes& times, Op op, LayerKind layer) {
    double found = 0;
    for (const auto& [kind, seconds] : times.seconds) {
        if (kind[0] != static_cast<int64_t>(op) || kind[1] != static_cast<int64_t>(layer)) continue;
        double all = seconds;
        for (const model::Saved what : model::kAllKept) {
            const bool kept = planner::row_of(op).timed_by == planner::TimedBy::flags &&
                              (kind[2] & planner::flag_of(what)) != 0;
            all += kept ? times.saved_s[at(what)] : 0;
        }
        found = std::max(found, all);
    }
    return found;
}

// What takes time beside the products: of an operation that has some a micro-batch's residual
// stream, read and written, for operands are read while they are multiplied.
double bytes_beside(const planner::Row& row, const planner::Work& work) {
    return static_cast<double>(row.flops ? 2 * work.input_bytes : row.bytes(work));
}

}  // namespace

KernelTimes assumed_times(const swap::Schedule& step, const planner::Plan& plan, int64_t tokens,
                          const model::OfSaved<double>& saved_flops, double flops_per_s) {
    KernelTimes found;
    for (const model::Saved what : model::kAllKept)
        found.saved_s[at(what)] = saved_flops[at(what)] / flops_per_s;
    for (const swap::Task& task : step.tasks) {
        if (!is_timed(task)) continue;
        const planner::Row& row = planner::row_of(task);
        planner::Work work = planner::work_of(plan, task);
        work.tokens = tokens;
        work.saved_flops = saved_flops;
        const double flops = row.flops ? row.flops(work) : 0;
        found.seconds[kind_of(task, plan)] =
            flops / flops_per_s + bytes_beside(row, work) / kAssumedDeviceBytesPerS;
    }
    return found;
}

planner::MachineFigures assumed_figures(DeviceKind device, const std::vector<NvmePath>& paths) {
    constexpr dev_t kMemory = 0;  // no drive has this number
    // A file in memory takes one writer at a time, and a server has cores for several.
    const int64_t writers = device == DeviceKind::cuda ? 4 : 1;
    planner::MachineFigures found = planner::default_figures(device);
    const double drive = found.nvme_bytes_per_s, memory = found.dram_bytes_per_s / 10;
    std::set<dev_t> seen;
    double all = 0;
    int64_t at_once = 0;
    for (const NvmePath& path : paths) {
        struct stat status {};
        const bool in_memory = is_memory(path.path);
        const bool here = stat(path.path.c_str(), &status) == 0;
        if (here && !seen.insert(in_memory ? kMemory : status.st_dev).second) continue;
        all += in_memory ? memory : drive;
        at_once += in_memory ? writers : 1;
    }
    if (all > 0) found.nvme_bytes_per_s = all;
    found.nvme_at_once = std::max<int64_t>(at_once, 1);
    return found;
}

double dram_per_stored_byte(const Config& config) {
    double moved = 0, stored = 0;
    for (const NvmePath& path : config.budgets.nvme) {
        const double rate = assumed_figures(config.device, {path}).nvme_bytes_per_s;
        moved += rate * (is_memory(path.path) ? 2 : 1);
        stored += rate;
    }
    return stored > 0 ? moved / stored : 1;
}

planner::MachineFigures planning_figures(const planner::PlanRequest& request,
                                         const std::vector<model::Layer>& layers,
                                         const std::optional<Machine>& machine,
                                         const std::optional<KernelTimes>& kernels,
                                         int local_ranks) {
    planner::MachineFigures found = assumed_figures(request.device, request.budgets.nvme);
    if (machine) {
        const Machine mine = shared_by(*machine, local_ranks);
        found.copy_bytes_per_s = mine.links.copy_bytes_per_s;
        found.dram_bytes_per_s = mine.links.dram_bytes_per_s;
        found.device_bytes_per_s = mine.links.device_bytes_per_s;
        if (mine.links.nvme_bytes_per_s > 0) found.nvme_bytes_per_s = mine.links.nvme_bytes_per_s;
        found.update_overhead_s = mine.update_overhead_s;
        found.out_of_place = mine.out_of_place;
        found.device_beside = !mine.computes_on_host;
    }
    if (kernels) {
        const auto micro_batches = static_cast<double>(request.micro_batches);
        const auto blocks =
            static_cast<double>(std::ranges::count(layers, LayerKind::block, &model::Layer::kind));
        const auto of = [&](Op op, LayerKind layer) { return longest(*kernels, op, layer); };
        found.forward_s = micro_batches * blocks * of(Op::forward, LayerKind::block);
        found.backward_s = micro_batches * (blocks * of(Op::backward, LayerKind::block) +
                                            of(Op::head, LayerKind::head));
        found.saved_s = kernels->saved_s;
    }
    return found;
}

planner::MachineFigures planning_figures(const planner::PlanRequest& request,
                                         const std::vector<model::Layer>& layers,
                                         const Figures* figures, int local_ranks) {
    if (!figures) return assumed_figures(request.device, request.budgets.nvme);
    return planning_figures(request, layers, figures->machine, figures->kernels, local_ranks);
}

Machine shared_by(Machine machine, int ranks) {
    machine.links.nvme_bytes_per_s /= ranks;
    machine.links.dram_bytes_per_s /= ranks;
    return machine;
}

Figures shared_by(Figures of_machine, int ranks) {
    of_machine.machine = shared_by(of_machine.machine, ranks);
    return of_machine;
}

std::string_view default_figures_name(const Config& config) {
    return config.device == DeviceKind::cuda ? "server with a GPU" : "small machine";
}

void log_planned_by(const Figures* figures, const Config& config) {
    if (figures) return log_info("planned by the figures of this machine's file");
    log_info("planned by the default figures of a " + std::string(default_figures_name(config)) +
             "; `ferry bench --all --save FILE` measures this one's, --machine FILE plans by them");
}

std::string unlike_assumed(const Config& config, const LinkSpeeds& measured) {
    constexpr double kFar = 2;
    const planner::MachineFigures assumed = assumed_figures(config.device, config.budgets.nvme);
    std::string found;
    const auto compare = [&found](std::string_view link, double is, double was) {
        if (is == 0 || (is < kFar * was && was < kFar * is)) return;
        found += fmt::format("{}{} {:.3g} GB/s instead of {:.3g}", found.empty() ? "" : ", ", link,
                             is / 1e9, was / 1e9);
    };
    compare("storage", measured.nvme_bytes_per_s, assumed.nvme_bytes_per_s);
    compare("copies", measured.copy_bytes_per_s, assumed.copy_bytes_per_s);
    compare("updates", measured.dram_bytes_per_s, assumed.dram_bytes_per_s);
    return found;
}

void log_unlike_assumed(const Config& config, const LinkSpeeds& measured) {
    const std::string found = unlike_assumed(config, measured);
    if (config.device != DeviceKind::cuda || found.empty()) return;
    log_info("this machine is far from what the run was planned by: " + found +
             "; `ferry bench --all --save FILE --config CONFIG`, then --machine FILE, plans by "
             "what it does");
}

}  // namespace ferry::train
