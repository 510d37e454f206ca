// A run's state gets its first contents, and with them goes on where that state was left.
#pragma once

#include "ferry/train.h"
#include "outcome.h"
#include "run_setup.h"
#include "train/loss_scale.h"
#include "train/resuming/first_state.h"
#include "train/saving/durable.h"
#include "train/stack/tier_stack.h"
#include "train/state/momentum_io.h"
#include "train/state/state_io.h"
#include "zero/zero.h"

namespace ferry::train {

// Where the state lies, which is open. Borrowed.
struct OpenState {
    const RunSetup& setup;
    const zero::Partition& partition;  // this rank's
    TierStack& stack;                  // whose stage is fill
    const OutcomeJudge& judge;
    StateIo& state;
    MomentumIo* momentum = nullptr;  // null: none is exchanged
};

// As initialised, or as `first` has it. All ranks at once. Throws io.
RunState fill_state(const OpenState& open, FirstState& first, const Imported& imported);
// As the resumed run left it in its own files; weights that it froze come from `first`. All ranks
// at once. Throws usage and io.
RunState resume_state(const OpenState& open, const FirstState& first, const RunRecord& record);

// Where a run goes on from what was imported. The scale is one that begins.
RunState run_of(const Imported& imported, bool has_moments, const LossScale& scale);

}  // namespace ferry::train
