// The operands of every operation, by name. A task's places are the fields in their order.
#pragma once

#include <array>
#include <tuple>

#include "cost/operations.h"
#include "ferry/error.h"

namespace ferry::cost::op {

template <class As, Op which>
struct Load {
    static constexpr Op kOp = which;
    Out<As, Content::tokens> tokens;  // in host memory
};
template <class As>
using LoadTokens = Load<As, Op::load_tokens>;
template <class As>
using LoadEvaluation = Load<As, Op::load_evaluation>;

template <class As>
struct Embed {
    static constexpr Op kOp = Op::embed;
    In<As, Content::tokens> tokens;
    In<As, Content::table> table;
    Out<As, Content::input> out;
    Scratch<As> scratch;
};

template <class As>
struct Forward {
    static constexpr Op kOp = Op::forward;
    In<As, Content::weights> weights;
    In<As, Content::input> x;
    Out<As, Content::input> out;
    Scratch<As> scratch;
    InOut<As, Content::report> report;
    MaybeOut<As, Content::attention> attention{};
    MaybeOut<As, Content::mlp> mlp{};
    MaybeOut<As, Content::projections> projections{};
    MaybeIn<As, Content::tokens> tokens{};  // whose documents do not see each other
};

template <class As>
struct Head {
    static constexpr Op kOp = Op::head;
    In<As, Content::weights> weights;
    MaybeIn<As, Content::table> table{};
    In<As, Content::input> x;
    In<As, Content::tokens> tokens;
    MaybeOut<As, Content::input_gradient> dx{};  // where something below trains
    MaybeInOut<As, Content::gradient> gradient{};
    MaybeInOut<As, Content::table_gradient> table_gradient{};
    Scratch<As> scratch;
    InOut<As, Content::report> report;
};

template <class As>
struct HeadLoss {
    static constexpr Op kOp = Op::head_loss;
    In<As, Content::weights> weights;
    MaybeIn<As, Content::table> table{};
    In<As, Content::input> x;
    In<As, Content::tokens> tokens;
    Scratch<As> scratch;
    InOut<As, Content::report> report;
};

template <class As>
struct Backward {
    static constexpr Op kOp = Op::backward;
    In<As, Content::weights> weights;
    In<As, Content::input> x;
    InOut<As, Content::input_gradient> dx;         // holds the output's gradient, then x's
    MaybeInOut<As, Content::gradient> gradient{};  // of one that defers: of norms alone
    Scratch<As> scratch;
    MaybeIn<As, Content::attention> attention{};
    MaybeInOut<As, Content::mlp> mlp{};  // overwritten by its gradient
    MaybeIn<As, Content::projections> projections{};
    MaybeIn<As, Content::tokens> tokens{};
    MaybeOut<As, Content::deferred> deferred{};  // of one that defers
};

template <class As>
struct WeightGradients {
    static constexpr Op kOp = Op::weight_gradients;
    In<As, Content::deferred> deferred;
    InOut<As, Content::gradient> gradient;
    Scratch<As> scratch;
    MaybeIn<As, Content::attention> attention{};
    MaybeIn<As, Content::mlp> mlp{};
    MaybeIn<As, Content::gradient> norms{};  // with the last micro-batch: of all of them
};

template <class As>
struct EmbedBackward {
    static constexpr Op kOp = Op::embed_backward;
    In<As, Content::tokens> tokens;
    In<As, Content::input_gradient> dx;
    InOut<As, Content::gradient> gradient;
    Scratch<As> scratch;
};

template <class As>
struct Zero {
    static constexpr Op kOp = Op::zero;
    Out<As, Content::bytes> what;
};

template <class As>
struct Add {
    static constexpr Op kOp = Op::add;
    InOut<As, Content::gradient> gradient;
    In<As, Content::table_gradient> added;
};

template <class As>
struct Round {
    static constexpr Op kOp = Op::round;
    In<As, Content::gradient> gradient;  // the chunk's
    Out<As, Content::wire> wire;
    Out<As, Content::leaves> leaves;
};

template <class As, Op which>
struct Updating {
    static constexpr Op kOp = which;
    In<As, Content::state> before;
    Out<As, Content::state> state;  // the same place, or a fresh one
    In<As, Content::wire> gradient;
    Out<As, Content::weight> weight;
    MaybeIn<As, Content::weight> weight_before{};  // only with a split master
};
template <class As>
using Update = Updating<As, Op::update>;
template <class As>
using UpdateSpeculative = Updating<As, Op::update_speculative>;

template <class As>
struct Recast {
    static constexpr Op kOp = Op::recast;
    In<As, Content::state> state;
    Out<As, Content::weight> weight;
};

template <class As>
struct Cut {
    static constexpr Op kOp = Op::cut;
    In<As, Content::gradient> gradient;  // the layer's
    Out<As, Content::parts> parts;       // one for each rank
};

template <class As>
struct Combine {
    static constexpr Op kOp = Op::combine;
    In<As, Content::arrived> parts;    // one from each rank of the host for each host
    Out<As, Content::parts> combined;  // one for each host
};

template <class As>
struct Sum {
    static constexpr Op kOp = Op::sum;
    In<As, Content::arrived> parts;  // one from each rank, or from each host
    Out<As, Content::wire> wire;
    Out<As, Content::leaves> leaves;
};

template <class As>
struct EncodeWeights {
    static constexpr Op kOp = Op::encode_weights;
    Out<As, Content::codes> codes;           // this rank's of them
    MaybeIn<As, Content::weights> whole{};   // this rank's shards at their place in it, or
    MaybeIn<As, Content::weights> shards{};  // together
};

template <class As>
struct GatherCodes {
    static constexpr Op kOp = Op::gather_codes;
    InOut<As, Content::codes> codes;
};

template <class As>
struct GatherCodesInHost {
    static constexpr Op kOp = Op::gather_codes_in_host;
    InOut<As, Content::codes> codes;
};

template <class As>
struct DecodeWeights {
    static constexpr Op kOp = Op::decode_weights;
    In<As, Content::codes> codes;
    Out<As, Content::weights> whole;
};

template <class As>
struct Keep {
    static constexpr Op kOp = Op::keep;
    In<As, Content::gradient> gradient;  // the layer's
    Out<As, Content::parts> parts;       // one for each rank
    Out<As, Content::leaves> leaves;     // a turn's, each the sum of the parts'
};

template <class As>
struct Compress {
    static constexpr Op kOp = Op::compress;
    In<As, Content::kept> gradient;
    InOut<As, Content::feedback> feedback;
    Out<As, Content::parts> parts;  // one for each rank
};

template <class As>
struct MoveAlone {
    static constexpr Op kOp = Op::move_alone;
    In<As, Content::kept> gradient;
    InOut<As, Content::feedback> feedback;
};

template <class As>
struct ExchangeMomentum {
    static constexpr Op kOp = Op::exchange_momentum;
    In<As, Content::parts> to_ranks;
    Out<As, Content::arrived> from_ranks;
};

template <class As>
struct Merge {
    static constexpr Op kOp = Op::merge;
    In<As, Content::arrived> parts;  // one from each rank
    InOut<As, Content::feedback> feedback;
    Out<As, Content::parts> merged;  // this rank's of them
};

template <class As>
struct GatherMomentum {
    static constexpr Op kOp = Op::gather_momentum;
    InOut<As, Content::parts> merged;
};

template <class As>
struct Average {
    static constexpr Op kOp = Op::average;
    In<As, Content::parts> merged;
    InOut<As, Content::feedback> feedback;
};

template <class As>
struct GatherWeights {
    static constexpr Op kOp = Op::gather_weights;
    Out<As, Content::weights> whole;
    MaybeIn<As, Content::weights> shards{};  // none: they stand at their place in `whole`
};

template <class As>
struct GatherWeightsInHost {
    static constexpr Op kOp = Op::gather_weights_in_host;
    Out<As, Content::weights> whole;  // this rank's stand at their place in it
};

template <class As>
struct ExchangeInHost {
    static constexpr Op kOp = Op::exchange_in_host;
    In<As, Content::parts> to_ranks;
    Out<As, Content::arrived> from_ranks;
};

template <class As>
struct Exchange {
    static constexpr Op kOp = Op::exchange;
    In<As, Content::parts> to_ranks;
    Out<As, Content::arrived> from_ranks;
};

template <class As>
struct GatherGradient {
    static constexpr Op kOp = Op::gather_gradient;
    In<As, Content::wire> mine;
    Out<As, Content::wire> all;
};

template <class As>
struct PassOn {
    static constexpr Op kOp = Op::pass_on;
    In<As, Content::bytes> what;
};

template <class As>
struct TakeOver {
    static constexpr Op kOp = Op::take_over;
    Out<As, Content::bytes> what;
};

template <class As>
struct Agree {
    static constexpr Op kOp = Op::agree;
    In<As, Content::leaves> leaves;  // all of the step's, in host memory
    In<As, Content::report> report;
};

template <template <class> class... Operations>
struct List {};
using Kernels =
    List<LoadTokens, LoadEvaluation, Embed, Forward, Head, HeadLoss, Backward, WeightGradients,
         EmbedBackward, Zero, Add, Round, Update, UpdateSpeculative, Recast, Cut, Combine, Sum,
         EncodeWeights, DecodeWeights, Keep, Compress, MoveAlone, Merge, Average>;
using Exchanges =
    List<GatherCodes, GatherCodesInHost, GatherWeights, GatherWeightsInHost, ExchangeInHost,
         Exchange, GatherGradient, ExchangeMomentum, GatherMomentum, PassOn, TakeOver, Agree>;

// ---------------------------------------------------------------- their fields

// All addresses are equally large, and an operation has nothing but operands.
template <template <class> class Operation>
constexpr size_t kOperands = sizeof(Operation<Addressed>) / sizeof(std::byte*);

// The operands in their order, as a tuple of references.
template <size_t count, class Operands>
constexpr auto fields(Operands& of) {
    static_assert(count >= 1 && count <= 10);
    if constexpr (count == 1) {
        auto& [a] = of;
        return std::tie(a);
    } else if constexpr (count == 2) {
        auto& [a, b] = of;
        return std::tie(a, b);
    } else if constexpr (count == 3) {
        auto& [a, b, c] = of;
        return std::tie(a, b, c);
    } else if constexpr (count == 4) {
        auto& [a, b, c, d] = of;
        return std::tie(a, b, c, d);
    } else if constexpr (count == 5) {
        auto& [a, b, c, d, e] = of;
        return std::tie(a, b, c, d, e);
    } else if constexpr (count == 6) {
        auto& [a, b, c, d, e, f] = of;
        return std::tie(a, b, c, d, e, f);
    } else if constexpr (count == 7) {
        auto& [a, b, c, d, e, f, g] = of;
        return std::tie(a, b, c, d, e, f, g);
    } else if constexpr (count == 8) {
        auto& [a, b, c, d, e, f, g, h] = of;
        return std::tie(a, b, c, d, e, f, g, h);
    } else if constexpr (count == 9) {
        auto& [a, b, c, d, e, f, g, h, i] = of;
        return std::tie(a, b, c, d, e, f, g, h, i);
    } else {
        auto& [a, b, c, d, e, f, g, h, i, j] = of;
        return std::tie(a, b, c, d, e, f, g, h, i, j);
    }
}

// A kernel's operands, made from the addresses of its task's places. Here alone they get types.
template <template <class> class Operation>
Operation<Addressed> addressed(const std::array<std::byte*, swap::kPlaces>& at) {
    static_assert(kOperands<Operation> <= swap::kPlaces);
    Operation<Addressed> found{};
    size_t place = 0;
    const auto take = [&](auto& field) {
        field = reinterpret_cast<std::remove_reference_t<decltype(field)>>(at[place++]);
    };
    std::apply([&](auto&... field) { (take(field), ...); }, fields<kOperands<Operation>>(found));
    return found;
}

// Calls `kernel` with the typed operands of a task that is one of these. It must take each of them.
template <template <class> class... Operations, class Kernel>
void run(List<Operations...>, const swap::Task& task,
         const std::array<std::byte*, swap::kPlaces>& at, const Kernel& kernel) {
    const auto op = static_cast<Op>(task.op);
    const bool found =
        ((op == Operations<Addressed>::kOp && (kernel(addressed<Operations>(at)), true)) || ...);
    FERRY_CHECK(found, "no kernel of this sort");
}

}  // namespace ferry::cost::op
