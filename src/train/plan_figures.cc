#include "plan_figures.h"

#include <algorithm>

namespace ferry::train {
namespace {

using model::LayerKind;
using planner::Op;

// Of the sizes that were timed the longest: one more gradient than another layer of its kind needs.
double longest(const KernelTimes& times, Op op, LayerKind layer) {
    double found = 0;
    for (const auto& [kind, seconds] : times.seconds) {
        if (kind[0] == static_cast<int64_t>(op) && kind[1] == static_cast<int64_t>(layer))
            found = std::max(found, seconds);
    }
    return found;
}

}  // namespace

planner::MachineFigures planning_figures(const Config& config,
                                         const std::vector<model::Layer>& layers,
                                         const std::optional<Machine>& machine,
                                         const std::optional<KernelTimes>& kernels) {
    planner::MachineFigures found = planner::default_figures(config);
    if (machine) {
        found.copy_bytes_per_s = machine->links.copy_bytes_per_s;
        found.dram_bytes_per_s = machine->links.dram_bytes_per_s;
        if (machine->links.nvme_bytes_per_s > 0)
            found.nvme_bytes_per_s = machine->links.nvme_bytes_per_s;
        found.update_overhead_s = machine->update_overhead_s;
        found.out_of_place = machine->out_of_place;
        found.device_beside = !machine->computes_on_host;
    }
    if (kernels) {
        const auto micro_batches = static_cast<double>(config.batch.micro_batches);
        const auto blocks =
            static_cast<double>(std::ranges::count(layers, LayerKind::block, &model::Layer::kind));
        const auto of = [&](Op op, LayerKind layer) { return longest(*kernels, op, layer); };
        found.forward_s = micro_batches * blocks * of(Op::forward, LayerKind::block);
        found.backward_s = micro_batches * (blocks * of(Op::backward, LayerKind::block) +
                                            of(Op::head, LayerKind::head));
    }
    return found;
}

planner::MachineFigures planning_figures(const Config& config,
                                         const std::vector<model::Layer>& layers,
                                         const Figures* figures) {
    if (!figures) return planner::default_figures(config);
    return planning_figures(config, layers, figures->machine, figures->kernels);
}

}  // namespace ferry::train
