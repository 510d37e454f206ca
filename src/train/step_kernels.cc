#include "step_kernels.h"

#include <algorithm>

#include "model_of.h"
#include "planner/recorder.h"
#include "state_io.h"

namespace ferry::train {

using planner::Chunk;
using planner::Op;
using swap::Call;
using swap::Tier;

namespace {

float* floats(std::byte* bytes) { return reinterpret_cast<float*>(bytes); }
const int32_t* ints(std::byte* bytes) { return reinterpret_cast<const int32_t*>(bytes); }

}  // namespace

StepKernels::StepKernels(const planner::Plan& plan, NodeTeams& teams, const StepModel& model)
    : plan_(plan), teams_(teams), model_(model) {}

void StepKernels::run(const Call& call) noexcept {
    const swap::Task& task = *call.task;
    try {
        if (!model_.workers || task.lane != swap::Lane::team) return dispatch(call);
        model_.workers->record({.name = name_of(static_cast<Op>(task.op)),
                                .bytes = task.bytes,
                                .step = states_[call.step].step,
                                .layer = task.layer,
                                .item = task.item},
                               [&] { dispatch(call); });
    } catch (const Error& error) {
        Problem problem = error.problem();
        problem.where += (problem.where.empty() ? "" : ", ") + describe(call);
        call.store->fail(Error(error.trouble(), std::move(problem)));
    } catch (const std::exception& error) {
        call.store->fail(Error(Trouble::internal, {.what = error.what()}));
    }
}

void StepKernels::dispatch(const Call& call) {
    switch (static_cast<Op>(call.task->op)) {
        case Op::load_tokens:
        case Op::load_evaluation:
            return load(call);
        case Op::update:
        case Op::update_speculative:
            return update(call);
        case Op::recast:
            return recast(call);
        default:
            return compute(call);
    }
}

std::string StepKernels::describe(const Call& call) const {
    const swap::Task& task = *call.task;
    std::string text = "step " + std::to_string(states_[call.step].step);
    if (task.layer >= 0) text += ", " + layer_name(plan_.layers, task.layer);
    if (task.verb == swap::Verb::kernel)
        text += ", " + std::string(name_of(static_cast<Op>(task.op)));
    return text;
}

void StepKernels::load(const Call& call) {
    const auto tokens = static_cast<size_t>(model_.decoder->numerics().tokens());
    auto* first = reinterpret_cast<int32_t*>(call.at[0]);
    const MicroBatch out{{first, tokens}, {first + tokens, tokens}};
    if (static_cast<Op>(call.task->op) == Op::load_evaluation) {
        // The schedule's step is the number of held-back micro-batches before it.
        const int64_t number = call.step + call.task->item;
        model_.loader->fill_evaluation(number, out);
        if (number >= model_.evaluation_micro_batches) std::ranges::fill(out.targets, -1);
        evaluation_targets_ += std::ranges::count_if(out.targets, [](int32_t t) { return t >= 0; });
    } else {
        model_.loader->fill(states_[call.step].step, call.task->item, out);
    }
}

void StepKernels::compute(const Call& call) {
    const swap::Task& task = *call.task;
    const auto& at = call.at;
    const int64_t block = task.layer - 1;
    switch (static_cast<Op>(task.op)) {
        case Op::embed:
            return model_.decoder->embed(ints(at[0]), at[1], at[2]);
        case Op::forward:
            return forward(call);
        case Op::head:
        case Op::head_loss:
            return head(call);
        case Op::backward:
            return model_.decoder->backward(block, at[0], at[1], at[2],
                                            (task.flags & planner::kNeedsDx) != 0, floats(at[3]),
                                            at[4], {at[5], at[6]});
        case Op::embed_backward:
            return model_.decoder->embed_backward(ints(at[0]), at[1], floats(at[2]));
        case Op::zero:
            return model_.ops->fill_zero(at[0], task.bytes);
        case Op::add:
            return model_.ops->add(floats(at[0]), floats(at[1]), task.bytes / 4);
        case Op::round: {
            const Chunk& chunk = plan_.chunks[static_cast<size_t>(task.item)];
            return model_.ops->round_gradient(floats(at[0]), chunk.count, plan_.wire, at[1],
                                              floats(at[2]));
        }
        case Op::cut:
            return cut(call);
        case Op::sum: {
            const Chunk& chunk = plan_.chunks[static_cast<size_t>(task.item)];
            const auto pieces =
                ops::ConstView::of(at[0], plan_.wire, plan_.partition.ranks, chunk.count);
            return model_.ops->sum_gradient(pieces, at[1], floats(at[2]));
        }
        default:
            bug("not a compute kernel");
    }
}

// Of every rank's shard the run that lies as the chunk does in its owner's, in rank order.
void StepKernels::cut(const Call& call) {
    const Chunk& chunk = plan_.chunks[static_cast<size_t>(call.task->item)];
    const zero::Partition& partition = plan_.partition;
    const model::Segment& segment =
        zero::segment_of(plan_.layers[static_cast<size_t>(chunk.layer)], chunk.first);
    const int64_t within = chunk.first - partition.shard(segment, chunk.owner).first;
    const int64_t rows = chunk.count / optim::kLeaf;  // so that every thread has some
    for (int rank = 0; rank < partition.ranks; ++rank) {
        const float* from = floats(call.at[0]) + partition.shard(segment, rank).first + within;
        std::byte* to = call.at[1] + rank * chunk.count * size_of(plan_.wire);
        model_.ops->cast(ops::ConstView::of(from, DType::f32, rows, optim::kLeaf),
                         ops::View::of(to, plan_.wire, rows, optim::kLeaf));
    }
}

void StepKernels::forward(const Call& call) {
    const auto& at = call.at;
    auto* nonfinite = reinterpret_cast<uint32_t*>(at[4] + plan_.nonfinite_offset());
    const int64_t layer = call.task->layer;
    model_.decoder->forward(layer - 1, at[0], at[1], at[2], nonfinite + layer, at[3],
                            {at[5], at[6]});
}

void StepKernels::head(const Call& call) {
    const auto& at = call.at;
    const int32_t* targets = ints(at[3]) + model_.decoder->numerics().tokens();
    double* loss_sum = reinterpret_cast<double*>(at[8]) + call.task->item;
    if (static_cast<Op>(call.task->op) == Op::head_loss) {
        // The schedule's step is the number of held-back micro-batches before it.
        const auto before = static_cast<int64_t>(call.step) + call.task->item;
        const int64_t token = before * model_.decoder->numerics().tokens();
        return model_.decoder->head_loss(
            at[0], at[1], at[2], targets, loss_sum, at[7],
            [&](int64_t first, ops::ConstView logits) { keep(token + first, logits); });
    }
    model_.decoder->head(at[0], at[1], at[2], targets, states_[call.step].gradient_scale, at[4],
                         floats(at[5]), floats(at[6]), loss_sum, at[7]);
}

void StepKernels::keep(int64_t token, ops::ConstView logits) {
    const int64_t room = std::ssize(logits_) / logits.cols - token;
    if (room <= 0) return;
    const int64_t rows = std::min(room, logits.rows);
    model_.ops->copy_out(
        logits.row_range(0, rows),
        ops::View::of(logits_.data() + token * logits.cols, DType::f32, rows, logits.cols));
}

// Whoever touches the bytes checks them: state and gradient that came from NVMe, before the update.
bool StepKernels::intact(const Call& call, swap::ObjectId object, const std::byte* bytes) const {
    const swap::Object& known = plan_.objects[object];
    return known.home != Tier::nvme ||
           call.store->verify(object, {bytes, static_cast<size_t>(known.bytes)});
}

void StepKernels::seal(const Call& call, swap::ObjectId object, const std::byte* bytes) const {
    const swap::Object& known = plan_.objects[object];
    if (known.home == Tier::nvme)
        call.store->seal(object, {bytes, static_cast<size_t>(known.bytes)});
}

void StepKernels::update(const Call& call) {
    const Chunk& chunk = plan_.chunks[static_cast<size_t>(call.task->item)];
    if (!intact(call, chunk.state, call.at[0]) || !intact(call, chunk.gradient, call.at[2])) return;
    if (plan_.state.split && !intact(call, chunk.weight, call.at[4])) return;
    const bool speculative = static_cast<Op>(call.task->op) == Op::update_speculative;
    // A committed update finishes the step before the schedule's own.
    const StepState& state = states_[speculative ? call.step : call.step - 1];
    optim::Span span = state_span(plan_, chunk.count, call.at[0], call.at[1]);
    span.gradient = call.at[2];
    span.gradient_type = plan_.wire;
    span.weight = call.at[3];
    span.weight_type = plan_.compute;
    span.weight_in = reinterpret_cast<const uint16_t*>(call.at[4]);
    span.layer = static_cast<uint32_t>(chunk.layer);
    span.element = chunk.first;
    apply(call, span,
          (speculative ? state.speculative : state.after_outcome)[chunk.decays ? 1 : 0]);
    seal(call, chunk.state, call.at[1]);
    seal(call, chunk.weight, call.at[3]);
}

void StepKernels::apply(const Call& call, const optim::Span& span, const optim::Scalars& scalars) {
    if (call.task->lane == swap::Lane::team) return optim::update(teams_, span, scalars);
    // One arena on one node, and beside the team lane's thread, which alone may ask each node.
    if (model_.device->kind() == DeviceKind::cpu) return optim::update(teams_.all(), span, scalars);
    optim::cuda::update(span, scalars, model_.device->stream(StreamKind::compute).native());
}

void StepKernels::recast(const Call& call) {
    const Chunk& chunk = plan_.chunks[static_cast<size_t>(call.task->item)];
    if (!intact(call, chunk.state, call.at[0])) return;
    optim::recast(floats(call.at[0]), chunk.count, plan_.compute, call.at[1]);
    seal(call, chunk.weight, call.at[1]);
}

}  // namespace ferry::train
