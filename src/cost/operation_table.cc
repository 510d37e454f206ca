#include "cost/operation_table.h"

#include <array>

#include "cost/operands.h"
#include "model/gradients.h"

namespace ferry::cost {
namespace {

using model::LayerKind;
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
constexpr OperationRow row(OperationRow of) {
    of.op = Operation<Addressed>::kOp;
    of.operands = kDescribed<Operation>;
    return of;
}

// ---------------------------------------------------------------- bytes

int64_t none(const Work&) { return 0; }
int64_t own(const Work& w) { return w.bytes; }
int64_t tokens(const Work& w) { return w.tokens_bytes; }

bool needs_dx(const Work& w) { return (w.flags & kNeedsDx) != 0; }
bool defers(const Work& w) { return (w.flags & kDefers) != 0; }
int64_t weights(const Work& w) {
    const int64_t table = w.table ? w.table->elements : 0;
    return (w.layer->elements + table) * size_of(w.compute);
}
int64_t norms(const Work& w) { return model::norm_elements(*w.layer) * 4; }
// Added to: read and written. The first of a step's writes alone.
int64_t gradients(const Work& w) {
    const int64_t table = w.table ? w.table->trainable_elements : 0;
    return ((w.flags & kFresh) != 0 ? 1 : 2) * (w.layer->trainable_elements + table) * 4;
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

LayerFlops flops_of(const Work& w) { return layer_flops(*w.layer, w.table, needs_dx(w)); }
double of_tokens(const Work& w, double each) { return static_cast<double>(w.tokens) * each; }
double saved(const Work& w, model::Saved what) { return w.saved_flops[at(what)]; }
bool saves(const Work& w, model::Saved what) { return (w.flags & flag_of(what)) != 0; }

double forward(const Work& w) {
    return of_tokens(w, flops_of(w).forward) + saved(w, model::Saved::attention);
}
double loss(const Work& w) { return of_tokens(w, flops_of(w).forward); }
double head(const Work& w) { return of_tokens(w, flops_of(w).forward + flops_of(w).gradients); }
double weight_gradients(const Work& w) { return of_tokens(w, flops_of(w).weights); }
// Forward again as far as nothing of it was saved, and the gradients.
double backward(const Work& w) {
    using model::Saved;
    const LayerFlops flops = flops_of(w);
    const double attentions = (saves(w, Saved::attention) ? 0 : 1) + flops.attention_passes();
    const double gradients = flops.gradients - (defers(w) ? flops.weights : 0);
    return of_tokens(w, flops.again + gradients) + attentions * saved(w, Saved::attention) -
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
                    .pass = Pass::forward,
                    .layer = LayerKind::embedding,
                    .exchanges_within = true,
                    .bytes = [](const Work& w) { return w.tokens_bytes + 2 * w.input_bytes; }}),
    row<op::Forward>({.name = "forward",
                      .item = kMicroBatch,
                      .timed_by = TimedBy::layer,
                      .pass = Pass::forward,
                      .layer = LayerKind::block,
                      .exchanges_within = true,
                      .bytes = [](const Work& w) { return weights(w) + 2 * w.input_bytes; },
                      .flops = forward}),
    row<op::Head>({.name = "head and loss",
                   .item = kMicroBatch,
                   .timed_by = TimedBy::layer,
                   .pass = Pass::both,
                   .layer = LayerKind::head,
                   .exchanges_within = true,
                   .bytes =
                       [](const Work& w) {
                           return weights(w) + w.tokens_bytes +
                                  (needs_dx(w) ? 2 : 1) * w.input_bytes + gradients(w);
                       },
                   .flops = head}),
    row<op::HeadLoss>(
        {.name = "loss",
         .item = kMicroBatch,
         .timed_by = TimedBy::layer,
         .pass = Pass::evaluation,
         .layer = LayerKind::head,
         .exchanges_within = true,
         .bytes = [](const Work& w) { return weights(w) + w.tokens_bytes + w.input_bytes; },
         .flops = loss}),
    row<op::Backward>({.name = "backward",
                       .item = kMicroBatch,
                       .timed_by = TimedBy::flags,
                       .pass = Pass::backward,
                       .layer = LayerKind::block,
                       .exchanges_within = true,
                       .bytes =
                           [](const Work& w) {
                               return weights(w) + 3 * w.input_bytes +
                                      (defers(w) ? 2 * norms(w) : gradients(w));
                           },
                       .flops = backward}),
    row<op::WeightGradients>({.name = "weight gradients",
                              .item = kMicroBatch,
                              .timed_by = TimedBy::layer,
                              .pass = Pass::left,
                              .layer = LayerKind::block,
                              .bytes = gradients,
                              .flops = weight_gradients}),
    row<op::EmbedBackward>(
        {.name = "embed backward",
         .item = kMicroBatch,
         .timed_by = TimedBy::layer,
         .pass = Pass::backward,
         .layer = LayerKind::embedding,
         .exchanges_within = true,
         .bytes = [](const Work& w) { return w.tokens_bytes + 3 * w.input_bytes; }}),
    row<op::Zero>({.name = "zero", .timed_by = TimedBy::bytes, .bytes = own}),
    row<op::Add>({.name = "add",
                  .timed_by = TimedBy::bytes,
                  .bytes = [](const Work& w) { return 3 * w.bytes; }}),
    row<op::Round>({.name = "round and norm",
                    .spans_run = true,
                    .item = kChunk,
                    .timed_by = TimedBy::elements,
                    .bytes = [](const Work& w) { return w.elements * 4 + wire(w) + leaves(w); }}),
    row<op::Update>({.name = "update",
                     .lane = Lane::team,
                     .device_too = true,
                     .spans_run = true,
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
    row<op::GatherCodes>({.name = "gather weight codes",
                          .lane = Lane::comm,
                          .gathers_weights = true,
                          .of_codecs = true,
                          .bytes = own}),
    row<op::GatherCodesInHost>({.name = "gather weight codes in host",
                                .lane = Lane::comm,
                                .among = Among::host,
                                .gathers_weights = true,
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
                       .timed_by = TimedBy::momentum,
                       .bytes =
                           [](const Work& w) {
                               const int64_t arrays = 3 + w.codecs.local_steps;
                               return w.ranks * (wire(w) + arrays * w.elements * 4 + signs(w));
                           }}),
    row<op::MoveAlone>(
        {.name = "move alone",
         .lane = Lane::team,
         .item = kChunk,
         .timed_by = TimedBy::momentum,
         .bytes = [](const Work& w) { return w.ranks * (wire(w) + 4 * w.elements * 4); }}),
    row<op::ExchangeMomentum>(
        {.name = "exchange momentum", .lane = Lane::comm, .item = kChunk, .bytes = own}),
    row<op::Merge>(
        {.name = "merge momentum",
         .lane = Lane::team,
         .item = kChunk,
         .timed_by = TimedBy::momentum,
         .bytes = [](const Work& w) { return (w.ranks + 1) * signs(w) + 3 * w.elements * 4; }}),
    row<op::GatherMomentum>(
        {.name = "gather momentum", .lane = Lane::comm, .item = kChunk, .bytes = own}),
    row<op::Average>(
        {.name = "average momentum",
         .lane = Lane::team,
         .item = kChunk,
         .timed_by = TimedBy::momentum,
         .bytes = [](const Work& w) { return w.ranks * (signs(w) + 2 * w.elements * 4); }}),
    row<op::GatherWeights>(
        {.name = "gather weights", .lane = Lane::comm, .gathers_weights = true, .bytes = own}),
    row<op::GatherWeightsInHost>({.name = "gather weights in host",
                                  .lane = Lane::comm,
                                  .among = Among::host,
                                  .gathers_weights = true,
                                  .bytes = own}),
    row<op::ExchangeInHost>({.name = "exchange gradients in host",
                             .lane = Lane::comm,
                             .item = kChunk,
                             .among = Among::host,
                             .bytes = own}),
    row<op::Exchange>({.name = "exchange gradients",
                       .lane = Lane::comm,
                       .item = kChunk,
                       .of_two_levels = true,
                       .bytes = own}),
    row<op::GatherGradient>(
        {.name = "gather gradients", .lane = Lane::comm, .item = kChunk, .bytes = own}),
    row<op::PassOn>({.name = "pass on",
                     .lane = Lane::comm,
                     .item = kMicroBatch,
                     .stage_end = StageEnd::sends,
                     .bytes = own}),
    row<op::TakeOver>({.name = "take over",
                       .lane = Lane::comm,
                       .item = kMicroBatch,
                       .stage_end = StageEnd::receives,
                       .bytes = own}),
    row<op::Agree>({.name = "agree", .lane = Lane::comm, .of_all_stages = true, .bytes = none}),
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

std::span<const OperationRow> operations() { return kRows; }

bool exchanges_within(const swap::Task& task) {
    return task.lane == swap::Lane::compute && row_of(task).exchanges_within;
}

const OperationRow& row_of(Op op) {
    const auto index = static_cast<size_t>(op);
    FERRY_CHECK(index < kRows.size(), "unknown operation");
    return kRows[index];
}

Among among(const swap::Task& exchange) {
    const OperationRow& row = row_of(exchange);
    const bool second = row.of_two_levels && (exchange.flags & kAcrossHosts) != 0;
    return second ? Among::hosts : row.among;
}

const char* name_of(const swap::Task& task) {
    return task.verb == swap::Verb::kernel ? row_of(task).name : swap::name_of(task.verb);
}

}  // namespace ferry::cost
