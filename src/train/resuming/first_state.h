// What a run's state is before its first step.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "comm/comm.h"
#include "data/tokens.h"
#include "ferry/config.h"
#include "ferry/executor.h"
#include "ferry/team.h"
#include "ferry/train.h"
#include "imported_state.h"
#include "loaded_weights.h"
#include "model/huggingface.h"
#include "model/model.h"
#include "planner/planner.h"
#include "saved_run.h"
#include "train/setup/rank_share.h"
#include "train/stack/start_up.h"
#include "train/state/momentum_io.h"
#include "train/state/state_io.h"
#include "train/step/momentum_schedule.h"

namespace ferry::train {

// That of a checkpoint, or what another program left; else a new one, of weights from the model's
// files or random ones. A run that goes on from its own files has the weights alone from here.
class FirstState {
public:
    struct Of {
        const Config& config;
        const model::Description& described;
        const std::vector<model::Layer>& layers;  // the whole model's
        const TokenFileInfo& tokens;
        const std::string& identity;  // checkpoint_identity_of() the run
        int ranks = 1;
    };
    // Opens what the runtime names, or the model's files. What `of` names outlives this. Throws
    // usage and io.
    FirstState(const Of& of, const Runtime& runtime);

    // Null: no checkpoint, or nothing imported.
    const SavedRun* saved() const { return saved_.get(); }
    const ImportedState* imported() const { return imported_.get(); }

    std::string text() const;  // equal for equal states

    struct Proving {
        const planner::Plan& plan;
        const MomentumSchedule& momentum;
        const World& world;
        comm::Communicator* ranks;  // null: there is only this one
        Executor& executor;
        Team& team;
        StartUp& start_up;
        const std::string& numerics;  // the run's numerics record
    };
    // Requires that the plan's state can be had from here, and proves bytes as far as that can be
    // before memory is taken; the rest as it is read. The ranks read a part each. Throws usage and
    // io.
    void prove(const Proving& by) const;

    // What to fill the state with, and weights alone. The team, the plan and this outlive it.
    // `memory`: for what is read ahead.
    StateIo::Contents contents(const planner::Plan& plan, const StateIo::FirstMoment& first_moment,
                               Team& team, int64_t memory);
    StateIo::Fill weights() const;
    // With a checkpoint: what it has beside the state.
    MomentumIo::Fill momentum() const;

    void log_rate(double seconds) const;  // of weights from files: at which all were filled

private:
    const model::Shape& shape_;
    const uint64_t seed_;
    std::unique_ptr<SavedRun> saved_;
    std::unique_ptr<LoadedWeights> loaded_;
    std::unique_ptr<ImportedState> imported_;
};

}  // namespace ferry::train
