// From model, batch and budgets to a plan: where each piece of state lives, which buffers it passes
// through, and the recorder that turns a step written as plain code into a schedule.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ferry/aio.h"
#include "ferry/base.h"
#include "ferry/config.h"
#include "ferry/model.h"
#include "ferry/swap.h"

namespace ferry::planner {

// ---------------------------------------------------------------- plan

// The unit of optimizer work and of movement: a run of a layer's flat buffer inside one segment.
struct Chunk {
    int64_t layer = 0;
    int64_t first = 0, count = 0;  // elements; multiples of 4,096
    bool trainable = true, decays = true;
    bool bets = false;  // may be updated before the step is settled
    swap::ObjectId weight = swap::kNoObject, state = swap::kNoObject, gradient = swap::kNoObject;
    swap::ObjectId park = swap::kNoObject;        // fp32 accumulator between groups
    swap::ObjectId park_table = swap::kNoObject;  // tied: the head's part of it
    int64_t first_leaf = 0;                       // index among all norm leaves
};

// clang-format off
enum class Class : uint8_t {  // of equally large buffers; the first nine are device memory
    block_weights, edge_weights, block_gradient, edge_gradient, wire, activation, tokens, scratch,
    report, stage, weight_piece, gradient_piece, input_piece, park_piece, host_tokens
};
// clang-format on
constexpr int kClasses = 15;
struct Buffers {
    std::string name{};
    swap::Tier tier = swap::Tier::device;
    int64_t bytes = 0, count = 0;
    int64_t offset = 0;  // of the first, in its arena
    uint32_t first_resource = 0;
};

struct LayerPlan {
    int64_t first_chunk = 0, chunks = 0;
    bool resident = false;      // weights live on the device
    int64_t device_offset = 0;  // resident: of the flat buffer
};

struct TierRow {  // a line of the plan's table
    swap::Tier tier = swap::Tier::device;
    std::string what{};
    int64_t bytes = 0;
};

struct Plan {
    int64_t micro_batches = 1, groups = 1;  // of a step; micro-batches go group by group
    int64_t chunk_elements = 0;
    bool tied = false;
    bool betting = false;  // some chunk bets
    bool verify = true;    // what comes back from NVMe is checked
    DType compute = DType::f32, wire = DType::f32;
    StateFormat state{};  // of a chunk: whole arrays, one after the other
    std::vector<model::Layer> layers{};
    std::vector<LayerPlan> layer_plans{};
    std::vector<Chunk> chunks{};
    std::vector<swap::Object> objects{};
    std::vector<swap::ObjectId> inputs{};  // [layer * group_size + i]; kNoObject: on the device
    std::array<Buffers, kClasses> buffers{};
    std::vector<aio::SlotClass> slot_classes{};
    std::vector<swap::HostSlots> host_slots{};
    int64_t leaves = 0, leaves_offset = 0;  // fp32, in the host arena
    int64_t report_offset = 0;              // of a step's report, in the host arena
    uint32_t leaves_resource = 0, report_resource = 0, resources = 0;
    // Of the arenas and volumes; the device holds device_overhead_bytes beside its arena.
    int64_t device_bytes = 0, host_bytes = 0, nvme_bytes = 0, device_overhead_bytes = 0;
    int64_t io_bytes = 0;  // prefix of the host arena that meets io_uring
    std::vector<TierRow> rows{};

    int64_t group_size() const { return micro_batches / groups; }
    std::span<const Chunk> chunks_of(int64_t layer) const {
        const LayerPlan& l = layer_plans[static_cast<size_t>(layer)];
        return {chunks.data() + l.first_chunk, static_cast<size_t>(l.chunks)};
    }
    int64_t state_bytes(const Chunk& chunk) const { return chunk.count * state.element_bytes(); }
    bool trains_below(int64_t layer) const;  // something trainable in layers [0, layer)

    // A step's report: each micro-batch's sum of losses (double), then of each layer whether its
    // output was not finite (uint32). It reaches the host arena before the verdict.
    int64_t nonfinite_offset() const { return micro_batches * 8; }
    int64_t report_bytes() const { return nonfinite_offset() + std::ssize(layers) * 4; }
};

// Bytes: of a block input of a micro-batch; of the kernels' largest scratch; of what the process
// holds on the device beside its arena.
struct DeviceNeeds {
    int64_t activation = 0, scratch = 0, overhead = 0;
};

// Throws does_not_fit naming the tier, the bytes missing and the smallest budget that works.
Plan make_plan(const Config& config, const std::vector<model::Layer>& layers,
               const model::Numerics& numerics, const DeviceNeeds& needs, const StateFormat& state);

// ---------------------------------------------------------------- recorder

// Kernels of a step and the places they are given, in order.
enum class Op : uint8_t {
    load_tokens,      // team: {host tokens and targets}; item: micro-batch of the step
    load_evaluation,  // the same for held-back text
    embed,            // {tokens, table, x}
    forward,          // {weights, x_in, x_out, scratch, report}
    head,             // {weights, table or none, x, tokens, dx, gradient, table gradient, scratch,
                      // report}; item: micro-batch, as the report counts them
    head_loss,        // {weights, table or none, x, tokens, -, -, -, scratch, report}
    backward,         // {weights, x_in, dx, gradient or none, scratch}; bytes 1: needs dx
    embed_backward,   // {tokens, dx, gradient}
    zero,             // {gradient or report}
    add,              // {gradient, gradient to add}
    round,            // {gradient, wire, leaves}; item: chunk
    update,           // team: {state in, state out, gradient, weight, weight before (split master:
                      // the same place or another; else none)}; item: chunk; settled scale
    update_bet,       // the same with scale 1, for the step of the schedule itself
    recast,           // team: {state, weight}; item: chunk
};

const char* name_of(Op op);

class Recorder;

// A view of a buffer between two points of the program; given back by the destructor.
class Lease {
public:
    Lease() = default;
    Lease(Lease&& other) noexcept;
    Lease& operator=(Lease&& other) noexcept;
    ~Lease() { release(); }
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
    Recorder(const Plan& plan, std::string name);
    ~Recorder();
    const Plan& plan() const { return plan_; }

    Lease acquire(Class buffers);
    Lease fetch_weights(int64_t layer);  // on the device, ready to compute with
    Lease fetch_gradient(int64_t layer, bool first_group, bool of_table = false);
    void park_gradient(int64_t layer, const Lease& gradient, bool of_table = false);
    void send_gradient(int64_t layer, const Lease& gradient);  // in the wire type, with norms
    Lease load_tokens(int64_t micro_batch, bool evaluation);
    void send_report(const Lease& report);               // to the host
    void keep_input(int64_t layer, int64_t i, Lease x);  // a block's input, until recalled
    Lease recall_input(int64_t layer, int64_t i);

    struct Operand {
        const Lease* lease;
        bool writes;
    };
    // `operands` become the task's places in order; a null lease is an empty place.
    void compute(Op op, int64_t layer, int64_t item, std::initializer_list<Operand> operands,
                 int64_t bytes = 0);

    void update_chunk(int64_t chunk, Op op);      // update, update_bet or recast
    enum class Move : uint8_t { in, out, both };  // read and checked; sealed and written; unchanged
    void move(swap::ObjectId stored, Class through, Move how);  // on NVMe, through host memory
    void commit(int64_t chunk);
    void rollback(int64_t chunk);
    void mark_verdict();  // norms and report have reached the host

    swap::Schedule finish();

private:
    friend class Lease;
    struct Impl;
    const Plan& plan_;
    std::unique_ptr<Impl> impl_;
};

}  // namespace ferry::planner
