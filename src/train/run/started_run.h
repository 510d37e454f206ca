// A run up to its first step: what it stands on, and the state from which it goes on.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "compute_context.h"
#include "cost/measurements.h"
#include "ferry/config.h"
#include "ferry/device.h"
#include "ferry/executor.h"
#include "ferry/optim.h"
#include "ferry/train.h"
#include "outcome.h"
#include "rank_lane.h"
#include "rank_planner.h"
#include "train/kernels/kernel_exchange.h"
#include "train/kernels/trace_rows.h"
#include "train/loss_scale.h"
#include "train/prediction/measure.h"
#include "train/prediction/schedule_choice.h"
#include "train/resuming/imported_state.h"
#include "train/resuming/loaded_weights.h"
#include "train/resuming/saved_run.h"
#include "train/saving/durable.h"
#include "train/setup/loader_of.h"
#include "train/setup/model_of.h"
#include "train/setup/rank_share.h"
#include "train/setup/stages.h"
#include "train/stack/path_rows.h"
#include "train/stack/tier_stack.h"
#include "train/state/momentum_io.h"
#include "train/state/state_io.h"
#include "train/step/momentum_schedule.h"
#include "train/step/schedules.h"
#include "zero/zero.h"

namespace ferry::train {

// Its constructor is the start-up: the tier stack goes through its stages, schedules are recorded,
// and the state has its first contents. Throws what Engine::make does. Who derives from it takes
// the steps, from `found_` on.
class StartedRun {
public:
    StartedRun(const StartedRun&) = delete;
    StartedRun& operator=(const StartedRun&) = delete;

protected:
    StartedRun(const Config& config, const Runtime& runtime,
               std::shared_ptr<ComputeContext> context);
    ~StartedRun() = default;

    // The numbers' record and its hash, as a manifest has them.
    std::string numerics_record() const;
    uint64_t numerics_id() const;

    LossScale first_loss_scale() const { return LossScale(numerics_.compute == DType::f16); }

    // Whether ranks have exchanged momentum after so many updates.
    bool has_errors(int64_t moment_updates) const;

    // Those that measure with this rank: where processors compute, all ranks at once, since they
    // share them. Beside a GPU each measures alone.
    std::unique_ptr<Together> together() const;

    KernelExchanges kernel_exchanges() const { return {of_sequences_.get(), of_tensors_.get()}; }

    swap::Store& store() const { return stack_.store(); }
    aio::Volume* volume() const { return stack_.volume(); }

    struct Rows {  // of a trace, in this order
        Rows(trace::Recording* recording, const Executor& executor, const Config& config,
             const RankShare& share, int ranks, const NodeTeams& teams)
            : lanes(recording, swap::lanes_of(ranks)),
              workers(recording, teams),
              paths(recording, share.budgets.nvme, config.io.rings),
              checkpoint(config.checkpoint.dir.empty() ? nullptr : recording, executor) {}
        TraceRows lanes;
        WorkerRows workers;
        PathRows paths;
        CheckpointRows checkpoint;
    };

    // Of a pipeline: the plan of a rank of each of these stages, as they make them themselves. They
    // are those of the run, or, before there is a plan, of a schedule that it may have.
    std::vector<planner::Plan> plans_of_stages(std::span<const zero::Stage> stages) const;

    const std::shared_ptr<ComputeContext> context_;
    comm::Communicator* const ranks_;  // null: there is only this one
    const World world_;
    comm::Communicator* const sharers_;  // of state, weights and gradients; null: there are none
    // Null: this rank has whole sequences, or whole tensors.
    const std::unique_ptr<KernelExchange> of_sequences_, of_tensors_;
    Config config_;  // with what ferry has chosen of the numerics, from make_plan() on
    const MomentumSchedule momentum_schedule_{config_.optimizer};
    const RankShare share_;
    Executor& executor_;
    Device& device_;
    trace::Recording* recording_;
    const Progress progress_;
    const cost::Measurements* measurements_;
    const optim::Hyper hyper_;
    const optim::LrSchedule schedule_;
    const model::Description described_;
    const model::Shape& shape_ = described_.shape;
    const model::Numerics numerics_;
    const std::unique_ptr<Batches> loader_;
    const std::vector<model::Layer> layers_;  // of the whole model
    std::vector<zero::Stage> stages_;         // of which this rank has one; from make_plan() on
    zero::Partition partition_;               // the same
    const std::string checkpoint_identity_;
    // The model's config.json, where checkpoints are written: the model's directory may be gone
    // by then.
    const std::string description_;
    std::unique_ptr<SavedRun> saved_;          // until the state is initialised
    std::unique_ptr<LoadedWeights> loaded_;    // as long
    std::unique_ptr<ImportedState> imported_;  // as long
    int64_t step_ = 0;                         // the last that was begun
    // The stack needs these until it is closed: after an error its store still finishes tasks.
    std::unique_ptr<RankDirectories> directories_{};
    std::optional<Rows> rows_{};
    std::optional<OutcomeJudge> judge_{};
    std::unique_ptr<RankLane> lane_{};  // of several ranks
    Schedules schedules_{};
    TierStack stack_;
    const planner::Plan& plan_ = stack_.plan();
    std::optional<RankPlanner> planner_{};
    std::vector<int> sharers_of_hosts_{};  // of a pipeline: by rank, how many share its host
    std::optional<StateIo> state_{};
    std::optional<MomentumIo> momentum_{};  // where momentum is exchanged, sooner or later
    // Made once: the table of products that it names may change while the run goes on.
    const std::string machine_text_;
    RunRecord record_;
    std::optional<UpdateRates> rates_before_fill_{};            // where the bound is asked for
    std::span<std::byte> checkpoint_room_{};                    // for what waits to be written
    RunState found_{.loss_scale = first_loss_scale().state()};  // where the run goes on

private:
    TierStack::Ground ground(const Runtime& runtime);
    std::unique_ptr<LoadedWeights> first_weights_of(const Config& config,
                                                    const Runtime& runtime) const;
    void make_plan(const Runtime& runtime);
    void take_stages(const StageOrder& order);
    std::optional<Error> refusal_of(const planner::PlanRequest& request) const;
    void choose_schedule(const planner::PlanRequest& request);
    void require_same_start() const;
    void require_matching_exchanges() const;
    void refuse_of_pipeline(const Runtime& runtime) const;
    void prove_first_state();
    void reserve_checkpoint_room();
    void time_before_fill(const Runtime& runtime);
    int64_t memory_for_reading() const;
    void open(const Runtime& runtime);
    void first_contents(const Runtime& runtime);
    StateIo::Contents new_contents(const StateIo::Fill& fill, const StateIo::FirstMoment& moment);
    void resume_run(const StateIo::Fill& fill);
    void resume_saved(const StateIo::Contents& contents, const StateIo::Watch& watch);
    void import_state(const Imported& imported, const StateIo::FirstMoment& moment,
                      const StateIo::Watch& watch);
};

}  // namespace ferry::train
