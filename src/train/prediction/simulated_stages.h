// The steps of all stages of a pipeline, simulated together.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "cost/measurements.h"
#include "model/model.h"
#include "planner/planner.h"
#include "swap/schedule.h"
#include "zero/zero.h"

namespace ferry::train {

// A rank's plan for each stage, all in the chunks of the tightest, as ranks agree on them.
// `plan_of`: of a stage, in such chunks or, with none, in those that it chooses itself.
template <class PlanOf>
std::vector<planner::Plan> plans_of_stages(std::span<const zero::Stage> stages,
                                           const PlanOf& plan_of) {
    std::vector<planner::Plan> found;
    for (const zero::Stage& stage : stages) found.push_back(plan_of(stage, std::nullopt));
    const std::optional<int64_t> chunk =
        std::ranges::min_element(found, {}, &planner::Plan::chunk_elements)->chunk_elements;
    for (size_t s = 0; s < found.size(); ++s)
        if (found[s].chunk_elements != chunk) found[s] = plan_of(stages[s], chunk);
    return found;
}

// How many pass through a pipeline: groups, or in round robin the micro-batches of the one group.
int64_t passing(const planner::Plan& plan);
// The same plans for a step in which so many pass, placed as for all of them.
std::vector<planner::Plan> shortened(std::vector<planner::Plan> plans, int64_t count);
// A step with a kernel of every kind has as many groups, or all.
inline constexpr int64_t kGroupsOfAllKinds = 4;

// What a stage does in a step, beside the others.
struct StageStep {
    double seconds = 0, weight_bytes = 0;
    std::array<double, swap::kLanes> lanes{};  // that each is busy
    double compute_seconds() const { return lanes[static_cast<size_t>(swap::Lane::compute)]; }
};

// A step of a large pipeline is long. So two shorter steps are simulated in its place, in which
// `from` and `to` pass. Each further group takes what a group between the two takes.
struct ShortSteps {
    int64_t from = 0, to = 0, all = 0;
    bool in_turn = false;  // micro-batches of one group, in round robin
    // Whether a further group takes about as long as the busiest lane works for it. The line then
    // holds for the long step. Else a drive or a network may hide what grows.
    bool steady = true;
    // On a line through both, of a step in which so many pass, or all.
    double at(int64_t count, double of_from, double of_to) const;
    double at_all(double of_from, double of_to) const;
    // The seconds of the step: on that line, and no shorter than any lane's work.
    double seconds_at_all(std::span<const StageStep> of_from,
                          std::span<const StageStep> of_to) const;
    // Whether replicas' exchanges, drives and updates, which come once a step, are long enough to
    // hide from the line what the stages wait for each other.
    bool may_hide_waits(std::span<const StageStep> of_from, std::span<const StageStep> of_to) const;
    bool are_steady(std::span<const StageStep> of_from, std::span<const StageStep> of_to) const;
};
// Both fill all stages. The longer one has about as many visits of blocks by micro-batches, all
// stages together, where that is more; and up to the second number until they are steady.
inline constexpr int64_t kMostVisits = 512, kMostUnsteadyVisits = 4096;
// The most by which such a step differs from one that is simulated whole, in the tests.
inline constexpr double kShortStepsErr = 0.13;
// None: all are simulated. `most_visits`: as above.
std::optional<ShortSteps> short_steps_of(std::span<const planner::Plan> plans,
                                         int64_t most_visits = kMostVisits);
// The first that `are_steady`, which simulates them, or the longest that may be.
std::optional<ShortSteps> steady_steps_of(std::span<const planner::Plan> plans, int64_t most_visits,
                                          const std::function<bool(const ShortSteps&)>& are_steady);

// A step among steps of its kind, by stage. `first` is the step before them. With `speculative`
// they are speculative steps, and every plan must be speculative.
struct RecordedStages {
    std::vector<swap::Schedule> first{}, steady{};
};
bool speculate(std::span<const planner::Plan> plans);  // all of them
RecordedStages record_stages(std::span<const planner::Plan> plans, bool speculative);
// Whether these times have a kernel of every kind that the steps need.
bool covers(std::span<const planner::Plan> plans, const RecordedStages& steps,
            const cost::KernelTimes& times);
// Adds what `measured`, which is one rank's, does not cover: by arithmetic.
void add_assumed_kernels(std::span<const planner::Plan> plans, const RecordedStages& steps,
                         const model::Decoder& decoder, cost::Measurements& measured);
// The same for one schedule.
void add_assumed_kernels(const swap::Schedule& step, const planner::Plan& plan,
                         const model::Decoder& decoder, cost::Measurements& measured);
// Of all stages together; of a long step by short ones. Kernels that `measured` has not are
// reckoned by arithmetic.
std::vector<StageStep> simulate_stages(std::span<const planner::Plan> plans, bool speculative,
                                       const model::Decoder& decoder,
                                       const cost::Measurements& measured,
                                       int64_t most_visits = kMostVisits);
// The seconds of a long step by these two of it. Where they may hide what stages wait for each
// other, two more are simulated in which replicas' exchanges, drives and updates take no time.
double seconds_of_long_step(const ShortSteps& steps, std::span<const StageStep> of_from,
                            std::span<const StageStep> of_to, std::span<const planner::Plan> plans,
                            bool speculative, const model::Decoder& decoder,
                            const cost::Measurements& measured);
// Bytes of weights that come to the device in a step, from its host's memory or from other ranks.
int64_t weight_bytes(const planner::Plan& plan, const swap::Schedule& step);

}  // namespace ferry::train
