// A run up to its first step: what it stands on, and the state from which it goes on.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>

#include "compute_context.h"
#include "ferry/config.h"
#include "ferry/train.h"
#include "first_contents.h"
#include "outcome.h"
#include "rank_lane.h"
#include "run_plans.h"
#include "run_setup.h"
#include "train/kernels/trace_rows.h"
#include "train/measuring/measure.h"
#include "train/resuming/first_state.h"
#include "train/saving/durable.h"
#include "train/setup/numerics_record.h"
#include "train/setup/rank_share.h"
#include "train/stack/path_rows.h"
#include "train/stack/tier_stack.h"
#include "train/state/momentum_io.h"
#include "train/state/state_io.h"
#include "train/step/schedules.h"

namespace ferry::train {

// What the stack calls in a step, and what a step replays. Made when there is a plan and memory.
struct Steps {
    // `stack` and `step`, the run's that errors name, outlive it.
    Steps(const RunSetup& setup, const Config& config, TierStack& stack, const int64_t& step);

    // Of a trace, in this order.
    TraceRows lane_rows;
    WorkerRows worker_rows;
    PathRows path_rows;
    CheckpointRows checkpoint_rows;

    OutcomeJudge judge;
    std::optional<RankLane> lane{};  // of several ranks
    Schedules schedules{};           // recorded when the stack is open
};

// Those that measure with this rank: where processors compute, all ranks at once, since they share
// them. Beside a GPU each measures alone.
std::unique_ptr<Together> together_of(const RunSetup& setup);

// Its constructor is the start-up: the tier stack goes through its stages, schedules are recorded,
// and the state has its first contents. Throws what Engine::make does. Who derives from it takes
// the steps, from `now_` on.
class StartedRun {
public:
    StartedRun(const StartedRun&) = delete;
    StartedRun& operator=(const StartedRun&) = delete;

protected:
    StartedRun(const Config& config, const Runtime& runtime,
               std::shared_ptr<ComputeContext> context);
    ~StartedRun() = default;

    // Whether ranks have exchanged momentum after so many updates.
    bool has_errors(int64_t moment_updates) const {
        return train::has_errors(plan(), setup_.momentum, moment_updates);
    }

    const planner::Plan& plan() const { return stack_->plan(); }
    swap::Store& store() const { return stack_->store(); }
    aio::Volume* volume() const { return stack_->volume(); }

    const RunSetup setup_;
    // Where the run is: its step is the last that was begun. Once steps are taken the loss scale
    // and the judge count for themselves.
    RunState now_{};
    // The stack needs both until it is closed: after an error its store still finishes tasks.
    std::unique_ptr<RankDirectories> directories_{};
    std::optional<Steps> steps_{};
    std::optional<TierStack> stack_{};
    std::optional<RunPlans> plans_{};
    NumericsRecord numerics_{};  // with what ferry has chosen
    std::optional<RunRecord> record_{};
    std::optional<StateIo> state_{};
    std::optional<MomentumIo> momentum_{};            // where it is exchanged, sooner or later
    std::optional<UpdateRates> rates_before_fill_{};  // where the bound is asked for
    std::span<std::byte> checkpoint_room_{};          // for what waits to be written

private:
    void make_plan(Cut cut, const FirstState& first, const Runtime& runtime,
                   const std::string& machine);
    void open(const Runtime& runtime);
    RunState first_contents(FirstState first, const Runtime& runtime);
};

}  // namespace ferry::train
