#include "predict.h"

namespace ferry::train {
namespace {

using planner::Op;
using swap::Cost;
using swap::Task;

double bytes_of_update(const planner::Plan& plan, const Task& task) {
    const planner::Chunk& chunk = plan.chunks[static_cast<size_t>(task.item)];
    const int64_t each = size_of(plan.wire) + size_of(plan.compute);
    return static_cast<double>(2 * plan.state_bytes(chunk) + chunk.count * each);
}

bool is_update(const Task& task) {
    const auto op = static_cast<Op>(task.op);
    return op == Op::update || op == Op::update_bet || op == Op::recast;
}

}  // namespace

swap::CostModel cost_model(const planner::Plan& plan, const KernelTimes& kernels,
                           const Machine& machine) {
    const double one = 1.0 / machine.threads, on_host = machine.computes_on_host ? 1 : 0;
    return [&plan, &kernels, machine, one, on_host](const Task& task) -> Cost {
        const auto bytes = static_cast<double>(task.bytes);
        switch (task.lane) {
            case swap::Lane::compute:
                return {kernels.of(task, plan), {on_host, 0, 0}};
            case swap::Lane::h2d:
            case swap::Lane::d2h:
                return {bytes / machine.links.copy_bytes_per_s, {on_host * one, 0, 0}};
            case swap::Lane::team:
                if (!is_update(task)) return {};  // tokens are copied: nothing beside the rest
                return {bytes_of_update(plan, task) / machine.links.dram_bytes_per_s, {1, 0, 0}};
            case swap::Lane::check:
                return {bytes / machine.check_bytes_per_s, {one, 0, 0}};
            case swap::Lane::read:
            case swap::Lane::write:
                if (task.verb != swap::Verb::read && task.verb != swap::Verb::write) return {};
                return {bytes / machine.links.nvme_bytes_per_s, {0, 1, 0}};
        }
        bug("unknown lane");
    };
}

}  // namespace ferry::train
