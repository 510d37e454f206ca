// The kernels that a schedule's tasks name, bound to the model, the optimizer and the loader.
#pragma once

#include <string>

#include "ferry/model.h"
#include "ferry/ops.h"
#include "ferry/planner.h"
#include "ferry/swap.h"
#include "ferry/tokens.h"
#include "ferry/topology.h"
#include "step_state.h"

namespace ferry::train {

class StepKernels final : public swap::Kernels {
public:
    StepKernels(const planner::Plan& plan, const model::Decoder& decoder, ops::Ops& ops,
                NodeTeams& teams, const TokenLoader& loader);
    void run(const swap::Call& call) noexcept override;
    std::string describe(const swap::Call& call) const override;

    StepStates& states() { return states_; }
    // Real targets of the held-back text loaded since.
    int64_t& evaluation_targets() { return evaluation_targets_; }

private:
    void compute(const swap::Call& call);
    void forward(const swap::Call& call);
    void head(const swap::Call& call);
    void load(const swap::Call& call);
    void update(const swap::Call& call);
    void recast(const swap::Call& call);
    bool intact(const swap::Call& call, swap::ObjectId object, const std::byte* bytes) const;
    void seal(const swap::Call& call, swap::ObjectId object, const std::byte* bytes) const;

    const planner::Plan& plan_;
    const model::Decoder& decoder_;
    ops::Ops& ops_;
    NodeTeams& teams_;
    const TokenLoader& loader_;
    StepStates states_;
    int64_t evaluation_targets_ = 0;
};

}  // namespace ferry::train
