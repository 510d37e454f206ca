#include "cost/operation_table.h"

#include <array>

#include "cost/operands.h"
#include "cost/traffic.h"

namespace ferry::cost {
namespace {

using swap::Lane;

template <template <class> class Operation>
constexpr auto describe() {
    const Operation<Described> described{};
    return std::apply(
        [](const auto&... field) {
            return std::array{OperandOf{field.content, field.role, field.optional}...};
        },
        op::fields<op::kOperands<Operation>>(described));
}
template <template <class> class Operation>
constexpr auto kDescribed = describe<Operation>();

template <template <class> class Operation>
constexpr Row row(Row of) {
    of.op = Operation<Addressed>::kOp;
    of.operands = kDescribed<Operation>;
    return of;
}

// ---------------------------------------------------------------- bytes

int64_t none(const Work&) { return 0; }
int64_t own(const Work& w) { return w.bytes; }
int64_t tokens(const Work& w) { return w.tokens_bytes; }

int64_t weights(const Work& w) {
    const int64_t table = w.table ? w.table->elements : 0;
    return (w.layer->elements + table) * size_of(w.compute);
}
// Added to: read and written.
int64_t gradients(const Work& w) {
    const int64_t table = w.table ? w.table->trainable_elements : 0;
    return 2 * (w.layer->trainable_elements + table) * 4;
}
int64_t wire(const Work& w) { return w.elements * size_of(w.wire); }
int64_t part(const Work& w) {  // of a rank
    return w.codecs.gradients.on() ? w.codecs.gradients.bytes(w.elements) : wire(w);
}
int64_t codes(const Work& w) {
    return zero::coded_bytes(w.codecs.weights, *w.layer, static_cast<int>(w.ranks));
}
// A rank's share of a turn's momentum.
int64_t signs(const Work& w) { return w.codecs.momentum.bytes(w.elements); }
int64_t leaves(const Work& w) { return w.elements / kLeafElements * 4; }
int64_t of_update(const Work& w) {
    return static_cast<int64_t>(
        update_bytes(static_cast<double>(w.elements), element_bytes(w.state, w.compute, w.wire)));
}

// ---------------------------------------------------------------- FLOPs

// Multiplications and additions of every token with the layer's weights, once; a tied head
// multiplies by the table.
double once(const Work& w) {
    return static_cast<double>(w.tokens) * 2 *
           static_cast<double>((w.table ? w.table : w.layer)->elements);
}
double saved(const Work& w, model::Saved what) { return w.saved_flops[at(what)]; }
bool saves(const Work& w, model::Saved what) { return (w.flags & flag_of(what)) != 0; }

// The gradients of the weights that train: as many again for each of them.
double of_weights(const Work& w) {
    return static_cast<double>(w.tokens) * 2 *
           static_cast<double>((w.table ? w.table : w.layer)->trainable_elements);
}
// A block's last product, whose result only the next block's forward reads.
double last(const Work& w) {
    const model::Tensor* down = w.layer->find(model::Role::down);
    return down ? static_cast<double>(w.tokens) * 2 * static_cast<double>(down->count) : 0;
}

// The gradients of its input and weights, and forward again as far as nothing of it was saved; but
// for the last product, which backward does not need.
double backward(const Work& w) {
    using model::Saved;
    return 2 * once(w) + of_weights(w) - last(w) +
           (saves(w, Saved::attention) ? 2 : 3) * saved(w, Saved::attention) -
           (saves(w, Saved::mlp) ? saved(w, Saved::mlp) : 0) -
           (saves(w, Saved::projections) ? saved(w, Saved::projections) : 0);
}

// ---------------------------------------------------------------- rows

constexpr auto kMicroBatch = ItemOf::micro_batch;
constexpr auto kChunk = ItemOf::chunk;

constexpr std::array kRows{
    row<op::LoadTokens>(
        {.name = "load tokens", .lane = Lane::team, .item = kMicroBatch, .bytes = tokens}),
    row<op::LoadEvaluation>({.name = "load held-back tokens",
                             .lane = Lane::team,
                             .item = kMicroBatch,
                             .bytes = tokens}),
    row<op::Embed>({.name = "embed",
                    .item = kMicroBatch,
                    .timed_by = TimedBy::layer,
                    .bytes = [](const Work& w) { return w.tokens_bytes + 2 * w.input_bytes; }}),
    row<op::Forward>(
        {.name = "forward",
         .item = kMicroBatch,
         .timed_by = TimedBy::layer,
         .bytes = [](const Work& w) { return weights(w) + 2 * w.input_bytes; },
         .flops = [](const Work& w) { return once(w) + saved(w, model::Saved::attention); }}),
    row<op::Head>({.name = "head and loss",
                   .item = kMicroBatch,
                   .timed_by = TimedBy::layer,
                   .bytes =
                       [](const Work& w) {
                           return weights(w) + w.tokens_bytes + 2 * w.input_bytes + gradients(w);
                       },
                   .flops = [](const Work& w) { return 2 * once(w) + of_weights(w); }}),
    row<op::HeadLoss>(
        {.name = "loss",
         .item = kMicroBatch,
         .timed_by = TimedBy::layer,
         .bytes = [](const Work& w) { return weights(w) + w.tokens_bytes + w.input_bytes; },
         .flops = once}),
    row<op::Backward>(
        {.name = "backward",
         .item = kMicroBatch,
         .timed_by = TimedBy::flags,
         .bytes = [](const Work& w) { return weights(w) + 3 * w.input_bytes + gradients(w); },
         .flops = backward}),
    row<op::EmbedBackward>(
        {.name = "embed backward",
         .item = kMicroBatch,
         .timed_by = TimedBy::layer,
         .bytes = [](const Work& w) { return w.tokens_bytes + 3 * w.input_bytes; }}),
    row<op::Zero>({.name = "zero", .timed_by = TimedBy::bytes, .bytes = own}),
    row<op::Add>({.name = "add",
                  .timed_by = TimedBy::bytes,
                  .bytes = [](const Work& w) { return 3 * w.bytes; }}),
    row<op::Round>({.name = "round and norm",
                    .item = kChunk,
                    .timed_by = TimedBy::elements,
                    .bytes = [](const Work& w) { return w.elements * 4 + wire(w) + leaves(w); }}),
    row<op::Update>({.name = "update",
                     .lane = Lane::team,
                     .device_too = true,
                     .item = kChunk,
                     .timed_by = TimedBy::update,
                     .bytes = of_update}),
    row<op::UpdateSpeculative>({.name = "update (speculative)",
                                .lane = Lane::team,
                                .item = kChunk,
                                .timed_by = TimedBy::update,
                                .bytes = of_update}),
    row<op::Recast>({.name = "recast",
                     .lane = Lane::team,
                     .item = kChunk,
                     .timed_by = TimedBy::update,
                     .bytes = [](const Work& w) { return w.elements * (4 + size_of(w.compute)); }}),
    row<op::Cut>({.name = "cut for the ranks",
                  .item = kChunk,
                  .timed_by = TimedBy::elements,
                  .of_codecs = true,
                  .bytes = [](const Work& w) { return w.ranks * (w.elements * 4 + part(w)); }}),
    row<op::Combine>({.name = "combine in host",
                      .item = kChunk,
                      .timed_by = TimedBy::elements,
                      .of_codecs = true,
                      .bytes = [](const Work& w) { return (w.ranks + w.summed_parts) * part(w); }}),
    row<op::Sum>(
        {.name = "sum, round and norm",
         .item = kChunk,
         .timed_by = TimedBy::elements,
         .of_codecs = true,
         .bytes = [](const Work& w) { return w.summed_parts * part(w) + wire(w) + leaves(w); }}),
    row<op::EncodeWeights>({.name = "encode weights",
                            .lane = Lane::team,
                            .timed_by = TimedBy::memory,
                            .of_codecs = true,
                            .bytes =
                                [](const Work& w) {
                                    return (w.layer->elements * size_of(w.compute) + codes(w)) /
                                           w.ranks;
                                }}),
    // Of an exchange the caller that records it knows the bytes that reach a rank from the others.
    row<op::GatherCodes>(
        {.name = "gather weight codes", .lane = Lane::comm, .of_codecs = true, .bytes = own}),
    row<op::GatherCodesInHost>({.name = "gather weight codes in host",
                                .lane = Lane::comm,
                                .of_codecs = true,
                                .bytes = own}),
    row<op::DecodeWeights>(
        {.name = "decode weights",
         .timed_by = TimedBy::layer,
         .of_codecs = true,
         .bytes = [](const Work& w) { return codes(w) + w.layer->elements * size_of(w.compute); }}),
    row<op::Keep>(
        {.name = "keep and norm",
         .item = kChunk,
         .timed_by = TimedBy::elements,
         .bytes = [](const Work& w) { return w.ranks * (w.elements * 4 + wire(w)) + leaves(w); }}),
    // Momentum is read, and its error read and written.
    row<op::Compress>({.name = "compress momentum",
                       .lane = Lane::team,
                       .item = kChunk,
                       .timed_by = TimedBy::update,
                       .bytes =
                           [](const Work& w) {
                               const int64_t arrays = 3 + w.codecs.local_steps;
                               return w.ranks * (wire(w) + arrays * w.elements * 4 + signs(w));
                           }}),
    row<op::MoveAlone>(
        {.name = "move alone",
         .lane = Lane::team,
         .item = kChunk,
         .timed_by = TimedBy::update,
         .bytes = [](const Work& w) { return w.ranks * (wire(w) + 4 * w.elements * 4); }}),
    row<op::ExchangeMomentum>(
        {.name = "exchange momentum", .lane = Lane::comm, .item = kChunk, .bytes = own}),
    row<op::Merge>(
        {.name = "merge momentum",
         .lane = Lane::team,
         .item = kChunk,
         .timed_by = TimedBy::update,
         .bytes = [](const Work& w) { return (w.ranks + 1) * signs(w) + 3 * w.elements * 4; }}),
    row<op::GatherMomentum>(
        {.name = "gather momentum", .lane = Lane::comm, .item = kChunk, .bytes = own}),
    row<op::Average>(
        {.name = "average momentum",
         .lane = Lane::team,
         .item = kChunk,
         .timed_by = TimedBy::update,
         .bytes = [](const Work& w) { return w.ranks * (signs(w) + 2 * w.elements * 4); }}),
    row<op::GatherWeights>({.name = "gather weights", .lane = Lane::comm, .bytes = own}),
    row<op::GatherWeightsInHost>(
        {.name = "gather weights in host", .lane = Lane::comm, .bytes = own}),
    row<op::ExchangeInHost>(
        {.name = "exchange gradients in host", .lane = Lane::comm, .item = kChunk, .bytes = own}),
    row<op::Exchange>(
        {.name = "exchange gradients", .lane = Lane::comm, .item = kChunk, .bytes = own}),
    row<op::GatherGradient>(
        {.name = "gather gradients", .lane = Lane::comm, .item = kChunk, .bytes = own}),
    row<op::PassOn>({.name = "pass on", .lane = Lane::comm, .item = kMicroBatch, .bytes = own}),
    row<op::TakeOver>({.name = "take over", .lane = Lane::comm, .item = kMicroBatch, .bytes = own}),
    row<op::Agree>({.name = "agree", .lane = Lane::comm, .bytes = none}),
};

static_assert(kRows.size() == static_cast<size_t>(Op::end), "every operation has a row");
constexpr bool in_order() {
    for (size_t op = 0; op < kRows.size(); ++op) {
        if (static_cast<size_t>(kRows[op].op) != op) return false;
    }
    return true;
}
static_assert(in_order(), "the rows stand as the enumerators do");

}  // namespace

std::span<const Row> operations() { return kRows; }

const Row& row_of(Op op) {
    const auto index = static_cast<size_t>(op);
    FERRY_CHECK(index < kRows.size(), "unknown operation");
    return kRows[index];
}

const char* name_of(const swap::Task& task) {
    return task.verb == swap::Verb::kernel ? row_of(task).name : swap::name_of(task.verb);
}

}  // namespace ferry::cost
