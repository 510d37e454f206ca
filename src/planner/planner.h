// A plan follows from model, batch and budgets. It says where each object lives, and which buffers
// it passes through. recording/recorder.h turns a step into a schedule over it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cost/measurements.h"
#include "ferry/aio.h"
#include "ferry/dtype.h"
#include "ferry/error.h"
#include "ferry/units.h"
#include "model/model.h"
#include "planner/request.h"
#include "swap/objects.h"
#include "zero/zero.h"

namespace ferry::planner {

// ---------------------------------------------------------------- plan

constexpr int64_t kPage = 4096;  // what is read and written at once is whole ones

// A chunk is what the optimizer updates and what is moved at once: a run of a layer's flat buffer,
// inside one rank's shard of a segment. A plan has the chunks of which its rank keeps something.
struct Chunk {
    int64_t layer = 0;
    int64_t first = 0, count = 0;          // elements; multiples of 4,096
    bool trainable = true, decays = true;  // trainable: has gradient and state on this rank
    int owner = 0;                         // the rank whose shard it lies in
    bool replica = false;                  // only its weights are here; its owner updates them
    StateFormat format{};
    // Of Muon's matrix, which is one chunk, with zeros behind it; 0: a run of elements.
    int64_t rows = 0, cols = 0;
    bool speculative = false;  // may be updated before the step's outcome is known
    int32_t run = 1;  // of so many chunks it is the first (Plan::run_of); 0: it is another one
    swap::ObjectId weight = swap::kNoObject, state = swap::kNoObject, gradient = swap::kNoObject;
    int64_t first_leaf = 0;  // index among the norm leaves of this rank's shards
    // Where momentum is exchanged as signs, the chunks of this rank's shards have two more. `kept`
    // is this rank's gradient of the chunk's turn until the outcome. `feedback` is what the rank
    // keeps of the turn from step to step (zero/feedback.h).
    swap::ObjectId kept = swap::kNoObject, feedback = swap::kNoObject;
};

inline bool is_matrix(const Chunk& chunk) { return chunk.rows > 0; }

// The memory that Newton-Schulz works in, for one matrix. It holds the matrix, that of the next
// iteration, two products of the shorter side's length squared, and the leaves of the norm. Where
// products take a narrower type, it also holds their factors: the matrix and a product. Offsets are
// in floats.
struct MatrixWorkspace {
    int64_t count = 0, side = 0;  // of the chunk; of a product
    DType products = DType::f32;
    int64_t next() const { return count; }
    int64_t gram() const { return 2 * count; }
    int64_t square() const { return gram() + square_floats(); }
    int64_t leaves() const { return square() + square_floats(); }
    int64_t narrow() const { return leaves() + round_up(count / kLeafFloats, kFloatsApart); }
    int64_t narrow_square() const { return narrow() + count / 2; }
    int64_t bytes() const {
        if (products == DType::f32) return (leaves() + count / kLeafFloats) * 4;
        return (narrow_square() + square_floats() / 2) * 4;
    }
    int64_t square_floats() const { return round_up(side * side, kLeafFloats); }
    static constexpr int64_t kLeafFloats = 4096, kFloatsApart = 64;
};
inline MatrixWorkspace workspace_of(int64_t rows, int64_t cols, int64_t count, DType products) {
    return {.count = count, .side = std::min(rows, cols), .products = products};
}

// The products of a matrix's update, in so many iterations, with factors of that type. `from_host`:
// its state lies in host memory.
inline cost::MatrixProducts products_of(const Chunk& matrix, int64_t ns_steps, DType type,
                                        DType compute, bool from_host) {
    const auto narrow = static_cast<double>(std::min(matrix.rows, matrix.cols)),
               wide = static_cast<double>(std::max(matrix.rows, matrix.cols));
    return {.flops = static_cast<double>(ns_steps) * 2 * narrow * narrow * (2 * wide + narrow),
            .sent_bytes = from_host ? 8.0 * static_cast<double>(matrix.count) : 0,
            .type = type,
            .compute = compute};
}

// How many turns have their momentum under way at the same time; the same on every rank. Each turn
// has two buffers of parts, of which one takes gradients in, and its feedback. On a GPU each has as
// many buffers of codes in host memory.
constexpr int64_t kTurnsAtOnce = 2;

// Bytes in memory and on storage: whole arrays, one after the other, up to a page.
inline int64_t state_bytes(const Chunk& chunk) {
    return round_up(chunk.format.bytes(chunk.count), kPage);
}

// A run of a layer's fp32 accumulator that is spilled between groups. Every rank spills all of its
// own, as its micro-batches have left it.
struct AccumulatorSpill {
    int64_t layer = 0;
    int64_t first = 0, count = 0;
    swap::ObjectId object = swap::kNoObject;
    swap::ObjectId table = swap::kNoObject;  // tied: the head's part of the table's
};

// clang-format off
// A class of equally large buffers; those before `state_staging` are device memory.
enum class Class : uint8_t {
    block_weights, edge_weights, block_gradient, edge_gradient, wire, parts, codes, activation,
    attention, mlp, projections, deferred, norms, tokens, lists, scratch, report, state_staging, weight_staging, gradient_staging,
    input_staging, spill_staging, feedback_staging, codes_staging, second_staging, host_tokens
};
// clang-format on
constexpr int kClasses = 26;
constexpr Class class_of(model::Saved what) {
    constexpr model::OfSaved<Class> kOf{Class::attention, Class::mlp, Class::projections};
    return kOf[model::at(what)];
}
struct Buffers {
    std::string name{};
    swap::Tier tier = swap::Tier::device;
    int64_t bytes = 0, count = 0;
    int64_t offset = 0;  // where the first one begins in its arena
    uint32_t first_resource = 0;
};

struct LayerPlan {
    int64_t first_chunk = 0, chunks = 0;
    int64_t first_spill = 0, spills = 0;  // where there are several groups
    bool resident = false;                // this rank's weights live on the device
    model::OfSaved<bool> saves{};         // what the block saves on the device until backward
    int64_t device_offset = 0;            // resident: of the flat buffer, or of the shards together
    // The second shards of gathered weights, or of their codes, that this rank keeps, by segment
    // (zero::second_shards). Empty: none.
    std::vector<swap::ObjectId> second_shards{};
};

// What a line of the plan's table counts. A kind of slots on NVMe has a line for each of their
// sizes.
enum class RowKind : uint8_t {
    process,
    page_tables,
    weights_in_flight,
    accumulators,
    transfers,
    newton_schulz,
    block_inputs,
    block_lists,
    saved_attention,
    saved_projections,
    saved_mlp,
    deferred,
    scratch,
    resident_weights,
    state,
    weights,
    gradients,
    momentum,
    second_shards,
    report,
    tokens,
    staging,
    fresh_slots,
    maps,
    headers
};
struct RowName {
    RowKind kind{};
    std::string what{};  // for people
};
struct TierRow {
    swap::Tier tier = swap::Tier::device;
    RowKind kind{};
    std::string what{};
    int64_t bytes = 0;
};

// The numbers of groups that so many micro-batches can be cut into, the fewest first.
std::vector<int64_t> group_counts(int64_t micro_batches);

struct Plan {
    zero::Partition partition{};
    int64_t micro_batches = 1, groups = 1;  // a rank's in a step; they run group by group
    int64_t tokens = 0;                     // in a micro-batch, or this rank's part of it
    int64_t input_bytes = 0;                // of a micro-batch's block input, or its gradient
    model::Exchanges exchanges{};           // of the layers' kernels and a micro-batch
    int64_t chunk_elements = 0;             // of the largest chunk
    bool tied = false, documents = false;   // documents: a sequence holds some, isolated
    bool speculative = false,
         durable = false;  // some chunk is speculative; committed steps outlive the process
    bool verify = true;    // what comes back from NVMe is checked
    DType compute = DType::f32, wire = DType::f32;
    StateFormat state{};  // that the run asks for; Chunk::format is what a chunk has
    std::vector<model::Layer> layers{};
    std::vector<LayerPlan> layer_plans{};
    std::vector<Chunk> chunks{};
    std::vector<AccumulatorSpill> spills{};
    std::vector<swap::Object> objects{};
    // [layer * inputs_of_a_block() + i]; kNoObject: on the device
    std::vector<swap::ObjectId> inputs{};
    std::array<Buffers, kClasses> buffers{};
    std::vector<aio::SlotClass> slot_classes{};
    std::vector<swap::HostSlots> host_slots{};
    int64_t leaves = 0, leaves_offset = 0;  // fp32, in the host arena
    int64_t report_offset = 0;              // of a step's report, in the host arena
    int64_t ns_steps = 0;                   // Muon's iterations of a matrix
    DType ns_products = DType::f32;
    // Muon's workspace for one matrix, in the host arena: to orthogonalise it there, or to send it
    // to a GPU that does.
    int64_t workspace_bytes = 0, workspace_offset = 0;
    // Room on a GPU for matrices, with its libraries' scratch at the beginning. The team's updates
    // send matrices to the one; those whose state lies on the GPU use the other. Offset -1: there
    // is no such matrix.
    int64_t room_bytes = 0, room_scratch_bytes = 0;
    int64_t sent_room_offset = -1, own_room_offset = -1;
    uint32_t leaves_resource = 0, report_resource = 0, resources = 0;
    // Sizes of the arenas and volumes; the device holds device_overhead_bytes beside its arena.
    int64_t device_bytes = 0, host_bytes = 0, nvme_bytes = 0, device_overhead_bytes = 0;
    int64_t io_bytes = 0;      // prefix of the host arena that meets io_uring
    int64_t record_bytes = 0;  // durable: of the chunk map, and of the run's few numbers beside it
    std::vector<TierRow> rows{};

    int64_t group_size() const { return micro_batches / groups; }
    // Of a pipeline's stage several groups are under way, and each of them keeps its inputs.
    int64_t groups_under_way() const { return partition.stage.under_way(groups); }
    int64_t inputs_of_a_block() const { return groups_under_way() * group_size(); }
    int64_t groups_deferred() const { return partition.stage.deferred(groups); }
    std::span<const Chunk> chunks_of(int64_t layer) const {
        const LayerPlan& l = layer_plans[static_cast<size_t>(layer)];
        return {chunks.data() + l.first_chunk, static_cast<size_t>(l.chunks)};
    }
    std::span<const AccumulatorSpill> spills_of(int64_t layer) const {
        const LayerPlan& l = layer_plans[static_cast<size_t>(layer)];
        return {spills.data() + l.first_spill, static_cast<size_t>(l.spills)};
    }
    // Whether the chunk is in this rank's shard: a sum over the ranks counts it once.
    bool owns(const Chunk& chunk) const { return chunk.owner == partition.rank; }
    // Whether momentum is exchanged instead of gradients, sooner or later.
    bool has_feedback() const { return partition.codecs.momentum.on(); }
    // Whether the codes of momentum pass through host memory: the team makes them there, and the
    // ranks exchange copies on the device.
    bool stages_codes() const {
        return buffers[static_cast<size_t>(Class::codes_staging)].count > 0;
    }
    // Whether the device updates the chunk, after the outcome. Its state, weights and gradient all
    // lie there.
    bool updates_on_device(const Chunk& chunk) const {
        return chunk.trainable && objects[chunk.state].home == swap::Tier::device;
    }
    // This chunk and its next neighbours whose state the device has. One kernel rounds them
    // together, and one updates them. Where the device updates nothing, a chunk is a run of its
    // own.
    std::span<const Chunk> run_of(const Chunk& first) const {
        return {&first, static_cast<size_t>(first.run)};
    }
    int64_t elements_of_run(const Chunk& first) const {
        int64_t elements = 0;
        for (const Chunk& chunk : run_of(first)) elements += chunk.count;
        return elements;
    }
    bool trains_below(int64_t layer) const;  // something trainable in layers [0, layer)
    bool goes_back(int64_t layer) const;     // a block, and backward visits it
    int64_t blocks_saving(model::Saved what) const;
    model::BlockExchanges exchanges_of(int64_t layer) const;  // by what the block saves
    int64_t inputs_on_device() const;
    int64_t blocks_saving_inputs() const;  // for at least one micro-batch of a group
    int64_t blocks() const;                // of this rank's stage
    int64_t blocks_at_most() const;        // that could save something: backward visits them

    // A step's report: each micro-batch's sum of losses (double), then of each layer whether its
    // output was not finite (uint32). It reaches the host arena before the outcome.
    int64_t nonfinite_offset() const { return micro_batches * 8; }
    int64_t report_bytes() const { return nonfinite_offset() + std::ssize(layers) * 4; }
};

// What a run needs of the device, in bytes.
struct DeviceNeeds {
    // A micro-batch's block input; the kernels' largest scratch; what the process holds on the
    // device beside its arena.
    int64_t activation = 0, scratch = 0, overhead = 0;
    int64_t lists = 0;           // bytes of the block lists of attention's patterns
    int64_t matrix_scratch = 0;  // bytes that a GPU's products of Newton-Schulz ask for
    model::Exchanges exchanges{};
    // What a block can save of a micro-batch for backward (0: nothing), and the FLOPs that compute
    // it again, by block.
    model::OfSaved<int64_t> saved{};
    model::OfSaved<std::vector<double>> saved_flops{};
    // The device reads the host tier through page tables in its own memory, as a GPU does.
    bool maps_host = false;
    int64_t page_tables = 0;  // make_plan's own
    // What a block keeps of a micro-batch where backward leaves the gradients of weights for later.
    int64_t deferred = 0;
};

// One tier has too little room.
class DoesNotFit : public Error {
public:
    DoesNotFit(Problem problem, swap::Tier tier, int64_t smallest, std::string larger)
        : Error(Trouble::does_not_fit, std::move(problem)),
          tier_(tier),
          smallest_(smallest),
          larger_(std::move(larger)) {}
    swap::Tier tier() const { return tier_; }
    int64_t smallest() const { return smallest_; }  // budget of that tier that works, in bytes
    // The part of the remedy that says how to set that budget. The remedy names other ways too.
    const std::string& larger() const { return larger_; }

private:
    swap::Tier tier_;
    int64_t smallest_;
    std::string larger_;
};

// Throws DoesNotFit, with the bytes missing and the smallest budget that works. Where no tier's
// budget would be enough alone it throws does_not_fit. The partition must be able to cut `layers`.
Plan make_plan(const PlanRequest& request, const std::vector<model::Layer>& layers,
               const model::Numerics& numerics, const DeviceNeeds& needs,
               const cost::Measurements& machine, const zero::Partition& partition = {});

// What a row of the plan's table is needed for; docs/gpu.md says how large each is. Empty: no plan
// has such a row.
std::string_view reason_of(const TierRow& row, const Plan& plan);

// The format of a segment's chunks: whole arrays, one after the other.
StateFormat format_of(const StateFormat& asked, const model::Segment& segment);

}  // namespace ferry::planner
