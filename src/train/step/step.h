// The step as schedules: every variant of it, recorded once at start-up.
#pragma once

#include <array>
#include <string>

#include "planner/planner.h"
#include "swap/schedule.h"
#include "zero/zero.h"

namespace ferry::train {

// The state of the last step's updates when the next one starts.
enum class Previous : uint8_t {
    none,             // nothing to do: the first step, or a dropped one that had not speculated
    not_speculative,  // it made no speculative updates: every chunk is still to be updated
    committed,        // speculative updates stand; the other chunks are still to be updated
    rolled_back,  // speculative updates do not stand: every chunk is updated from its old version
    dropped,      // the step is skipped: speculative chunks go back to their old version
    alone,        // where momentum is exchanged: it was a local step, which never speculates
};
constexpr int kPrevious = 6;

// A drain stands between a step that exchanges gradients and one that exchanges none.
using zero::Exchanged;

std::string name_of_step(Previous previous, bool speculative,
                         Exchanged what = Exchanged::gradients);
swap::Schedule record_step(const planner::Plan& plan, Previous previous, bool speculative,
                           Exchanged what = Exchanged::gradients);
// Finishes the step before, and nothing else.
swap::Schedule record_drain(const planner::Plan& plan, Previous previous,
                            Exchanged what = Exchanged::gradients);
// Bytes that these schedules move on each lane. They are not recorded for it: those of a large
// model have millions of tasks.
using LaneBytes = std::array<int64_t, swap::kLanes>;
LaneBytes step_bytes(const planner::Plan& plan, Previous previous, bool speculative,
                     Exchanged what = Exchanged::gradients);
LaneBytes drain_bytes(const planner::Plan& plan, Previous previous,
                      Exchanged what = Exchanged::gradients);
// Forward only, over `micro_batches` (at most a group's) of held-back text.
swap::Schedule record_evaluation(const planner::Plan& plan, int64_t micro_batches);

}  // namespace ferry::train
