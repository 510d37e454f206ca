// The operations, and what their operands hold. operands.h gives each its operands,
// operation_table.h its row; docs/adding-an-operation.md adds one.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <type_traits>

#include "ferry/dtype.h"
#include "model/model.h"
#include "swap/schedule.h"
#include "zero/zero.h"

namespace ferry::cost {

// Schedules and measured times know an operation by its number, machine files by its name.
enum class Op : uint8_t {
    load_tokens,
    load_evaluation,  // the same of held-back text
    embed,
    forward,
    head,       // forward and backward in one; item: the micro-batch as the report counts them
    head_loss,  // forward alone
    backward,
    weight_gradients,  // that a backward has left
    embed_backward,
    zero,
    add,
    round,               // to the wire type, with norm leaves
    update,              // by the scale of the outcome; of a device's state by the device
    update_speculative,  // with scale 1, for the step of the schedule itself
    recast,
    // With several ranks a gradient is rounded in two operations, around an exchange:
    cut,  // each rank's part of a chunk's turn, in the wire type
    // With two levels: what the ranks of the host have for ranks of one position in all hosts,
    // added and coded once more.
    combine,
    sum,  // this rank's part, added and rounded
    // Gathered weights that travel as codes take three operations. The team encodes them, since the
    // comm lane waits for it while an earlier layer computes.
    encode_weights,
    gather_codes,
    gather_codes_in_host,  // of second shards
    decode_weights,
    // Where momentum is exchanged instead of gradients (zero/feedback.h): the gradients that wait
    // for the outcome, the signs of every rank's share of a turn, and of what its owner made of
    // them. Or a rank goes on alone, and sends nothing.
    keep,
    compress,
    move_alone,
    exchange_momentum,
    merge,
    gather_momentum,
    average,
    gather_weights,
    gather_weights_in_host,  // of second shards
    exchange_in_host,        // the first of two levels
    exchange,
    gather_gradient,
    // Between the stages of a pipeline: block inputs upwards, their gradients downwards, and of a
    // tied table its weights and its gradient.
    pass_on,
    take_over,
    agree,  // on what the outcome needs to know of every rank
    end     // no operation: how many there are
};

constexpr int64_t kLeafElements = 4096;

// A flag of an update: what it takes in is momentum, in fp32.
constexpr uint8_t kTakesMomentum = 1;
// And it is of the weight alone: the state stays as it is.
constexpr uint8_t kLeavesState = 2;

// A flag of an exchange: it is the second of two levels, between hosts alone.
constexpr uint8_t kAcrossHosts = 1;

// Flags of what stages pass: to or from whom.
enum class StageLink : uint8_t {
    previous,
    next,
    table
};  // table: the first stage and the last one
constexpr int kStageLinks = 3;

// Flags of a block's backward. The head has the first one too: something below trains.
constexpr uint8_t kNeedsDx = 1;
constexpr uint8_t flag_of(model::Saved what) { return static_cast<uint8_t>(2U << model::at(what)); }
// And of a block's backward: it leaves the gradients of matrices and biases.
constexpr uint8_t kDefers = 2U << model::kSaved;
// A flag of what adds to the accumulator of the head or of a block: it is the first in a step. It
// writes every element, whatever lies there.
constexpr uint8_t kFresh = 4U << model::kSaved;

// ---------------------------------------------------------------- operands

// The content of an operand. Its role tells it from another operand of the same content.
enum class Content : uint8_t {
    weights,         // a layer's flat buffer, or shards of it, in the compute type
    table,           // the embedding layer's
    input,           // a block input, which is the output of the layer below
    input_gradient,  // d(input)
    attention,       // attention's output, saved for backward
    mlp,
    projections,
    deferred,        // what a block's backward keeps for its weights' gradients
    gradient,        // fp32 accumulator of a layer's trainable prefix
    table_gradient,  // tied: the head's part of the table's
    tokens,          // a micro-batch's tokens, targets and documents' bounds; int32
    scratch,         // nothing before and nothing after
    report,
    wire,      // gradient of a chunk in the wire type; gathered: of every rank's
    parts,     // of a turn: what this rank has for each of the ranks
    arrived,   // of a turn: what each of the ranks had for this one
    codes,     // a layer's weights as codes, of every rank's shards
    leaves,    // the norm's leaves, fp32
    state,     // of a chunk
    weight,    // of a chunk
    kept,      // every rank's part of a turn in the wire type, of this rank's gradient
    feedback,  // of a turn: the momentum of all ranks' parts, and the errors of its codes
    bytes,     // anything else
};
enum class Role : uint8_t { in, out, in_out, scratch };

// Where an operation's operands are `Addressed` they are what its kernel gets, pointers.
struct Addressed {
    template <Content content>
    using Element =
        std::conditional_t<content == Content::gradient || content == Content::table_gradient ||
                               content == Content::leaves,
                           float,
                           std::conditional_t<content == Content::tokens, int32_t, std::byte>>;
    template <Content content, Role role, bool optional>
    using Operand =
        std::conditional_t<role == Role::in, const Element<content>*, Element<content>*>;
};
// As the recorder is given them they are `Assigned` (planner/recording/recorder.h): views of
// buffers of that content. A row of the table describes them.
struct Described {
    template <Content of_content, Role in_role, bool is_optional>
    struct Operand {
        static constexpr Content content = of_content;
        static constexpr Role role = in_role;
        static constexpr bool optional = is_optional;
    };
};
template <class As, Content content>
using In = typename As::template Operand<content, Role::in, false>;
template <class As, Content content>
using Out = typename As::template Operand<content, Role::out, false>;
template <class As, Content content>
using InOut = typename As::template Operand<content, Role::in_out, false>;
template <class As, Content content>
using MaybeIn = typename As::template Operand<content, Role::in, true>;
template <class As, Content content>
using MaybeOut = typename As::template Operand<content, Role::out, true>;
template <class As, Content content>
using MaybeInOut = typename As::template Operand<content, Role::in_out, true>;
template <class As>
using Scratch = typename As::template Operand<Content::scratch, Role::scratch, false>;

}  // namespace ferry::cost
