#include "predict.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "device_needs.h"
#include "ferry/optim.h"
#include "state_io.h"

namespace ferry::train {
namespace {

using planner::Class;
using planner::Content;
using planner::TimedBy;
using swap::Cost;
using swap::Task;

// Whoever touches the bytes checks them: what an update reads from NVMe, and what it will write
// there.
double bytes_checked_by_update(const planner::Plan& plan, const Task& task) {
    if (!plan.verify) return 0;
    const planner::Chunk& chunk = plan.chunks[static_cast<size_t>(task.item)];
    const auto object_of = [&](Content content) {
        return content == Content::state    ? chunk.state
               : content == Content::weight ? chunk.weight
                                            : chunk.gradient;
    };
    int64_t checked = 0;
    for (const planner::OperandOf& operand : planner::row_of(task).operands) {
        const swap::Object& known = plan.objects[object_of(operand.content)];
        if (!operand.optional && known.home == swap::Tier::nvme) checked += known.bytes;
    }
    return static_cast<double>(checked);
}

// The part of the memory's bandwidth that moving this many of its bytes a second takes.
double part_of_dram(double bytes_per_s, const Machine& machine) {
    const double most = machine.links.dram_bytes_per_s;
    return most > 0 ? std::min(1.0, bytes_per_s / most) : 0;
}

// Piece by piece on the team's threads, at most at the rate of all memory.
Cost check_cost(double bytes, const Machine& machine) {
    if (bytes <= 0) return {};
    const double pieces = std::ceil(bytes / static_cast<double>(aio::kPieceBytes));
    const double threads = std::min<double>(machine.threads, pieces);
    double rate = threads * machine.check_bytes_per_s;
    if (machine.links.dram_bytes_per_s > 0) rate = std::min(rate, machine.links.dram_bytes_per_s);
    return {bytes / rate, {threads / machine.threads, 0, part_of_dram(rate, machine)}};
}

// An update on all cores and at the rate of all memory, then the checks.
Cost update_cost(double update_s, const Cost& checks) {
    const double seconds = update_s + checks.seconds;
    if (seconds <= 0) return {};
    const auto share = [&](double of_checks) {
        return (update_s + of_checks * checks.seconds) / seconds;
    };
    return {seconds, {share(checks.part[0]), 0, share(checks.part[2])}};
}

}  // namespace

bool is_update(const Task& task) {
    return task.verb == swap::Verb::kernel && planner::row_of(task).timed_by == TimedBy::update;
}

double bytes_of_update(const planner::Plan& plan, const Task& task) {
    if (!is_update(task)) return 0;
    return static_cast<double>(planner::row_of(task).bytes(planner::work_of(plan, task)));
}

swap::CostModel cost_model(const planner::Plan& plan, const KernelTimes& kernels,
                           const Machine& machine) {
    const double one = 1.0 / machine.threads, on_host = machine.computes_on_host ? 1 : 0;
    const LinkSpeeds& links = machine.links;
    // A GPU's copy reads or writes host memory, a copy in it does both.
    const double of_copies = part_of_dram((1 + on_host) * links.copy_bytes_per_s, machine);
    const double of_storage =
        part_of_dram(links.dram_per_nvme_byte * links.nvme_bytes_per_s, machine);
    const double storage_cores =
        std::min(1.0, one * links.cores_per_nvme_byte * links.nvme_bytes_per_s);
    // The library copies what comes from another rank; a slow network leaves the core alone.
    const double comm_core =
        on_host * one * std::min(1.0, comm_rate(links) / links.copy_bytes_per_s);
    return [=, &plan, &kernels](const Task& task) -> Cost {
        const auto bytes = static_cast<double>(task.bytes);
        switch (task.lane) {
            case swap::Lane::compute:
                if (is_update(task))
                    return {bytes_of_update(plan, task) / machine.links.device_bytes_per_s,
                            {on_host, 0, on_host}};
                return {kernels.of(task, plan), {on_host, 0, 0}};
            case swap::Lane::h2d:
            case swap::Lane::d2h:
                return {bytes / machine.links.copy_bytes_per_s, {on_host * one, 0, of_copies}};
            case swap::Lane::team:
                if (!is_update(task)) return {};  // tokens are copied: nothing beside the rest
                return update_cost(machine.update_overhead_s +
                                       bytes_of_update(plan, task) / machine.links.dram_bytes_per_s,
                                   check_cost(bytes_checked_by_update(plan, task), machine));
            case swap::Lane::check:
                return check_cost(bytes, machine);
            case swap::Lane::read:
            case swap::Lane::write:
                if (task.verb != swap::Verb::read && task.verb != swap::Verb::write) return {};
                return {bytes / machine.links.nvme_bytes_per_s, {storage_cores, 1, of_storage}};
            case swap::Lane::comm: {
                const double seconds = comm_seconds(bytes, 1, machine.links);
                const double moving =
                    bytes > 0 ? comm_seconds(bytes, 0, machine.links) / seconds : 0;
                return {seconds, {comm_core * moving, 0, 0}};
            }
        }
        bug("unknown lane");
    };
}

swap::Timeline predict_steps(const planner::Plan& plan, const swap::Schedule& first,
                             const swap::Schedule& steady, const Figures& figures) {
    return swap::predict(first, steady, plan.resources,
                         cost_model(plan, figures.kernels, figures.machine));
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
               const swap::Schedule& step, const Figures& figures) {
    constexpr double kInfinite = std::numeric_limits<double>::infinity();
    const auto room = [](int64_t budget, int64_t taken) {
        return budget == kUnlimited ? kInfinite : static_cast<double>(budget - taken);
    };
    // What blocks may keep takes memory only where it is kept, and where it is not it is computed
    // once more.
    double kernel_s = figures.kernels.sum(step, plan);
    model::OfSaved<BoundInput::Keeping> keeping{};
    int64_t saved_bytes = 0;
    for (const model::Saved what : model::kAllKept) {
        const planner::Buffers& buffers =
            plan.buffers[static_cast<size_t>(planner::class_of(what))];
        saved_bytes += buffers.bytes * buffers.count;
        for (const Task& task : step.tasks) {
            if (task.lane != swap::Lane::compute ||
                planner::row_of(task).timed_by != TimedBy::flags)
                continue;
            const double saved = figures.kernels.saved_by(what, task, plan);
            keeping[at(what)].seconds += saved;
            if ((task.flags & planner::flag_of(what)) != 0) kernel_s += saved;
        }
    }
    // The kernels need their device buffers in any placement, but for block inputs that stay and
    // what blocks keep, of which a group has as many as micro-batches; the host is all free to
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
        .keeping = keeping,
        .parameters = static_cast<double>(plan.leaves * optim::kLeaf),
        .weight_bytes = static_cast<double>(size_of(plan.compute)),
        .wire_bytes = static_cast<double>(size_of(plan.wire)),
        .state_bytes = static_cast<double>(plan.state.element_bytes()),
        .split = plan.state.split,
        .accumulator_bytes = accumulator_bytes(plan),
        .comm_bytes = comm_traffic(plan.layers, plan.partition, plan.compute, plan.wire),
        .host_bytes = room(budgets.host_bytes, 0),
        .nvme_bytes = budgets.nvme.empty() ? 0 : kInfinite,
        .device_is_host = figures.machine.computes_on_host,
        .speeds = figures.machine.links};
    Bound best{.seconds = kInfinite};
    for (const int64_t groups : groups_of(plan)) {
        const int64_t size = plan.micro_batches / groups;
        for (const model::Saved what : model::kAllKept)
            input.keeping[at(what)].bytes = static_cast<double>(bytes_of(planner::class_of(what)) *
                                                                size * plan.blocks_at_most());
        input.weights = weight_traffic(plan.layers, shape, size * plan.tokens, plan.compute);
        if (plan.partition.sharding.weights) {  // the rest comes from the other ranks
            WeightTraffic& w = input.weights;
            for (double* bytes : {&w.bytes, &w.frozen_bytes, &w.read_bytes})
                *bytes /= plan.partition.ranks;
        }
        input.input_bytes = static_cast<double>(blocks * size * bytes_of(Class::activation));
        input.groups = static_cast<double>(groups);
        input.device_bytes = room(budgets.device_bytes, fixed_bytes + size * each_bytes);
        const Bound found = lower_bound(input, best.seconds);
        if (found.seconds < best.seconds) best = found;
    }
    return best;
}

}  // namespace ferry::train
