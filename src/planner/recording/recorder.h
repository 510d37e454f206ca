// The recorder turns a step written as plain code into a schedule. It knows which tasks of a plan's
// lanes fetch, save, send and update stand for.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "cost/operands.h"
#include "planner/planner.h"
#include "swap/schedule.h"

namespace ferry::planner {

// Operations and their operands, in the words of their table.
using cost::Content;
using cost::Op;
using cost::Role;
namespace op = cost::op;

// The class of buffers that holds this content, where it is one class alone.
constexpr Class buffers_of(Content content) {
    switch (content) {
        case Content::input:
        case Content::input_gradient:
            return Class::activation;
        case Content::attention:
            return Class::attention;
        case Content::mlp:
            return Class::mlp;
        case Content::projections:
            return Class::projections;
        case Content::deferred:
            return Class::deferred;
        case Content::scratch:
            return Class::scratch;
        case Content::report:
            return Class::report;
        case Content::wire:
            return Class::wire;
        case Content::parts:
        case Content::arrived:
            return Class::parts;
        case Content::codes:
            return Class::codes;
        default:
            bug("no class of buffers holds this alone");
    }
}

// A task's details beside its operands.
struct Detail {
    int64_t bytes = 0;  // where the operation has several sizes, or ranks exchange it
    uint8_t flags = 0;
    bool on_device = false;                  // for operations that may run on device or host
    std::span<const uint32_t> overwrites{};  // buffers that it uses up, whatever its operands
};

class Recorder;

// A buffer that the step holds for a while. The destructor gives it back.
class AssignedBuffer {
public:
    AssignedBuffer() = default;
    AssignedBuffer(AssignedBuffer&& other) noexcept;
    AssignedBuffer& operator=(AssignedBuffer&& other) noexcept;
    ~AssignedBuffer() { release(); }
    void release();
    swap::OperandPlace place(int64_t offset = 0) const;
    std::span<const uint32_t> resources() const { return resources_; }

private:
    friend class Recorder;
    Recorder* recorder_ = nullptr;
    Class class_ = Class::state_staging;
    int64_t index_ = -1;  // the buffer's number; -1: nothing to give back
    swap::OperandPlace place_{};
    std::vector<uint32_t> resources_{};
};

// A buffer that is known to hold this content. It is empty where an operation may do without.
template <Content content>
class BufferOf : public AssignedBuffer {
public:
    BufferOf() = default;
    explicit BufferOf(AssignedBuffer&& buffer) noexcept : AssignedBuffer(std::move(buffer)) {}
};

// Where an operand lies that is no buffer of its own: an object, or a part of a buffer. Its user
// waits for earlier users of `resources`, which must outlive the record.
struct Located {
    swap::OperandPlace place{};
    std::span<const uint32_t> resources{};
};
// An operand that is known to hold this content: one to be read, and one to be written. They are
// two types, so that an old version and the new one cannot be exchanged.
template <Content content>
struct LocatedOf : Located {};
template <Content content>
struct WrittenOf : Located {};

// How the recorder is given operands: as buffers of what they hold, or as places. An operation
// writes to a buffer that is not const, or to a WrittenOf. An operand that it cannot do without has
// no default.
struct Assigned {
    struct GivenOperand {
        Located at{};
        Role role = Role::in;
        bool optional = false;
    };
    template <Content content, Role role, bool optional>
    class Operand {
    public:
        static constexpr bool kWrites = role != Role::in;
        Operand() requires optional = default;
        // NOLINTBEGIN(google-explicit-constructor): an operation names its buffers in braces.
        Operand(const BufferOf<content>& buffer) requires(!kWrites) : at_(located(buffer)) {}
        Operand(BufferOf<content>& buffer) requires kWrites : at_(located(buffer)) {}
        // Whatever it holds.
        template <Content any>
        Operand(BufferOf<any>& buffer) requires(content == Content::bytes) : at_(located(buffer)) {}
        Operand(const LocatedOf<content>& at) requires(!kWrites) : at_(at) {}
        Operand(const WrittenOf<content>& at) requires kWrites : at_(at) {}
        Operand(BufferOf<content>&&) = delete;  // it would be given back before it is used
        // NOLINTEND(google-explicit-constructor)
        GivenOperand given() const { return {at_, role, optional}; }

    private:
        static Located located(const AssignedBuffer& buffer) {
            return {buffer.place(), buffer.resources()};
        }
        Located at_{};
    };
};

// Records tasks in program order. Waits follow from what each task reads and writes. Buffers are
// assigned like registers, the one released longest ago first. So copies run ahead of kernels as
// far as the buffers reach.
class Recorder {
public:
    enum class Keep : uint8_t { schedule, bytes };  // bytes: only how many, which is much faster
    Recorder(const Plan& plan, std::string name, Keep keep = Keep::schedule);
    ~Recorder();
    const Plan& plan() const { return plan_; }

    AssignedBuffer acquire(Class buffers);
    template <Content content>
    BufferOf<content> acquire() {
        constexpr Class kBuffers = buffers_of(content);
        return BufferOf<content>(acquire(kBuffers));
    }
    using Weights = BufferOf<Content::weights>;
    using Gradient = BufferOf<Content::gradient>;
    using TableGradient = BufferOf<Content::table_gradient>;
    using Input = BufferOf<Content::input>;

    // A layer's weights on the device, ready to compute with. At its first visit in a step a layer
    // leaves its second shards in the host, where it has some. Later visits gather those.
    enum class Visit : uint8_t { any, first };
    Weights fetch_weights(int64_t layer, Visit visit = Visit::any);
    // The same just after an update. Where every rank keeps all weights, every rank then has the
    // new ones.
    Weights fetch_updated_weights(int64_t layer);
    void share_updates(int64_t layer);  // every rank gets the new ones, and nothing is fetched
    // Announces the layer that is fetched next. Where ranks gather weights and a buffer is free,
    // its all-gather goes before the exchanges that follow. So it runs beside the work of this
    // layer.
    void prefetch_weights(int64_t layer);
    // An accumulator. For the first group it has no contents: the first operation that adds to a
    // block's or a head's writes all of it (cost::kFresh). The embedding's is zero.
    Gradient fetch_gradient(int64_t layer, bool first_group);
    Gradient norms_gradient(int64_t layer);                // of a block's norms alone, zero
    TableGradient fetch_table_gradient(bool first_group);  // tied: the head's part of it
    void spill_gradient(int64_t layer, const Gradient& gradient);
    void spill_table_gradient(const TableGradient& gradient);
    // Rounds a gradient to the wire type and takes its norms. With several ranks it is then under
    // way to its owners. receive_gradient() takes in what has come from the others: the later it is
    // called, the less it waits.
    void send_gradient(int64_t layer, const Gradient& gradient);
    void receive_gradient();
    // The same where momentum is exchanged: this rank keeps its gradient, with norms, until the
    // outcome. update_by_momentum() then exchanges the momentum of a layer and updates its chunks.
    void keep_gradient(int64_t layer, const Gradient& gradient);
    void update_by_momentum(int64_t layer);
    // In a local step: moves this rank's weights alone.
    void update_alone(int64_t layer);
    BufferOf<Content::tokens> load_tokens(int64_t micro_batch, bool evaluation);
    void send_report(const BufferOf<Content::report>& report);  // to the host
    // A block's input, until fetched; `i`: of Plan::inputs_of_a_block().
    void save_input(int64_t layer, int64_t i, Input x);
    Input fetch_input(int64_t layer, int64_t i);
    // The input fetched next. If it has left the device, its copy begins here.
    void prefetch_input(int64_t layer, int64_t i);

    // Between the stages of a pipeline: passes what a buffer holds to another rank, or takes it
    // over from one.
    template <Content content>
    void pass_on(cost::StageLink link, int64_t layer, int64_t item, BufferOf<content>& what,
                 int64_t bytes) {
        record<op::PassOn>(layer, item, {.what = what},
                           {.bytes = bytes, .flags = static_cast<uint8_t>(link)});
    }
    template <Content content>
    void take_over(cost::StageLink link, int64_t layer, int64_t item, BufferOf<content>& what,
                   int64_t bytes) {
        record<op::TakeOver>(layer, item, {.what = what},
                             {.bytes = bytes, .flags = static_cast<uint8_t>(link)});
    }
    // Of a tied model: the first stage gives the last one the embedding's weights once they are
    // updated. `table` is all of them. Where ranks keep shards of weights only those go, and
    // `table` is not used.
    void give_table(const Weights& table);
    void take_table();

    // A task of this operation with these operands (cost/operands.h), on its row's lane.
    template <template <class> class Operation>
    void record(int64_t layer, int64_t item, const Operation<Assigned>& operands,
                const Detail& detail = {}) {
        const auto given = std::apply([](const auto&... o) { return std::array{o.given()...}; },
                                      op::fields<op::kOperands<Operation>>(operands));
        record_kernel(Operation<Assigned>::kOp, layer, item, given, detail);
    }

    // `op` is update, update_speculative or recast. Given momentum, update moves by that in place
    // of a gradient.
    struct ByMomentum {
        Located momentum{};
        bool leaves_state = false;  // it is of the weight alone
    };
    void update_chunk(int64_t chunk, Op op, const ByMomentum* by = nullptr);
    enum class Move : uint8_t { in, out, both };  // read and checked; sealed and written; unchanged
    void move(swap::ObjectId stored, Class through, Move how);  // on NVMe, through host memory
    void commit(int64_t chunk);
    void rollback(int64_t chunk);
    void mark_committed();  // all that the step before still had to do is recorded
    void mark_outcome();    // norms and report have reached the host, and every rank knows of all

    swap::Schedule finish();
    // Bytes of the tasks recorded so far, on each lane.
    const std::array<int64_t, swap::kLanes>& bytes() const;

private:
    friend class AssignedBuffer;
    struct Impl;
    template <Content content>
    struct ChunkPart;
    void record_kernel(Op op, int64_t layer, int64_t item,
                       std::span<const Assigned::GivenOperand> operands, const Detail& detail);
    Weights acquire_for_weights(int64_t layer);
    Weights gather_shards(int64_t layer, Visit visit, BufferOf<Content::codes>& codes);
    Weights gather_in_host(int64_t layer, BufferOf<Content::codes>& codes);
    void keep_second_shards(int64_t layer, const AssignedBuffer& gathered);
    BufferOf<Content::codes> gather_codes(int64_t layer, const Weights& whole,
                                          const Weights& shards);
    void decode_weights(int64_t layer, const BufferOf<Content::codes>& codes, Weights& whole);
    void gather(int64_t layer, Weights& whole, const Weights& shards);
    template <Content content>
    BufferOf<content> fetch_accumulator(int64_t layer, bool first_group);
    template <Content content>
    void spill_accumulator(int64_t layer, const BufferOf<content>& gradient);
    template <template <class> class Operation>
    void record_update(int64_t chunk, const ChunkPart<Content::state>& state,
                       const ChunkPart<Content::wire>& gradient,
                       const ChunkPart<Content::weight>& weight, const Detail& detail);
    void exchange(int64_t chunk, const Gradient& gradient);
    void combine_oldest();
    void receive_oldest();
    void gather_gradient(int64_t chunk, const BufferOf<Content::wire>& wire);
    struct Turn;  // whose momentum is under way
    template <Content content>
    BufferOf<content> codes_of_team();
    BufferOf<Content::parts> codes_to_ranks(const Chunk& chunk, BufferOf<Content::parts> made);
    template <Content content>
    BufferOf<content> codes_from_ranks(const Chunk& chunk, BufferOf<content> arrived);
    void copy_codes(const Chunk& chunk, swap::Lane lane, const AssignedBuffer& from,
                    const AssignedBuffer& to, const zero::ByteRun& run);
    int64_t bytes_of_turn(const Chunk& chunk) const;  // of codes, all ranks' parts
    Turn fetch_turn(int64_t chunk);
    Turn compress(int64_t chunk);
    void merge(Turn& turn);
    void average(Turn turn);
    void update_turn(Turn& turn, bool alone);
    void agree();
    WrittenOf<Content::leaves> leaves_in(const AssignedBuffer& wire, const Chunk& chunk) const;
    void send_leaves(const Chunk& chunk, int64_t elements, const AssignedBuffer& wire);

    const Plan& plan_;
    std::unique_ptr<Impl> impl_;
};

}  // namespace ferry::planner
