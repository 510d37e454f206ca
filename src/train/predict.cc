#include "predict.h"

#include <algorithm>
#include <limits>

#include "device_needs.h"
#include "ferry/aio.h"
#include "ferry/optim.h"
#include "planner/recorder.h"

namespace ferry::train {

using cost::Bound;
using cost::BoundInput;
using cost::TimedBy;
using cost::WeightTraffic;
using planner::Class;
using swap::Task;

static_assert(cost::kPieceBytes == aio::kPieceBytes);

swap::Timeline predict_steps(const planner::Plan& plan, const swap::Schedule& first,
                             const swap::Schedule& steady, const cost::Measurements& measured) {
    return swap::predict(first, steady, plan.resources,
                         cost::cost_model(planner::work_of(plan), measured));
}

namespace {

// In which a placement may run the step; of several ranks the plan's, which all of them have.
std::vector<int64_t> groups_of(const planner::Plan& plan) {
    if (!plan.partition.alone()) return {plan.groups};
    return planner::group_counts(plan.micro_batches);
}

double accumulator_bytes(const planner::Plan& plan) {
    int64_t elements = 0;
    for (const model::Layer& layer : plan.layers) elements += layer.trainable_elements;
    return 4 * static_cast<double>(elements);
}

}  // namespace

Bound bound_of(const BudgetConfig& budgets, const planner::Plan& plan, const model::Shape& shape,
               const swap::Schedule& step, const cost::Measurements& measured) {
    constexpr double kInfinite = std::numeric_limits<double>::infinity();
    const auto room = [](int64_t budget, int64_t taken) {
        return budget == kUnlimited ? kInfinite : static_cast<double>(budget - taken);
    };
    // What blocks may save takes memory only where it is saved, and where it is not it is computed
    // once more.
    const cost::WorkOf work_of = planner::work_of(plan);
    double kernel_s = measured.kernels.sum(step, work_of);
    model::OfSaved<BoundInput::Saving> saving{};
    int64_t saved_bytes = 0;
    for (const model::Saved what : model::kAllSaved) {
        const planner::Buffers& buffers =
            plan.buffers[static_cast<size_t>(planner::class_of(what))];
        saved_bytes += buffers.bytes * buffers.count;
        for (const Task& task : step.tasks) {
            if (task.lane != swap::Lane::compute || cost::row_of(task).timed_by != TimedBy::flags)
                continue;
            const double spared = measured.kernels.saved_by(what, task, work_of);
            saving[at(what)].seconds += spared;
            if ((task.flags & cost::flag_of(what)) != 0) kernel_s += spared;
        }
    }
    // The kernels need their device buffers in any placement, but for block inputs that stay and
    // what blocks save, of which a group has as many as micro-batches; the host is all free to
    // choose.
    const auto bytes_of = [&](Class c) { return plan.buffers[static_cast<size_t>(c)].bytes; };
    const int64_t inputs_there =
        std::ranges::count(plan.inputs, swap::kNoObject) * bytes_of(Class::activation);
    // Of each micro-batch of a group, in any placement: its tokens, and what it has come to.
    const int64_t each_bytes = bytes_of(Class::tokens) + bytes_of(Class::activation);
    const int64_t fixed_bytes = plan.device_overhead_bytes + device_buffer_bytes(plan) -
                                saved_bytes - inputs_there - plan.group_size() * each_bytes;
    const int64_t blocks = std::ssize(plan.layers) - 2;
    BoundInput input{
        .kernel_seconds = kernel_s,
        .saving = saving,
        .parameters = static_cast<double>(plan.leaves * optim::kLeaf),
        .element = cost::element_bytes(plan.state, plan.compute, plan.wire),
        .accumulator_bytes = accumulator_bytes(plan),
        .comm_bytes = cost::comm_traffic(plan.layers, plan.partition, plan.compute, plan.wire),
        .host_bytes = room(budgets.host_bytes, 0),
        .nvme_bytes = budgets.nvme.empty() ? 0 : kInfinite,
        .measured = measured};
    Bound best{.seconds = kInfinite};
    for (const int64_t groups : groups_of(plan)) {
        const int64_t size = plan.micro_batches / groups;
        for (const model::Saved what : model::kAllSaved)
            input.saving[at(what)].bytes = static_cast<double>(bytes_of(planner::class_of(what)) *
                                                               size * plan.blocks_at_most());
        input.weights = cost::weight_traffic(plan.layers, shape, size * plan.tokens, plan.compute,
                                             plan.partition);
        if (plan.partition.sharding.weights) {  // the rest comes from the other ranks
            WeightTraffic& w = input.weights;
            for (double* bytes : {&w.bytes, &w.frozen_bytes, &w.read_bytes})
                *bytes /= plan.partition.ranks;
        }
        input.input_bytes = static_cast<double>(blocks * size * bytes_of(Class::activation));
        input.groups = static_cast<double>(groups);
        input.device_bytes = room(budgets.device_bytes, fixed_bytes + size * each_bytes);
        const Bound found = cost::lower_bound(input, best.seconds);
        if (found.seconds < best.seconds) best = found;
    }
    return best;
}

}  // namespace ferry::train
