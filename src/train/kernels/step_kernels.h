// The kernels that a schedule's tasks name, bound to the model, the optimizer and the loader.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "cost/kernel_times.h"
#include "cost/operands.h"
#include "data/tokens.h"
#include "ferry/team.h"
#include "kernel_exchange.h"
#include "model/model.h"
#include "muon.h"
#include "ops/ops.h"
#include "planner/planner.h"
#include "step_state.h"
#include "swap/store.h"
#include "trace_rows.h"
#include "updated_chunks.h"

namespace ferry::train {

// Null where no kernel of that sort is run: measuring loads no tokens, and updates alone need none.
struct StepModel {
    const model::Decoder* decoder = nullptr;
    ops::Ops* ops = nullptr;
    const Batches* loader = nullptr;
    int64_t evaluation_micro_batches = 0;  // over all ranks; beyond them there are no targets
    Device* device = nullptr;              // whose compute stream updates what lies there
    WorkerRows* workers = nullptr;         // rows of a trace; null: none
    Muon* muon = nullptr;                  // where the plan has matrices of its
    KernelExchanges exchanges{};           // of a block's kernels
};

class StepKernels final : public swap::Kernels {
public:
    StepKernels(const planner::Plan& plan, NodeTeams& teams, const StepModel& model);
    void run(const swap::Call& call) noexcept override;
    // True of updates by element while nobody listens: a listener wants them in order, and all
    // matrices share one workspace.
    bool runs_beside(const swap::Task& task) const override;
    // True of passes to other stages, where a GPU's kernels exchange. Launching kernels waits when
    // the stream is full of work that waits for other ranks of the stage.
    bool leaves_first(const swap::Task& exchange) const override {
        return model_.exchanges.any() && on_gpu() && cost::passes(exchange);
    }
    std::string describe(const swap::Call& call) const override;

    StepStates& states() { return states_; }
    // Real targets of the held-back text loaded since.
    int64_t& evaluation_targets() { return evaluation_targets_; }
    // Where evaluation puts the logits of its first tokens, as many as there is room for, in fp32.
    // `asks`: whether any of the ranks that put them together has room.
    void keep_logits(std::span<float> room, bool asks) {
        logits_ = room;
        asks_for_logits_ = asks;
    }
    // From now on `listener` hears of what the team updates after the outcome, in schedules that
    // are appended afterwards. Null: nobody does. Call it only while no such kernel runs. After an
    // error the listener stays.
    void tell_of_updates(std::shared_ptr<UpdatedChunks> listener) {
        listener_ = std::move(listener);
    }

private:
    using At = cost::Addressed;
    void dispatch(const swap::Call& call);
    // One for each operation of the compute and the team lane.
    void kernel(const swap::Call& call, const cost::op::LoadTokens<At>& at);
    void kernel(const swap::Call& call, const cost::op::LoadEvaluation<At>& at);
    void kernel(const swap::Call& call, const cost::op::Embed<At>& at);
    void kernel(const swap::Call& call, const cost::op::Forward<At>& at);
    void kernel(const swap::Call& call, const cost::op::Head<At>& at);
    void kernel(const swap::Call& call, const cost::op::HeadLoss<At>& at);
    void kernel(const swap::Call& call, const cost::op::Backward<At>& at);
    void kernel(const swap::Call& call, const cost::op::WeightGradients<At>& at);
    void kernel(const swap::Call& call, const cost::op::EmbedBackward<At>& at);
    void kernel(const swap::Call& call, const cost::op::Zero<At>& at);
    void kernel(const swap::Call& call, const cost::op::Add<At>& at);
    void kernel(const swap::Call& call, const cost::op::Round<At>& at);
    void kernel(const swap::Call& call, const cost::op::Cut<At>& at);
    void kernel(const swap::Call& call, const cost::op::Combine<At>& at);
    void kernel(const swap::Call& call, const cost::op::Sum<At>& at);
    void kernel(const swap::Call& call, const cost::op::EncodeWeights<At>& at);
    void kernel(const swap::Call& call, const cost::op::DecodeWeights<At>& at);
    void kernel(const swap::Call& call, const cost::op::Keep<At>& at);
    void kernel(const swap::Call& call, const cost::op::Compress<At>& at);
    void kernel(const swap::Call& call, const cost::op::MoveAlone<At>& at);
    void kernel(const swap::Call& call, const cost::op::Merge<At>& at);
    void kernel(const swap::Call& call, const cost::op::Average<At>& at);
    void kernel(const swap::Call& call, const cost::op::Update<At>& at);
    void kernel(const swap::Call& call, const cost::op::UpdateSpeculative<At>& at);
    void kernel(const swap::Call& call, const cost::op::Recast<At>& at);

    // The chunk lies so many elements into each rank's shard.
    void encode(const cost::op::Cut<At>& at, const planner::Chunk& chunk,
                const model::Segment& segment, int64_t within);
    void encode_on_gpu(const cost::op::Cut<At>& at, const planner::Chunk& chunk,
                       const model::Segment& segment, int64_t within);
    void decode(const cost::op::Sum<At>& at, const planner::Chunk& chunk);
    void encode_weights_on_gpu(const swap::Call& call, const cost::op::EncodeWeights<At>& at);
    void decode_weights_on_gpu(const swap::Call& call, const cost::op::DecodeWeights<At>& at);
    bool on_gpu() const { return model_.device && model_.device->kind() == DeviceKind::cuda; }
    void* compute_stream() const { return model_.device->stream(StreamKind::compute).native(); }

    // Calls body(rank, first) for each leaf of every rank's run of a turn.
    template <class Body>
    void each_leaf_of_turn(const planner::Chunk& chunk, int ranks, const Body& body);
    zero::Feedback feedback_of(const planner::Chunk& chunk, std::byte* at) const;

    template <class Byte, class Body>
    void each_coded_segment(const swap::Call& call, Byte* codes, const Body& body) const;
    template <class Byte, class Body>
    void each_coded_tile(const swap::Call& call, Byte* codes, int first_rank, int end_rank,
                         const Body& body);
    const std::byte* weights_of_segment(const cost::op::EncodeWeights<At>& at,
                                        const model::Segment& segment) const;

    const planner::Chunk& chunk_of(const swap::Call& call) const;
    MicroBatch loaded(int32_t* tokens) const;
    int64_t held_back_number(const swap::Call& call) const;  // among all ranks'
    const int32_t* targets(const int32_t* tokens) const;
    model::Documents documents(const int32_t* tokens) const;
    void begin_exchanges(const swap::Call& call);
    static double* loss_sum(const swap::Call& call, std::byte* report);
    static ops::Accumulator sums(const swap::Call& call, float* gradient);
    void keep(int64_t token, int64_t column, ops::ConstView logits);
    template <cost::Op which>
    void update(const swap::Call& call, const cost::op::Updating<At, which>& at,
                const ScalarsByKind& scalars);
    // Of a run that the device updates: `at` says where the first one's operands are.
    template <cost::Op which>
    std::span<const optim::Span> spans_on_device(const planner::Chunk& first,
                                                 const cost::op::Updating<At, which>& at);
    void apply(const swap::Call& call, std::span<const optim::Span> spans,
               const ScalarsByKind& by_kind);
    void update_weight(const swap::Call& call, const optim::Span& span,
                       const ScalarsByKind& by_kind);
    bool intact(const swap::Call& call, swap::ObjectId object, const std::byte* bytes) const;
    void seal(const swap::Call& call, swap::ObjectId object, const std::byte* bytes) const;

    const planner::Plan& plan_;
    NodeTeams& teams_;
    const StepModel model_;
    StepStates states_;
    int64_t evaluation_targets_ = 0;
    std::span<float> logits_{};
    bool asks_for_logits_ = false;
    std::shared_ptr<UpdatedChunks> listener_{};
    std::vector<optim::Span> spans_of_device_{};  // room for those of the longest run
    // Where a GPU's weights are encoded while it computes with others.
    std::unique_ptr<zero::cuda::Beside> beside_{};
};

}  // namespace ferry::train
