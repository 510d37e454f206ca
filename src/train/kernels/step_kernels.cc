#include "step_kernels.h"

#include <algorithm>
#include <array>

#include "planner/recording/recorder.h"
#include "state_span.h"
#include "train/setup/model_of.h"
#include "weight_alone.h"

namespace ferry::train {

using cost::Op;
using planner::Chunk;
using swap::Call;
using swap::Tier;
namespace op = cost::op;

namespace {
// Elements a task of the team: handing it out costs nothing beside them.
constexpr int64_t kCodedTile = 8 * optim::kLeaf;

// Where a chunk lies in its owner's shard of a segment, and its likes in the other ranks' shards.
struct PlaceInShards {
    const model::Segment& segment;
    int64_t first;
};
PlaceInShards place_in_shards(const planner::Plan& plan, const Chunk& chunk) {
    const model::Segment& segment =
        zero::segment_of(plan.layers[static_cast<size_t>(chunk.layer)], chunk.first);
    return {segment, chunk.first - plan.partition.shard(segment, chunk.owner).first};
}
}  // namespace

StepKernels::StepKernels(const planner::Plan& plan, NodeTeams& teams, const StepModel& model)
    : plan_(plan), teams_(teams), model_(model) {
    int32_t longest = 1;
    for (const Chunk& chunk : plan.chunks) longest = std::max(longest, chunk.run);
    spans_of_device_.reserve(static_cast<size_t>(longest));
    const zero::Codec& weights = plan.partition.codecs.weights;
    if (on_gpu() && weights.on())
        beside_ = std::make_unique<zero::cuda::Beside>(weights, plan.compute);
}

void StepKernels::run(const Call& call) noexcept {
    const swap::Task& task = *call.task;
    try {
        if (!model_.workers || task.lane != swap::Lane::team) return dispatch(call);
        model_.workers->record({.name = cost::name_of(task),
                                .bytes = task.bytes,
                                .step = states_[call.sequence].step,
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

bool StepKernels::runs_beside(const swap::Task& task) const {
    if (listener_ || !updates_take_turns(teams_) || !cost::is_update(task)) return false;
    const auto op = static_cast<Op>(task.op);
    if ((op != Op::update && op != Op::update_speculative) || task.flags != 0) return false;
    return kind_of(plan_.chunks[static_cast<size_t>(task.item)]) != UpdateKind::matrix;
}

void StepKernels::dispatch(const Call& call) {
    op::run(op::Kernels{}, *call.task, call.at,
            [&](const auto& operands) { kernel(call, operands); });
}

std::string StepKernels::describe(const Call& call) const {
    const swap::Task& task = *call.task;
    std::string text = "step " + std::to_string(states_[call.sequence].step);
    if (task.layer >= 0) text += ", " + layer_name(plan_.layers, task.layer);
    if (task.verb == swap::Verb::kernel) text += ", " + std::string(cost::name_of(task));
    return text;
}

const Chunk& StepKernels::chunk_of(const Call& call) const {
    return plan_.chunks[static_cast<size_t>(call.task->item)];
}

// ---------------------------------------------------------------- tokens

MicroBatch StepKernels::loaded(int32_t* tokens) const {
    const model::Numerics& numerics = model_.decoder->numerics();
    const auto count = static_cast<size_t>(numerics.tokens());
    const size_t documents = plan_.documents ? static_cast<size_t>(numerics.whole_tokens()) : 0;
    int32_t* behind = tokens + 2 * count;
    return {
        .tokens = {tokens, count},
        .targets = {tokens + count, count},
        .document_start = {behind, documents},
        .document_end = {behind + documents, documents},
        .part_start = {behind + 2 * documents, plan_.documents && numerics.parts > 1 ? count : 0}};
}

int64_t StepKernels::held_back_number(const Call& call) const {
    return states_[call.sequence].held_back_before + call.task->item;
}

void StepKernels::kernel(const Call& call, const op::LoadTokens<At>& at) {
    model_.loader->fill(states_[call.sequence].step, call.task->item, loaded(at.tokens));
}

void StepKernels::kernel(const Call& call, const op::LoadEvaluation<At>& at) {
    const int64_t number = held_back_number(call);
    const MicroBatch out = loaded(at.tokens);
    model_.loader->fill_evaluation(number, out);
    if (number >= model_.evaluation_micro_batches) std::ranges::fill(out.targets, -1);
    evaluation_targets_ += std::ranges::count_if(out.targets, [](int32_t t) { return t >= 0; });
}

// ---------------------------------------------------------------- the model

void StepKernels::kernel(const Call& call, const op::Embed<At>& at) {
    begin_exchanges(call);
    model_.decoder->embed(at.tokens, at.table, at.out, at.scratch, documents(at.tokens));
}

void StepKernels::begin_exchanges(const Call& call) {
    const bool alone = call.sequence == StepStates::kMeasured;
    model_.exchanges.begin(alone ? KernelExchange::kAlone : states_[call.sequence].step);
}

void StepKernels::kernel(const Call& call, const op::Forward<At>& at) {
    begin_exchanges(call);
    auto* nonfinite = reinterpret_cast<uint32_t*>(at.report + plan_.nonfinite_offset());
    const int64_t layer = call.task->layer;
    model_.decoder->forward(layer - 1, at.weights, at.x, at.out, nonfinite + layer, at.scratch,
                            {at.attention, at.mlp, at.projections}, documents(at.tokens));
}

void StepKernels::kernel(const Call& call, const op::Head<At>& at) {
    begin_exchanges(call);
    model_.decoder->head(at.weights, at.table, at.x, targets(at.tokens),
                         states_[call.sequence].gradient_scale, at.dx, sums(call, at.gradient),
                         sums(call, at.table_gradient), loss_sum(call, at.report), at.scratch);
}

void StepKernels::kernel(const Call& call, const op::HeadLoss<At>& at) {
    begin_exchanges(call);
    const int64_t token = held_back_number(call) * model_.decoder->numerics().tokens();
    model::Decoder::LogitsSink sink;
    if (asks_for_logits_)
        sink = [&](int64_t first, int64_t column, ops::ConstView logits) {
            keep(token + first, column, logits);
        };
    model_.decoder->head_loss(at.weights, at.table, at.x, targets(at.tokens),
                              loss_sum(call, at.report), at.scratch, sink);
}

const int32_t* StepKernels::targets(const int32_t* tokens) const {
    return tokens + model_.decoder->numerics().tokens();
}

model::Documents StepKernels::documents(const int32_t* tokens) const {
    if (!plan_.documents) return {};
    const model::Numerics& numerics = model_.decoder->numerics();
    const int32_t* start = tokens + 2 * numerics.tokens();
    const int32_t* end = start + numerics.whole_tokens();
    return {.start = start, .end = end, .part_start = end + numerics.whole_tokens()};
}

double* StepKernels::loss_sum(const Call& call, std::byte* report) {
    return reinterpret_cast<double*>(report) + call.task->item;
}

ops::Accumulator StepKernels::sums(const Call& call, float* gradient) {
    return {gradient, (call.task->flags & cost::kFresh) != 0};
}

void StepKernels::kernel(const Call& call, const op::Backward<At>& at) {
    begin_exchanges(call);
    const bool needs_dx = (call.task->flags & cost::kNeedsDx) != 0;
    // It writes to the MLP's alone.
    auto* attention = const_cast<std::byte*>(at.attention);
    auto* projections = const_cast<std::byte*>(at.projections);
    if (at.deferred != nullptr)
        return model_.decoder->input_gradients(
            call.task->layer - 1, at.weights, at.x, at.dx, needs_dx, at.gradient, at.scratch,
            {attention, at.mlp, projections}, documents(at.tokens), at.deferred);
    model_.decoder->backward(call.task->layer - 1, at.weights, at.x, at.dx, needs_dx,
                             sums(call, at.gradient), at.scratch, {attention, at.mlp, projections},
                             documents(at.tokens));
}

void StepKernels::kernel(const Call& call, const op::WeightGradients<At>& at) {
    const bool needs_dx = (call.task->flags & cost::kNeedsDx) != 0;
    // It only reads them.
    auto* attention = const_cast<std::byte*>(at.attention);
    auto* mlp = const_cast<std::byte*>(at.mlp);
    auto* deferred = const_cast<std::byte*>(at.deferred);
    model_.decoder->weight_gradients(call.task->layer - 1, needs_dx, sums(call, at.gradient),
                                     at.scratch, {attention, mlp, nullptr}, deferred, at.norms);
}

void StepKernels::kernel(const Call& call, const op::EmbedBackward<At>& at) {
    begin_exchanges(call);
    model_.decoder->embed_backward(at.tokens, at.dx, at.gradient, at.scratch, documents(at.tokens));
}

// ---------------------------------------------------------------- gradients

void StepKernels::kernel(const Call& call, const op::Zero<At>& at) {
    model_.ops->fill_zero(at.what, call.task->bytes);
}

void StepKernels::kernel(const Call& call, const op::Add<At>& at) {
    model_.ops->add(at.gradient, at.added, call.task->bytes / 4);
}

void StepKernels::kernel(const Call& call, const op::Round<At>& at) {
    model_.ops->round_gradient(at.gradient, plan_.elements_of_run(chunk_of(call)), plan_.wire,
                               at.wire, at.leaves);
}

// Cuts, from every rank's shard, the run that lies as the chunk does in its owner's, in rank order.
void StepKernels::kernel(const Call& call, const op::Cut<At>& at) {
    const Chunk& chunk = chunk_of(call);
    const zero::Partition& partition = plan_.partition;
    const auto [segment, within] = place_in_shards(plan_, chunk);
    if (partition.codecs.gradients.on()) return encode(at, chunk, segment, within);
    const int64_t rows = chunk.count / optim::kLeaf;  // so that every thread has some
    for (int rank = 0; rank < partition.ranks; ++rank) {
        const float* from = at.gradient + partition.shard(segment, rank).first + within;
        std::byte* to = at.parts + rank * chunk.count * size_of(plan_.wire);
        model_.ops->cast(ops::ConstView::of(from, DType::f32, rows, optim::kLeaf),
                         ops::View::of(to, plan_.wire, rows, optim::kLeaf));
    }
}

// The same as codes: a rank's part is one array of scales, then of codes.
void StepKernels::encode(const op::Cut<At>& at, const Chunk& chunk, const model::Segment& segment,
                         int64_t within) {
    if (on_gpu()) return encode_on_gpu(at, chunk, segment, within);
    const zero::Partition& partition = plan_.partition;
    const zero::Codec& codec = partition.codecs.gradients;
    const int64_t tiles = ceil_div(chunk.count, kCodedTile);
    teams_.all().parallel(partition.ranks * tiles, [&](int64_t task) {
        const auto rank = static_cast<int>(task / tiles);
        const int64_t first = task % tiles * kCodedTile;
        const float* from = at.gradient + partition.shard(segment, rank).first + within + first;
        const zero::Part part{at.parts + partition.part_for(rank) * codec.bytes(chunk.count),
                              chunk.count};
        zero::encode(codec, from, std::min(kCodedTile, chunk.count - first), part, first);
    });
}

void StepKernels::encode_on_gpu(const op::Cut<At>& at, const Chunk& chunk,
                                const model::Segment& segment, int64_t within) {
    const zero::Partition& partition = plan_.partition;
    const zero::Codec& codec = partition.codecs.gradients;
    // Parts that follow each other are of ranks as far apart: of neighbours, or of those that stand
    // alike in their hosts.
    const int apart = partition.two_levels() ? partition.hosts.each : 1;
    const int64_t bytes = codec.bytes(chunk.count);
    const zero::cuda::Several ranks{.count = partition.ranks / apart,
                                    .values_apart = apart * partition.shard_elements(segment),
                                    .parts_apart = bytes};
    for (int rank = 0; rank < apart; ++rank) {
        const zero::Part first{at.parts + partition.part_for(rank) * bytes, chunk.count};
        zero::cuda::encode(codec, DType::f32,
                           at.gradient + partition.shard(segment, rank).first + within, chunk.count,
                           first, 0, ranks, compute_stream());
    }
}

// Of each host: what its ranks sent, added in their order, and coded again.
void StepKernels::kernel(const Call& call, const op::Combine<At>& at) {
    const Chunk& chunk = chunk_of(call);
    const zero::Partition& partition = plan_.partition;
    const zero::Codec& codec = partition.codecs.gradients;
    const int hosts = partition.host_count();
    if (on_gpu()) {
        return zero::cuda::combine(codec, at.parts, partition.hosts.each, hosts, chunk.count,
                                   at.combined, compute_stream());
    }
    const auto part = [&](int index) { return index * codec.bytes(chunk.count); };
    each_leaf_of_turn(chunk, hosts, [&](int host, int64_t first) {
        std::array<float, optim::kLeaf> sum;
        for (int place = 0; place < partition.hosts.each; ++place) {
            const zero::ConstPart sent{at.parts + part(place * hosts + host), chunk.count};
            const auto take = place == 0 ? zero::decode : zero::decode_add;
            take(codec, sent, first, optim::kLeaf, sum.data());
        }
        const zero::Part combined{at.combined + part(host), chunk.count};
        zero::encode(codec, sum.data(), optim::kLeaf, combined, first);
    });
}

// Added in the order of the ranks, or of the hosts where those have combined theirs. A leaf at a
// time: it stays in the first cache until it is rounded.
void StepKernels::decode(const op::Sum<At>& at, const Chunk& chunk) {
    const zero::Codec& codec = plan_.partition.codecs.gradients;
    if (on_gpu()) {
        return zero::cuda::sum(codec, at.parts, plan_.partition.summed_parts(), chunk.count,
                               plan_.wire, at.wire, at.leaves, compute_stream());
    }
    const auto sum_leaf = [&](int64_t first) {
        std::array<float, optim::kLeaf> sum;
        for (int sender = 0; sender < plan_.partition.summed_parts(); ++sender) {
            const zero::ConstPart part{at.parts + sender * codec.bytes(chunk.count), chunk.count};
            const auto take = sender == 0 ? zero::decode : zero::decode_add;
            take(codec, part, first, optim::kLeaf, sum.data());
        }
        std::byte* wire = at.wire + first * size_of(plan_.wire);
        optim::recast(sum.data(), optim::kLeaf, plan_.wire, wire);
        optim::leaf_norms(wire, plan_.wire, optim::kLeaf, at.leaves + first / optim::kLeaf);
    };
    teams_.all().parallel(ceil_div(chunk.count, kCodedTile), [&](int64_t tile) {
        const int64_t end = std::min(chunk.count, (tile + 1) * kCodedTile);
        for (int64_t first = tile * kCodedTile; first < end; first += optim::kLeaf) sum_leaf(first);
    });
}

void StepKernels::kernel(const Call& call, const op::Sum<At>& at) {
    if (plan_.partition.codecs.gradients.on()) return decode(at, chunk_of(call));
    model_.ops->sum_gradient(
        ops::ConstView::of(at.parts, plan_.wire, plan_.partition.ranks, chunk_of(call).count),
        at.wire, at.leaves);
}

// ---------------------------------------------------------------- momentum

zero::Feedback StepKernels::feedback_of(const Chunk& chunk, std::byte* at) const {
    return {reinterpret_cast<float*>(at), chunk.count, plan_.partition.ranks,
            plan_.partition.codecs.local_steps};
}

template <class Body>
void StepKernels::each_leaf_of_turn(const Chunk& chunk, int ranks, const Body& body) {
    const int64_t leaves = chunk.count / optim::kLeaf;
    teams_.all().parallel(ranks * leaves, [&](int64_t task) {
        body(static_cast<int>(task / leaves), task % leaves * optim::kLeaf);
    });
}

// What the others would get of this rank's gradient, rounded, and the norm of it: a leaf is the sum
// of all ranks' parts of the turn, in rank order.
void StepKernels::kernel(const Call& call, const op::Keep<At>& at) {
    const Chunk& chunk = chunk_of(call);
    const zero::Partition& partition = plan_.partition;
    const auto [segment, within] = place_in_shards(plan_, chunk);
    if (on_gpu()) {
        return zero::cuda::keep(at.gradient + partition.shard(segment, 0).first + within,
                                partition.ranks, partition.shard_elements(segment), chunk.count,
                                plan_.wire, at.parts, at.leaves, compute_stream());
    }
    each_leaf_of_turn(chunk, 1, [&](int, int64_t first) {
        float sum = 0;
        for (int rank = 0; rank < partition.ranks; ++rank) {
            const float* from = at.gradient + partition.shard(segment, rank).first + within + first;
            std::byte* to = at.parts + (rank * chunk.count + first) * size_of(plan_.wire);
            optim::recast(from, optim::kLeaf, plan_.wire, to);
            float leaf = 0;
            optim::leaf_norms(to, plan_.wire, optim::kLeaf, &leaf);
            sum += leaf;
        }
        at.leaves[first / optim::kLeaf] = sum;
    });
}

void StepKernels::kernel(const Call& call, const op::Compress<At>& at) {
    const Chunk& chunk = chunk_of(call);
    if (!intact(call, chunk.kept, at.gradient) || !intact(call, chunk.feedback, at.feedback))
        return;
    const zero::Codec& codec = plan_.partition.codecs.momentum;
    const zero::MomentumShare& share = states_.before(call.sequence).momentum_share;
    const zero::Feedback feedback = feedback_of(chunk, at.feedback);
    each_leaf_of_turn(chunk, feedback.ranks, [&](int rank, int64_t first) {
        const std::byte* gradient =
            at.gradient + (rank * chunk.count + first) * size_of(plan_.wire);
        const zero::Part part{at.parts + rank * codec.bytes(chunk.count), chunk.count};
        const float* moved = feedback.moved(rank);
        zero::compress(codec, share, plan_.wire, gradient, feedback.momentum(rank) + first,
                       moved ? moved + first : nullptr, feedback.error(rank) + first, part, first,
                       optim::kLeaf);
    });
}

void StepKernels::kernel(const Call& call, const op::MoveAlone<At>& at) {
    const Chunk& chunk = chunk_of(call);
    if (!intact(call, chunk.kept, at.gradient) || !intact(call, chunk.feedback, at.feedback))
        return;
    const zero::MomentumShare& share = states_.before(call.sequence).momentum_share;
    const zero::Feedback feedback = feedback_of(chunk, at.feedback);
    each_leaf_of_turn(chunk, feedback.ranks, [&](int rank, int64_t first) {
        zero::move_alone(
            share, plan_.wire, at.gradient + (rank * chunk.count + first) * size_of(plan_.wire),
            feedback.momentum(rank) + first, feedback.moved(rank) + first, optim::kLeaf);
    });
    seal(call, chunk.feedback, at.feedback);
}

void StepKernels::kernel(const Call& call, const op::Merge<At>& at) {
    const Chunk& chunk = chunk_of(call);
    const zero::Codec& codec = plan_.partition.codecs.momentum;
    const zero::Feedback feedback = feedback_of(chunk, at.feedback);
    const int mine = plan_.partition.rank;
    const zero::Part merged{at.merged + mine * codec.bytes(chunk.count), chunk.count};
    each_leaf_of_turn(chunk, 1, [&](int, int64_t first) {
        zero::merge(codec, at.parts, feedback.ranks, feedback.momentum(mine) + first,
                    feedback.owner_error() + first, merged, first, optim::kLeaf);
    });
}

void StepKernels::kernel(const Call& call, const op::Average<At>& at) {
    const Chunk& chunk = chunk_of(call);
    const zero::Codec& codec = plan_.partition.codecs.momentum;
    const zero::MomentumShare& share = states_.before(call.sequence).momentum_share;
    const zero::Feedback feedback = feedback_of(chunk, at.feedback);
    each_leaf_of_turn(chunk, feedback.ranks, [&](int rank, int64_t first) {
        const zero::ConstPart merged{at.merged + rank * codec.bytes(chunk.count), chunk.count};
        zero::average(codec, share, merged, feedback.momentum(rank) + first, first, optim::kLeaf);
    });
    seal(call, chunk.feedback, at.feedback);
}

// ---------------------------------------------------------------- coded weights

// Calls body(segment, codes, bytes) for each segment: the ranks' parts of it, and the bytes of
// each.
template <class Byte, class Body>
void StepKernels::each_coded_segment(const Call& call, Byte* codes, const Body& body) const {
    const zero::Partition& partition = plan_.partition;
    const model::Layer& layer = plan_.layers[static_cast<size_t>(call.task->layer)];
    for (const model::Segment& segment : layer.segments) {
        const int64_t bytes = partition.codecs.weights.bytes(partition.shard_elements(segment));
        body(segment, codes, bytes);
        codes += partition.ranks * bytes;
    }
}

// Calls body(segment, element, part, first) for each leaf of the ranks [first_rank, end_rank) and
// of every segment: it begins `first` elements into the rank's shard, at this element of the layer.
template <class Byte, class Body>
void StepKernels::each_coded_tile(const Call& call, Byte* codes, int first_rank, int end_rank,
                                  const Body& body) {
    const zero::Partition& partition = plan_.partition;
    each_coded_segment(call, codes, [&](const model::Segment& segment, Byte* parts, int64_t bytes) {
        const int64_t count = partition.shard_elements(segment);
        const int64_t tiles = ceil_div(count, optim::kLeaf);
        teams_.all().parallel((end_rank - first_rank) * tiles, [&](int64_t task) {
            const int rank = first_rank + static_cast<int>(task / tiles);
            const int64_t first = task % tiles * optim::kLeaf;
            body(segment, partition.shard(segment, rank).first + first,
                 zero::PartOf<Byte>{parts + rank * bytes, count}, first);
        });
    });
}

// This rank's shard of it, in the whole layer or among its shards.
const std::byte* StepKernels::weights_of_segment(const op::EncodeWeights<At>& at,
                                                 const model::Segment& segment) const {
    const int64_t element = plan_.partition.shard(segment, plan_.partition.rank).first;
    if (!at.shards) return at.whole + element * size_of(plan_.compute);
    return at.shards + plan_.partition.weight_position(segment, element) * size_of(plan_.compute);
}

void StepKernels::kernel(const Call& call, const op::EncodeWeights<At>& at) {
    if (on_gpu()) return encode_weights_on_gpu(call, at);
    const zero::Partition& partition = plan_.partition;
    each_coded_tile(call, at.codes, partition.rank, partition.rank + 1,
                    [&](const model::Segment& segment, int64_t, zero::Part part, int64_t first) {
                        const std::byte* from =
                            weights_of_segment(at, segment) + first * size_of(plan_.compute);
                        std::array<float, optim::kLeaf> values;
                        zero::widen(plan_.compute, from, optim::kLeaf, values.data());
                        zero::encode(partition.codecs.weights, values.data(), optim::kLeaf, part,
                                     first);
                    });
}

// The team's thread waits for it, as the comm lane waits for the team.
void StepKernels::encode_weights_on_gpu(const Call& call, const op::EncodeWeights<At>& at) {
    const zero::Partition& partition = plan_.partition;
    each_coded_segment(
        call, at.codes, [&](const model::Segment& segment, std::byte* parts, int64_t bytes) {
            const int64_t count = partition.shard_elements(segment);
            zero::cuda::encode(partition.codecs.weights, plan_.compute,
                               weights_of_segment(at, segment), count,
                               {parts + partition.rank * bytes, count}, 0, {}, beside_->stream());
        });
    beside_->wait();
}

// This rank's own shards too: all ranks compute with the same weights.
void StepKernels::kernel(const Call& call, const op::DecodeWeights<At>& at) {
    if (on_gpu()) return decode_weights_on_gpu(call, at);
    each_coded_tile(
        call, at.codes, 0, plan_.partition.ranks,
        [&](const model::Segment&, int64_t element, zero::ConstPart part, int64_t first) {
            std::array<float, optim::kLeaf> values;
            zero::decode(plan_.partition.codecs.weights, part, first, optim::kLeaf, values.data());
            optim::recast(values.data(), optim::kLeaf, plan_.compute,
                          at.whole + element * size_of(plan_.compute));
        });
}

void StepKernels::decode_weights_on_gpu(const Call& call, const op::DecodeWeights<At>& at) {
    const zero::Partition& partition = plan_.partition;
    each_coded_segment(
        call, at.codes, [&](const model::Segment& segment, const std::byte* parts, int64_t bytes) {
            const int64_t count = partition.shard_elements(segment);
            zero::cuda::decode(
                partition.codecs.weights, {parts, count}, 0, count, plan_.compute,
                at.whole + segment.offset * size_of(plan_.compute),
                {.count = partition.ranks, .values_apart = count, .parts_apart = bytes},
                compute_stream());
        });
}

void StepKernels::keep(int64_t token, int64_t column, ops::ConstView logits) {
    const int64_t vocab = model_.decoder->shape().vocab;
    const int64_t room = std::ssize(logits_) / vocab - token;
    if (room <= 0) return;
    const int64_t rows = std::min(room, logits.rows);
    const auto to = ops::View::of(logits_.data() + token * vocab, DType::f32, rows, vocab);
    model_.ops->copy_out(logits.row_range(0, rows), to.col_range(column, logits.cols));
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

// It finishes the step before the schedule's own.
void StepKernels::kernel(const Call& call, const op::Update<At>& at) {
    update(call, at, states_.before(call.sequence).after_outcome);
}

void StepKernels::kernel(const Call& call, const op::UpdateSpeculative<At>& at) {
    update(call, at, states_[call.sequence].speculative);
}

namespace {

template <Op which>
optim::Span span_of(const planner::Plan& plan, const Chunk& chunk,
                    const op::Updating<cost::Addressed, which>& at) {
    optim::Span span = state_span(chunk.format, chunk.count, at.before, at.state);
    span.gradient = at.gradient;
    span.gradient_type = plan.wire;
    span.weight = at.weight;
    span.weight_type = plan.compute;
    span.weight_in = reinterpret_cast<const uint16_t*>(at.weight_before);
    span.layer = static_cast<uint32_t>(chunk.layer);
    span.element = chunk.first;
    return span;
}

}  // namespace

template <Op which>
std::span<const optim::Span> StepKernels::spans_on_device(const Chunk& first,
                                                          const op::Updating<At, which>& at) {
    const auto apart = [&](swap::ObjectId one, swap::ObjectId other) {
        return plan_.objects[other].offset - plan_.objects[one].offset;
    };
    spans_of_device_.clear();
    for (const Chunk& chunk : plan_.run_of(first)) {
        const int64_t state = apart(first.state, chunk.state);
        const int64_t weight = apart(first.weight, chunk.weight);
        op::Updating<At, which> its = at;
        its.before += state;
        its.state += state;
        its.gradient += apart(first.gradient, chunk.gradient);
        its.weight += weight;
        if (its.weight_before != nullptr) its.weight_before += weight;
        spans_of_device_.push_back(span_of(plan_, chunk, its));
    }
    return spans_of_device_;
}

template <Op which>
void StepKernels::update(const Call& call, const op::Updating<At, which>& at,
                         const ScalarsByKind& scalars) {
    const Chunk& chunk = chunk_of(call);
    const bool by_momentum = (call.task->flags & cost::kTakesMomentum) != 0;
    if (!intact(call, chunk.state, at.before)) return;
    if (!by_momentum && !intact(call, chunk.gradient, at.gradient)) return;
    if (at.weight_before && !intact(call, chunk.weight, at.weight_before)) return;
    if (call.task->lane == swap::Lane::team) {
        optim::Span span = span_of(plan_, chunk, at);
        if (by_momentum) span.gradient_type = DType::f32;
        if ((call.task->flags & cost::kLeavesState) != 0) return update_weight(call, span, scalars);
        apply(call, {&span, 1}, scalars);
    } else {
        apply(call, spans_on_device(chunk, at), scalars);
    }
    seal(call, chunk.state, at.state);
    seal(call, chunk.weight, at.weight);
    if (which != Op::update || !listener_ || call.task->lane != swap::Lane::team) return;
    listener_->updated(
        chunk, {.state = {at.state, static_cast<size_t>(planner::state_bytes(chunk))},
                .weight = {at.weight, static_cast<size_t>(chunk.count * size_of(plan_.compute))}});
}

// Where a rank moves alone, all state is as it was at the last exchange.
void StepKernels::update_weight(const Call& call, const optim::Span& span,
                                const ScalarsByKind& by_kind) {
    const Chunk& chunk = chunk_of(call);
    const optim::Scalars& scalars = by_kind[static_cast<size_t>(kind_of(chunk))];
    each_leaf_of_turn(chunk, 1, [&](int, int64_t first) {
        update_weight_alone(span, first, optim::kLeaf, scalars);
    });
    seal(call, chunk.weight, static_cast<const std::byte*>(span.weight));
}

void StepKernels::apply(const Call& call, std::span<const optim::Span> spans,
                        const ScalarsByKind& by_kind) {
    const Chunk& chunk = chunk_of(call);
    const UpdateKind kind = kind_of(chunk);
    const optim::Scalars& scalars = by_kind[static_cast<size_t>(kind)];
    const bool by_team = call.task->lane == swap::Lane::team;
    // Of each kind one after the other: there is one workspace.
    if (kind == UpdateKind::matrix && by_team)
        return model_.muon->update(chunk.rows, chunk.cols, spans.front(), scalars);
    if (kind == UpdateKind::matrix)
        return model_.muon->update_on_device(chunk.rows, chunk.cols, spans.front(), scalars);
    if (by_team) return optim::update(teams_, spans.front(), scalars);
    if (model_.device->kind() == DeviceKind::cuda) {
        return optim::cuda::update(spans, scalars,
                                   model_.device->stream(StreamKind::compute).native());
    }
    // One arena on one node, and beside the team lane's thread, which alone may ask each node.
    for (const optim::Span& span : spans) optim::update(teams_.all(), span, scalars);
}

void StepKernels::kernel(const Call& call, const op::Recast<At>& at) {
    const Chunk& chunk = chunk_of(call);
    if (!intact(call, chunk.state, at.state)) return;
    optim::recast(reinterpret_cast<const float*>(at.state), chunk.count, plan_.compute, at.weight);
    seal(call, chunk.weight, at.weight);
}

}  // namespace ferry::train
