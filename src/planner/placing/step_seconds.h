// The least seconds of a placement's step: the sums by which placements are compared.
#pragma once

#include <optional>

#include "cost/estimate.h"
#include "placement.h"

namespace ferry::planner {

// Seconds of the kernels that compute this activation, for one micro-batch.
double seconds_of(const SavedActivation& activation, const Workload& work,
                  const cost::Measurements& machine);

// Seconds of a step's kernels, with some layers' activations saved from forward to backward.
cost::KernelSeconds kernel_seconds(const PlanRequest& request, const Workload& work,
                                   const model::OfSaved<std::vector<bool>>& saved,
                                   const cost::Measurements& machine);

// Seconds of the host's update of a chunk; or of a whole chunk in the format that the run asks for.
double update_seconds(const Workload& work, const Chunk& chunk, const cost::Measurements& machine);
double update_seconds(const Workload& work, const cost::Measurements& machine);

// The share of steps that is expected to be clipped: none of them without a limit. Empty: nothing
// says so.
std::optional<double> expected_clipped(const PlanRequest& request);

struct StepSeconds : cost::OfPrevious {
    // The mean over a run: half of its steps are clipped, unless the configuration says more.
    double expected(const PlanRequest& request) const;
};
StepSeconds step_seconds(const PlanRequest& request, const Workload& work,
                         const std::vector<Chunk>& chunks,
                         const std::vector<AccumulatorSpill>& spills, const Placement& placement,
                         const cost::Measurements& machine);

}  // namespace ferry::planner
