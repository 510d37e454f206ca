#include "step_timeline.h"

#include <algorithm>
#include <limits>

#include "ferry/aio.h"
#include "ferry/error.h"
#include "planner/recording/recorder.h"
#include "planner/work.h"
#include "train/stack/device_needs.h"

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

// The places where ranks of stages meet: between neighbours, for a tied table, and at the end.
class MeetingPoints {
public:
    explicit MeetingPoints(size_t stages) : stages_(stages) {
        for (size_t s = 0; s + 1 < stages; ++s) all_.push_back({s, s + 1});
        all_.push_back({0, stages - 1});
        all_.emplace_back();
        for (size_t s = 0; s < stages; ++s) all_.back().push_back(s);
    }
    std::span<const std::vector<size_t>> all() const { return all_; }
    int of(size_t stage, const Task& task) const {
        if (cost::row_of(task).of_all_stages) return static_cast<int>(all_.size()) - 1;
        if (!cost::passes(task)) return swap::kAlone;
        switch (static_cast<cost::StageLink>(task.flags)) {
            case cost::StageLink::previous:
                return stage == 0 ? ends() : static_cast<int>(stage) - 1;
            case cost::StageLink::next:
                return stage + 1 == stages_ ? ends() : static_cast<int>(stage);
            case cost::StageLink::table:
                return ends();
        }
        bug("no such link");
    }

private:
    // The first stage and the last one: of two by the same way as all else.
    int ends() const { return stages_ == 2 ? 0 : static_cast<int>(stages_) - 1; }
    const size_t stages_;
    std::vector<std::vector<size_t>> all_{};
};

}  // namespace

std::vector<swap::Timeline> predict_stages(std::span<const planner::Plan> plans,
                                           std::span<const swap::Schedule> first,
                                           std::span<const swap::Schedule> steady,
                                           const cost::Measurements& measured) {
    std::vector<swap::RankSteps> ranks;
    for (size_t s = 0; s < plans.size(); ++s)
        ranks.push_back({&first[s], &steady[s], plans[s].resources,
                         cost::cost_model(planner::work_of(plans[s]), measured)});
    const MeetingPoints points(plans.size());
    return swap::predict_together(ranks, points.all(), [&points](size_t rank, const Task& task) {
        return points.of(rank, task);
    });
}

namespace {

// In which a placement may run the step; of several ranks the plan's, which all of them have.
std::vector<int64_t> groups_of(const planner::Plan& plan) {
    if (!plan.partition.decides_alone()) return {plan.groups};
    return planner::group_counts(plan.micro_batches);
}

// The mean format of the state that this rank updates, and how far the formats are from it.
struct MeanState {
    double elements = 0;
    cost::ElementBytes element{};
    BoundInput::Parts parts{};
};
MeanState mean_state_of(const planner::Plan& plan) {
    MeanState mean{.element = cost::element_bytes(plan.state, plan.compute, plan.wire)};
    double bytes = 0;
    std::vector<cost::ElementBytes> formats;
    for (const planner::Chunk& chunk : plan.chunks) {
        if (!chunk.trainable) continue;
        mean.elements += static_cast<double>(chunk.count);
        bytes += static_cast<double>(chunk.format.bytes(chunk.count));
        formats.push_back(cost::element_bytes(chunk.format, plan.compute, plan.wire));
    }
    const auto differs = [&](const cost::ElementBytes& e) {
        return e.state != formats.front().state;
    };
    if (formats.empty() || std::ranges::none_of(formats, differs)) {
        if (!formats.empty()) mean.element = formats.front();
        return mean;
    }
    mean.element.state = bytes / mean.elements;
    const double of_mean = mean.element.state_and_gradient(), updated = mean.element.updated();
    constexpr double kInfinite = std::numeric_limits<double>::infinity();
    BoundInput::Parts parts{.most_elements = 0,
                            .least_elements = kInfinite,
                            .most_updated = 0,
                            .least_updated = kInfinite};
    for (const cost::ElementBytes& e : formats) {
        const double fit = of_mean / e.state_and_gradient(), moved = fit * e.updated() / updated;
        parts.most_elements = std::max(parts.most_elements, fit);
        parts.least_elements = std::min(parts.least_elements, fit);
        parts.most_updated = std::max(parts.most_updated, moved);
        parts.least_updated = std::min(parts.least_updated, moved);
    }
    mean.parts = parts;
    return mean;
}

double accumulator_bytes(const planner::Plan& plan) {
    int64_t elements = 0;
    for (const model::Layer& layer : plan.layers) elements += layer.trainable_elements;
    return cost::accumulator_bytes(static_cast<double>(elements));
}

}  // namespace

Bound bound_of(const BudgetConfig& budgets, const planner::Plan& plan, const model::Shape& shape,
               const swap::Schedule& step, const cost::Measurements& measured,
               Exchanged exchanged) {
    FERRY_CHECK(exchanged != Exchanged::nothing, "a local step has no bound");
    constexpr double kInfinite = std::numeric_limits<double>::infinity();
    const auto room = [](int64_t budget, int64_t taken) {
        return budget == kUnlimited ? kInfinite : static_cast<double>(budget - taken);
    };
    // A saved activation takes memory where it is saved; elsewhere it is computed once more.
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
    const int64_t inputs_there = plan.inputs_on_device() * bytes_of(Class::activation);
    // Each micro-batch of a group has these in any placement: its tokens and its activations.
    const int64_t each_bytes = bytes_of(Class::tokens) + bytes_of(Class::activation);
    const int64_t fixed_bytes = plan.device_overhead_bytes + device_buffer_bytes(plan) -
                                saved_bytes - inputs_there - plan.group_size() * each_bytes;
    const int64_t blocks = plan.blocks();
    const MeanState state = mean_state_of(plan);
    BoundInput input{
        .kernel_seconds = kernel_s,
        .saving = saving,
        .parameters = state.elements,
        .element = state.element,
        .parts = state.parts,
        .accumulator_bytes = accumulator_bytes(plan),
        .comm = cost::comm_traffic(plan.layers, plan.partition, plan.compute, plan.wire, exchanged),
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
            // At the first group's visit: later ones may have less to read, as codes.
            if (plan.partition.keeps_second_shards()) w.read_bytes /= static_cast<double>(groups);
        }
        input.input_bytes = static_cast<double>(blocks * size * bytes_of(Class::activation));
        input.groups = static_cast<double>(groups);
        input.device_bytes = room(budgets.device_bytes, fixed_bytes + size * each_bytes);
        const Bound found = cost::lower_bound(input, best.seconds);
        if (found.seconds < best.seconds) best = found;
    }
    return best;
}

Bound bound_by_peaks(const BudgetConfig& budgets, const planner::Plan& plan,
                     const model::Decoder& decoder, const swap::Schedule& step,
                     cost::Measurements measured, Exchanged exchanged) {
    const cost::Rates peaks{measured.product_flops_per_s, measured.device_copy_bytes_per_s};
    if (peaks.flops_per_s == 0 || peaks.bytes_per_s == 0) return {};
    measured.kernels =
        cost::assumed_times(step, planner::work_of(plan), decoder.numerics().tokens(),
                            most_saved_flops(decoder), peaks);
    measured.device_bytes_per_s = std::max(measured.device_bytes_per_s, peaks.bytes_per_s);
    return bound_of(budgets, plan, decoder.shape(), step, measured, exchanged);
}

}  // namespace ferry::train
