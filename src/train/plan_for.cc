#include "ferry/ops.h"
#include "ferry/topology.h"
#include "ferry/train.h"
#include "setup.h"

namespace ferry::train {

planner::Plan plan_for(const Config& config) {
    Team team(1);
    const auto ops = ops::make_cpu_ops(team);
    const model::Shape shape = shape_of(config);
    const model::Numerics numerics = numerics_of(config);
    const model::Decoder decoder(
        shape, numerics,
        model::layers_of(shape, config.freeze, config.optimizer.decay_norms_and_biases), *ops);
    return planner::make_plan(
        config, decoder.layers(), numerics,
        {.activation = decoder.activation_bytes(), .scratch = decoder.scratch_bytes()});
}

}  // namespace ferry::train
