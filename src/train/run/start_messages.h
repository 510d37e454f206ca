// What a start-up says of the run. Where it says nothing else, the first rank's alone.
#pragma once

#include "model/model.h"
#include "planner/planner.h"
#include "run_plans.h"
#include "run_setup.h"
#include "topology/topology.h"

namespace ferry::train {

// Before there is a plan: what the ranks share. `numerics`: the decoder's.
void tell_of_ranks(const RunSetup& setup, const model::Numerics& numerics);
// Of the plan: a pipeline's stages, and weights that are gathered again.
void tell_of_plan(const RunSetup& setup, const Cut& cut, const planner::Plan& plan);
// What of the configuration does little, which tensors an optimizer has, and on every rank the
// machine that it goes by.
void tell_of_settings(const RunSetup& setup, const Topology& machine);
// Where the last step leaves each rank weights of its own.
void warn_of_last_step(const RunSetup& setup);

}  // namespace ferry::train
