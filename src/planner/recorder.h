// The recorder turns a step written as plain code into a schedule: what fetch, keep, send and
// update mean in tasks of a plan's lanes.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "planner/planner.h"
#include "swap/schedule.h"

namespace ferry::planner {

// Kernels of a step and the places they are given, in order.
enum class Op : uint8_t {
    load_tokens,      // team: {host tokens and targets}; item: micro-batch of the step
    load_evaluation,  // the same for held-back text
    embed,            // {tokens, table, x}
    forward,          // {weights, x_in, x_out, scratch, report, what to keep: of each or none}
    head,             // {weights, table or none, x, tokens, dx, gradient, table gradient, scratch,
                      // report}; item: micro-batch, as the report counts them
    head_loss,        // {weights, table or none, x, tokens, -, -, -, scratch, report}
    backward,         // {weights, x_in, dx, gradient or none, scratch, what was kept: of each or
                      // none}; flags: kNeedsDx, flag_of() what was kept
    embed_backward,   // {tokens, dx, gradient}
    zero,             // {gradient or report}
    add,              // {gradient, gradient to add}
    round,            // {gradient, wire, leaves}; item: chunk
    update,           // team, or compute where the state is the device's: {state in, state out,
                      // gradient, weight, weight before (split master: the same place or another;
                      // else none)}; item: chunk; scale of its outcome
    update_speculative,  // the same with scale 1, for the step of the schedule itself
    recast,              // team: {state, weight}; item: chunk
    // With several ranks a gradient is rounded in two ops, around an exchange:
    cut,              // {gradient, pieces}: each rank's part of a chunk's turn, in the wire type
    sum,              // {pieces, wire, leaves}: this rank's part, added and rounded; item: chunk
    gather_weights,   // comm: {whole layer, shards or none}
    exchange,         // comm: {pieces to the ranks, pieces from them}; item: chunk
    gather_gradient,  // comm: {wire, all ranks' wire}; item: chunk
    agree,            // comm: what the outcome needs to know of every rank
};

const char* name_of(Op op);
constexpr uint8_t kNeedsDx = 1;
constexpr uint8_t flag_of(model::Saved what) { return static_cast<uint8_t>(2U << model::at(what)); }

class Recorder;

// A view of a buffer between two points of the program; given back by the destructor.
class SlotLease {
public:
    SlotLease() = default;
    SlotLease(SlotLease&& other) noexcept;
    SlotLease& operator=(SlotLease&& other) noexcept;
    ~SlotLease() { release(); }
    void release();
    swap::Place place(int64_t offset = 0) const;
    std::span<const uint32_t> resources() const { return resources_; }

private:
    friend class Recorder;
    Recorder* recorder_ = nullptr;
    Class class_ = Class::stage;
    int64_t index_ = -1;  // of the buffer; -1: nothing to give back
    swap::Place place_{};
    std::vector<uint32_t> resources_{};
};

// Records tasks in program order. Waits follow from what each task reads and writes; buffers are
// assigned like registers, the one released longest ago first, so that copies run ahead of kernels
// as far as the buffers reach.
class Recorder {
public:
    enum class Keep : uint8_t { schedule, bytes };  // bytes: only how many, which is much faster
    Recorder(const Plan& plan, std::string name, Keep keep = Keep::schedule);
    ~Recorder();
    const Plan& plan() const { return plan_; }

    SlotLease acquire(Class buffers);
    SlotLease fetch_weights(int64_t layer);  // on the device, ready to compute with
    // The same just after an update; where every rank keeps all weights, it then has the new ones.
    SlotLease fetch_updated_weights(int64_t layer);
    void share_updates(int64_t layer);  // no more than that: every rank has the new ones
    // The layer fetched next. Where ranks gather weights and there is a buffer, its all-gather goes
    // before the exchanges that follow, and so beside the work of this layer.
    void prefetch_weights(int64_t layer);
    SlotLease fetch_gradient(int64_t layer, bool first_group, bool of_table = false);
    void spill_gradient(int64_t layer, const SlotLease& gradient, bool of_table = false);
    // In the wire type, with norms. With several ranks they are under way to their owners, and
    // receive_gradient() takes in what has come: the later, the less anyone waits for it.
    void send_gradient(int64_t layer, const SlotLease& gradient);
    void receive_gradient();
    SlotLease load_tokens(int64_t micro_batch, bool evaluation);
    void send_report(const SlotLease& report);               // to the host
    void save_input(int64_t layer, int64_t i, SlotLease x);  // a block's input, until fetched
    SlotLease fetch_input(int64_t layer, int64_t i);
    // The input fetched next. If it has left the device, its copy begins here.
    void prefetch_input(int64_t layer, int64_t i);

    struct Operand {
        const SlotLease* lease;
        bool writes;
    };
    // `operands` become the task's places in order; a null lease is an empty place. `bytes`: of
    // those ops that come in several sizes.
    struct Detail {
        int64_t bytes = 0;
        uint8_t flags = 0;
    };
    void compute(Op op, int64_t layer, int64_t item, std::initializer_list<Operand> operands,
                 const Detail& detail);
    void compute(Op op, int64_t layer, int64_t item, std::initializer_list<Operand> operands) {
        compute(op, layer, item, operands, Detail{});
    }

    void update_chunk(int64_t chunk, Op op);      // update, update_speculative or recast
    enum class Move : uint8_t { in, out, both };  // read and checked; sealed and written; unchanged
    void move(swap::ObjectId stored, Class through, Move how);  // on NVMe, through host memory
    void commit(int64_t chunk);
    void rollback(int64_t chunk);
    void mark_committed();  // all that the step before still had to do is recorded
    void mark_outcome();    // norms and report have reached the host, and every rank knows of all

    swap::Schedule finish();
    // Of the tasks recorded so far, on each lane.
    const std::array<int64_t, swap::kLanes>& bytes() const;

private:
    friend class SlotLease;
    struct Impl;
    SlotLease acquire_for_weights(int64_t layer);
    SlotLease gather_shards(int64_t layer);
    void gather(int64_t layer, const SlotLease& whole, const SlotLease* shards);
    void exchange(int64_t chunk, const SlotLease& gradient);
    void receive_oldest();
    void gather_gradient(int64_t chunk, const SlotLease& wire);
    void agree();
    swap::Place leaves_in(const SlotLease& wire) const;
    void send_leaves(const Chunk& chunk, const SlotLease& wire);

    const Plan& plan_;
    std::unique_ptr<Impl> impl_;
};

}  // namespace ferry::planner
