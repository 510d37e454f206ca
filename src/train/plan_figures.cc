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
            const bool kept = op == Op::backward && (kind[2] & planner::flag_of(what)) != 0;
            all += kept ? times.saved_s[at(what)] : 0;
        }
        found = std::max(found, all);
    }
    return found;
}

bool computes_again(const swap::Task& task, model::Saved what) {
    return static_cast<Op>(task.op) == Op::backward && (task.flags & planner::flag_of(what)) == 0;
}

// Passes over a block's attention: forward one, backward two, and one where it is computed again.
double passes(const swap::Task& task, const model::Layer& layer) {
    if (layer.kind != LayerKind::block) return 0;
    if (static_cast<Op>(task.op) == Op::forward) return 1;
    if (static_cast<Op>(task.op) != Op::backward) return 0;
    return computes_again(task, model::Saved::attention) ? 3 : 2;
}

// Multiplications and additions of one token with a layer's weights, as often as the kernel does
// them; a tied head multiplies with the table.
double operations(Op op, const planner::Plan& plan, const model::Layer& layer) {
    const bool head = layer.kind == LayerKind::head;
    const model::Layer& weights = head && plan.tied ? plan.layers.front() : layer;
    const double once = 2 * static_cast<double>(weights.elements);
    switch (op) {
        case Op::forward:
        case Op::head_loss:
            return once;
        case Op::head:
            return 3 * once;
        case Op::backward:
            return 4 * once;  // once more forward
        default:
            return 0;
    }
}

double bytes_moved(const swap::Task& task, const planner::Plan& plan) {
    switch (static_cast<Op>(task.op)) {
        case Op::round:
            return static_cast<double>(plan.chunks[static_cast<size_t>(task.item)].count *
                                       (4 + size_of(plan.wire)));
        case Op::add:
            return 3 * static_cast<double>(task.bytes);
        case Op::zero:
            return static_cast<double>(task.bytes);
        default:  // a micro-batch's residual stream, read and written
            return 2 * static_cast<double>(
                           plan.buffers[static_cast<size_t>(planner::Class::activation)].bytes);
    }
}

}  // namespace

KernelTimes assumed_times(const swap::Schedule& step, const planner::Plan& plan, int64_t tokens,
                          const model::OfSaved<double>& saved_flops, double flops_per_s) {
    KernelTimes found;
    for (const model::Saved what : model::kAllKept)
        found.saved_s[at(what)] = saved_flops[at(what)] / flops_per_s;
    const auto of = [&](model::Saved what) { return saved_flops[at(what)]; };
    for (const swap::Task& task : step.tasks) {
        if (!is_timed(task)) continue;
        const model::Layer& layer = plan.layers[static_cast<size_t>(task.layer)];
        const double flops =
            static_cast<double>(tokens) * operations(static_cast<Op>(task.op), plan, layer) +
            of(model::Saved::attention) * passes(task, layer) -
            (static_cast<Op>(task.op) == Op::backward && !computes_again(task, model::Saved::mlp)
                 ? of(model::Saved::mlp)
                 : 0);
        found.seconds[kind_of(task, plan)] =
            flops / flops_per_s + bytes_moved(task, plan) / kAssumedDeviceBytesPerS;
    }
    return found;
}

planner::MachineFigures assumed_figures(const Config& config) {
    constexpr dev_t kMemory = 0;  // no drive has this number
    // A file in memory takes one writer at a time, and a server has cores for several.
    const int64_t writers = config.device == "cuda" ? 4 : 1;
    planner::MachineFigures found = planner::default_figures(config);
    const double drive = found.nvme_bytes_per_s, memory = found.dram_bytes_per_s / 10;
    std::set<dev_t> seen;
    double all = 0;
    int64_t at_once = 0;
    for (const NvmePath& path : config.budgets.nvme) {
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
        Config alone = config;
        alone.budgets.nvme = {path};
        const double rate = assumed_figures(alone).nvme_bytes_per_s;
        moved += rate * (is_memory(path.path) ? 2 : 1);
        stored += rate;
    }
    return stored > 0 ? moved / stored : 1;
}

planner::MachineFigures planning_figures(const Config& config,
                                         const std::vector<model::Layer>& layers,
                                         const std::optional<Machine>& machine,
                                         const std::optional<KernelTimes>& kernels,
                                         int local_ranks) {
    planner::MachineFigures found = assumed_figures(config);
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
        const auto micro_batches = static_cast<double>(config.batch.micro_batches);
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

planner::MachineFigures planning_figures(const Config& config,
                                         const std::vector<model::Layer>& layers,
                                         const Figures* figures, int local_ranks) {
    if (!figures) return assumed_figures(config);
    return planning_figures(config, layers, figures->machine, figures->kernels, local_ranks);
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
    return config.device == "cuda" ? "server with a GPU" : "small machine";
}

void log_planned_by(const Figures* figures, const Config& config) {
    if (figures) return log_info("planned by the figures of this machine's file");
    log_info("planned by the default figures of a " + std::string(default_figures_name(config)) +
             "; `ferry bench --all --save FILE` measures this one's, --machine FILE plans by them");
}

std::string unlike_assumed(const Config& config, const LinkSpeeds& measured) {
    constexpr double kFar = 2;
    const planner::MachineFigures assumed = assumed_figures(config);
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
    if (config.device != "cuda" || found.empty()) return;
    log_info("this machine is far from what the run was planned by: " + found +
             "; `ferry bench --all --save FILE --config CONFIG`, then --machine FILE, plans by "
             "what it does");
}

}  // namespace ferry::train
