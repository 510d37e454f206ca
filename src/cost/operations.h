// The table of operations: of each what it is given, where it runs, how it is timed, what it
// touches and multiplies. The recorder, the kernels, the time model, the trace and the machine file
// read it; docs/adding-an-operation.md adds a row.
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
    embed_backward,
    zero,
    add,
    round,               // to the wire type, with norm leaves
    update,              // by the scale of the outcome; of a device's state by the device
    update_speculative,  // with scale 1, for the step of the schedule itself
    recast,
    // With several ranks a gradient is rounded in two operations, around an exchange:
    cut,  // each rank's part of a chunk's turn, in the wire type
    sum,  // this rank's part, added and rounded
    // The weights that all gather, where they travel as codes, in three: encoded by the team, since
    // the comm lane waits for it while a layer before computes.
    encode_weights,
    gather_codes,
    decode_weights,
    // Where momentum travels instead of gradients (zero/feedback.h): the gradients that wait for
    // the outcome, the signs of every rank's share of a turn, and of what its owner made of them.
    // Or a rank goes on alone, and sends nothing.
    keep,
    compress,
    move_alone,
    exchange_momentum,
    merge,
    gather_momentum,
    average,
    gather_weights,
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

// Flags of what stages pass: to or from whom.
enum class Link : uint8_t { previous, next, table };  // table: the first stage and the last one
constexpr int kLinks = 3;

// Flags of a block's backward.
constexpr uint8_t kNeedsDx = 1;
constexpr uint8_t flag_of(model::Saved what) { return static_cast<uint8_t>(2U << model::at(what)); }

// ---------------------------------------------------------------- operands

// The content of an operand. Two of the same content are told apart by their role.
enum class Content : uint8_t {
    weights,         // a layer's flat buffer, or shards of it, in the compute type
    table,           // the embedding layer's
    input,           // a block input, which is the output of the layer below
    input_gradient,  // d(input)
    attention,       // attention's output, saved for backward
    mlp,
    projections,
    gradient,        // fp32 accumulator of a layer's trainable prefix
    table_gradient,  // tied: the head's part of the table's
    tokens,          // a micro-batch's tokens, targets and documents' bounds; int32
    scratch,         // nothing before and nothing after
    report,
    wire,      // gradient of a chunk in the wire type; gathered: of every rank's
    parts,     // the ranks' parts of a turn
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
// As the recorder is given them they are `Assigned` (recorder.h): views of buffers of that content.
// A row of the table describes them.
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

// ---------------------------------------------------------------- rows

// Products of Muon's update of a matrix, by what computes the model.
struct MatrixProducts {
    double flops = 0;
    double sent_bytes = 0;                          // up to a GPU and down again
    DType type = DType::f32, compute = DType::f32;  // of their factors; the model's
};

// A task as its row counts it.
struct Work {
    const model::Layer* layer = nullptr;  // null: of none
    const model::Layer* table = nullptr;  // tied: the embedding's, which the head multiplies by
    int64_t elements = 0;                 // elements of the task's chunk; 0: it has none
    int64_t bytes = 0;                    // the task's own, where the operation has several sizes
    uint8_t flags = 0;
    int64_t tokens = 0, tokens_bytes = 0, input_bytes = 0;  // one micro-batch's
    model::BlockExchanges exchanges{};                      // of a block, from within
    MatrixProducts products{};                              // an update's, of Muon's matrix
    int64_t checked_bytes = 0;  // bytes that an update verifies and seals: from and to storage
    int64_t ranks = 1;
    zero::Codecs codecs{};
    DType compute = DType::f32, wire = DType::f32;
    StateFormat state{};
    model::OfSaved<double> saved_flops{};  // FLOPs to compute each activation that a block may save
};

struct OperandOf {
    Content content = Content::bytes;
    Role role = Role::in;
    bool optional = false;
};
enum class ItemOf : uint8_t { none, micro_batch, chunk };
// The key, besides operation and kind of layer, by which tasks' times differ.
enum class TimedBy : uint8_t {
    nothing,   // not timed: it takes no time, or that of its lane's bytes
    update,    // not timed: its bytes at the rate that updates reach
    memory,    // not timed: its task's bytes at the rate of memory
    layer,     // no more than that
    flags,     // those say what backward computes
    elements,  // the chunk's elements
    bytes,
};
struct Row {
    Op op{};
    const char* name = nullptr;
    swap::Lane lane = swap::Lane::compute;  // with a stream where the device has one for it
    bool device_too = false;  // on the compute lane where the chunk's state is the device's
    ItemOf item = ItemOf::none;
    TimedBy timed_by = TimedBy::nothing;
    bool of_codecs = false;  // its time is another where gradients or weights travel as codes
    // Bytes of its operands, read and written, without scratch, report and what ranks agree on. A
    // table counts by the rows that occur, taken to be as large as the block input that they make.
    int64_t (*bytes)(const Work&) = nullptr;
    double (*flops)(const Work&) = nullptr;  // FLOPs of its products; null: it has none
    std::span<const OperandOf> operands{};   // as the places of a task
};

std::span<const Row> operations();  // by Op
const Row& row_of(Op op);
inline const Row& row_of(const swap::Task& kernel) { return row_of(static_cast<Op>(kernel.op)); }
inline const char* name_of(Op op) { return row_of(op).name; }
// A kernel has its operation's name, every other task its verb's.
const char* name_of(const swap::Task& task);

}  // namespace ferry::cost
