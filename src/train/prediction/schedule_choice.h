// Chooses the order in which the stages of a pipeline take micro-batches, where that is left to
// ferry. Each order that the configuration admits is planned, and all its stages are simulated
// together.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cost/measurements.h"
#include "ferry/config.h"
#include "ferry/error.h"
#include "model/model.h"
#include "planner/planner.h"
#include "zero/zero.h"

namespace ferry::train {

// A schedule with so many virtual stages.
struct StageOrder {
    PipelineSchedule schedule{};
    int virtual_stages = 1;
    bool operator==(const StageOrder&) const = default;
};

// Whether there is a choice: several stages, and parallel.schedule or virtual_stages is auto.
bool chooses_schedule(const Config& config);
// Numbers of virtual stages that are weighed at the most where auto chooses them: each is planned
// and simulated, and stages keep block inputs of more groups.
inline constexpr int kMostVirtualStages = 8;
// The schedules to choose from, for a model with so many blocks. They are those that take
// parallel.virtual_stages. Where that is auto, they have powers of two up to kMostVirtualStages
// that divide the blocks of a stage, and for round robin also one block a run. Of several that take
// equally long the earlier one is chosen. The list is never empty.
std::vector<StageOrder> orders_to_choose(const Config& config, int64_t blocks);
Config with_order(Config config, const StageOrder& order);
std::string_view name_of(PipelineSchedule schedule);  // as the configuration names it
std::string name_of(const StageOrder& order);         // "1f1b", "interleaved 4"

// A schedule, with the plan of a rank of each stage; or why it cannot be.
struct PlannedSchedule {
    StageOrder order{};
    std::vector<planner::Plan> plans{};
    std::optional<Error> refusal{};
};
// `plans_of()`: they may throw does_not_fit, or usage of a schedule that the configuration does not
// admit.
template <class PlansOf>
PlannedSchedule plan_schedule(const StageOrder& order, const PlansOf& plans_of) {
    PlannedSchedule found{.order = order};
    try {
        found.plans = plans_of();
    } catch (const Error& error) {
        if (error.trouble() != Trouble::does_not_fit && error.trouble() != Trouble::usage) throw;
        found.refusal = error;
    }
    return found;
}
// The same refusal with the number of the stage.
Problem of_stage(Problem problem, const zero::Stage& stage);

struct ScheduleOffer {
    StageOrder order{};
    std::optional<Error> refusal{};  // where it cannot be; nothing below is known then
    double seconds = 0;              // of a step
    double waits = 0;                // the part of it that the stage waits which waits most
    // Bytes of weights that come to a rank's device in a step, of the stage where that is most.
    // Then the bytes that a rank takes, of the stage that takes most.
    int64_t weight_bytes = 0;
    int64_t device_bytes = 0, host_bytes = 0, nvme_bytes = 0;
};

// The first schedule that takes at most 1 % longer than the fastest, as the simulation errs by
// more. None: all are refused.
std::optional<size_t> fastest_of(std::span<const ScheduleOffer> offers);

struct ScheduleChoice {
    std::vector<ScheduleOffer> offers{};  // none: there is no choice
    size_t chosen = 0;                    // where all are refused: the first
    bool is_long = false;                 // some step: by shorter ones (ShortSteps)
    PipelineSchedule schedule() const { return order().schedule; }
    const StageOrder& order() const { return offers[chosen].order; }
};

// By the measurements of one rank. Where they have not the kernels of all of these schedules, all
// kernels are reckoned by arithmetic. `after_each`: of all, refused ones too.
ScheduleChoice choose_schedule(std::vector<PlannedSchedule> planned, const model::Decoder& decoder,
                               const cost::Measurements& measured,
                               const std::function<void()>& after_each = {});

// "zero_bubble, the fastest as simulated: 1f1b 0.512 s a step, zero_bubble 0.47 s"
std::string text_of(const ScheduleChoice& choice);
// What is refused, and by how much. It leaves out the remedy, which is a key that the other
// schedules do not need.
std::string why_not(const Error& refusal);

}  // namespace ferry::train
