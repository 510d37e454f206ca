// The table of operations: of each what it is given, where it runs, how it is timed, what it
// touches and multiplies. The recorder, the kernels, the time model, the trace and the machine file
// read it; docs/adding-an-operation.md adds a row.
#pragma once

#include <cstdint>
#include <span>

#include "cost/operations.h"
#include "cost/traffic.h"
#include "ferry/dtype.h"
#include "model/model.h"
#include "model/saved_activations.h"
#include "swap/schedule.h"
#include "zero/zero.h"

namespace ferry::cost {

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
    model::BlockExchanges exchanges{};                      // of the layer, from within
    MatrixProducts products{};                              // an update's, of Muon's matrix
    int64_t checked_bytes = 0;  // bytes that an update verifies and seals: from and to storage
    int64_t ranks = 1;
    int64_t summed_parts = 1;  // that the owner of a shard adds
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
    momentum,  // the same, at the rate of what codes momentum
    memory,    // not timed: its task's bytes at the rate of memory
    layer,     // no more than that
    flags,     // those say what backward computes
    elements,  // the chunk's elements
    bytes,
};
// The part of a layer's pass over a micro-batch that an operation is.
enum class Pass : uint8_t {
    none,        // of a pass it is no part
    forward,     // of training, and of an evaluation
    backward,    // with what of forward it computes again
    both,        // in one visit
    left,        // what a backward may leave to be done later
    evaluation,  // forward of held-back text alone
};
// The end of what stages pass that an operation is.
enum class StageEnd : uint8_t { none, sends, receives };
struct OperationRow {
    Op op{};
    const char* name = nullptr;
    swap::Lane lane = swap::Lane::compute;  // with a stream where the device has one for it
    bool device_too = false;  // on the compute lane where the chunk's state is the device's
    bool spans_run = false;   // on the compute lane its task is of all chunks of a run
    ItemOf item = ItemOf::none;
    TimedBy timed_by = TimedBy::nothing;
    Pass pass = Pass::none;
    model::LayerKind layer{};       // of a pass: over layers of this kind
    bool exchanges_within = false;  // exchanges_within() where it is on the compute lane
    // Of the comm lane: the ranks that it is among; with kAcrossHosts among its flags one of two
    // levels is among those that stand alike in their hosts; the ranks of all stages meet at one.
    Among among = Among::all;
    bool of_two_levels = false, of_all_stages = false;
    StageEnd stage_end = StageEnd::none;  // where neighbouring stages pass something
    bool gathers_weights = false;         // or their codes
    bool of_codecs = false;  // its time is another where gradients or weights travel as codes
    // Bytes of its operands, read and written, without scratch, report and what ranks agree on. A
    // table counts by the rows that occur, taken to be as large as the block input that they make.
    int64_t (*bytes)(const Work&) = nullptr;
    double (*flops)(const Work&) = nullptr;  // FLOPs of its products; null: it has none
    std::span<const OperandOf> operands{};   // as the places of a task
};

std::span<const OperationRow> operations();  // by Op
const OperationRow& row_of(Op op);
inline const OperationRow& row_of(const swap::Task& kernel) {
    return row_of(static_cast<Op>(kernel.op));
}
// Whether its kernel exchanges with the ranks that share sequences or tensors, where some do.
bool exchanges_within(const swap::Task& task);
// The ranks that a task of the comm lane exchanges among, but for what stages pass.
Among among(const swap::Task& exchange);
inline const char* name_of(Op op) { return row_of(op).name; }
// A kernel has its operation's name, every other task its verb's.
const char* name_of(const swap::Task& task);

}  // namespace ferry::cost
