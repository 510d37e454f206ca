// The plans of a run: this rank's, and of a pipeline those of the other stages. Where the order of
// the stages is ferry's choice it is chosen here.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "ferry/config.h"
#include "ferry/error.h"
#include "planner/planner.h"
#include "rank_planner.h"
#include "run_setup.h"
#include "train/prediction/schedule_choice.h"
#include "zero/zero.h"

namespace ferry::train {

// How the layers are cut into stages, and what this rank has of them.
struct Cut {
    Config config{};  // with the number of virtual stages
    std::vector<zero::Stage> stages{};
    zero::Partition partition{};
};
// As the configuration has it; what it leaves open is as stages_of() says. Throws usage.
Cut cut_of(const RunSetup& setup);
// The same in another order.
Cut with_order(const Cut& cut, const RunSetup& setup, const StageOrder& order);

class RunPlans {
public:
    // All ranks at once. Chooses the order of the stages, where `cut` leaves it open. What is
    // borrowed outlives this. Throws does_not_fit, and usage, where none of them can be.
    RunPlans(const RunSetup& setup, const model::Decoder& decoder, Cut cut);

    const Cut& cut() const { return cut_; }
    // Once, all ranks at once. Throws does_not_fit.
    planner::Plan plan() { return planner_.plan(setup_.ranks, setup_.executor); }
    // Of a pipeline: the plan of a rank of each stage, as they make them themselves.
    std::vector<planner::Plan> of_stages() const;
    const RankPlanner& of_this_rank() const { return planner_; }

private:
    planner::PlanRequest request_of(const World& world) const;
    void take(const StageOrder& order);
    std::optional<Error> refusal() const;
    std::vector<PlannedSchedule> plan_own(std::span<const StageOrder> orders);
    size_t choose(std::vector<PlannedSchedule> planned, const model::Decoder& decoder);

    const RunSetup& setup_;
    Cut cut_;
    RankPlanner planner_;
    std::vector<int> sharers_of_hosts_{};  // of a pipeline: by rank, how many share its host
};

}  // namespace ferry::train
