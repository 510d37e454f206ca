// The kernels that a schedule's tasks name, bound to the model, the optimizer and the loader.
#pragma once

#include <span>
#include <string>

#include "data/tokens.h"
#include "ferry/swap.h"
#include "ferry/team.h"
#include "model/model.h"
#include "ops/ops.h"
#include "planner/planner.h"
#include "step_state.h"
#include "swap/store.h"
#include "trace_rows.h"

namespace ferry::train {

// Null where no kernel of that sort is run: measuring loads no tokens, and updates alone need none.
struct StepModel {
    const model::Decoder* decoder = nullptr;
    ops::Ops* ops = nullptr;
    const TokenLoader* loader = nullptr;
    int64_t evaluation_micro_batches = 0;  // over all ranks; beyond them there are no targets
    Device* device = nullptr;              // whose compute stream updates what lies there
    WorkerRows* workers = nullptr;         // of a trace
};

class StepKernels final : public swap::Kernels {
public:
    StepKernels(const planner::Plan& plan, NodeTeams& teams, const StepModel& model);
    void run(const swap::Call& call) noexcept override;
    std::string describe(const swap::Call& call) const override;

    StepStates& states() { return states_; }
    // Real targets of the held-back text loaded since.
    int64_t& evaluation_targets() { return evaluation_targets_; }
    // Where evaluation puts the logits of its first tokens, as many as there is room for, in fp32.
    void keep_logits(std::span<float> room) { logits_ = room; }

private:
    void dispatch(const swap::Call& call);
    void compute(const swap::Call& call);
    void forward(const swap::Call& call);
    void head(const swap::Call& call);
    void cut(const swap::Call& call);
    void keep(int64_t token, ops::ConstView logits);
    void load(const swap::Call& call);
    void update(const swap::Call& call);
    void apply(const swap::Call& call, const optim::Span& span, const optim::Scalars& scalars);
    void recast(const swap::Call& call);
    bool intact(const swap::Call& call, swap::ObjectId object, const std::byte* bytes) const;
    void seal(const swap::Call& call, swap::ObjectId object, const std::byte* bytes) const;

    const planner::Plan& plan_;
    NodeTeams& teams_;
    const StepModel model_;
    StepStates states_;
    int64_t evaluation_targets_ = 0;
    std::span<float> logits_{};
};

}  // namespace ferry::train
