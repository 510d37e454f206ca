#include "ferry/device.h"
#include "ferry/ops.h"
#include "ferry/topology.h"
#include "ferry/train.h"
#include "settle.h"
#include "setup.h"

namespace ferry::train {

planner::Plan plan_for(const Config& config) {
    schedule_of(config);  // refuses one that makes no sense
    Team team(1);
    const auto executor = make_thread_executor();
    const auto device = Device::open(device_from(config.device), *executor);
    const auto ops = ops_on(*device, config, team);
    const model::Shape shape = model_of(config).shape;
    const model::Numerics numerics = numerics_of(config);
    const model::Decoder decoder(
        shape, numerics,
        model::layers_of(shape, config.freeze, config.optimizer.decay_norms_and_biases), *ops);
    return planner::make_plan(within(config, *device), decoder.layers(), numerics,
                              needs_of(*device, decoder),
                              optim::moments_of(hyper_of(config.optimizer)));
}

int64_t evaluation_sequences(const Config& config) {
    TokenLoader::Options options = loader_options(config, {});  // any vocabulary
    options.trains = false;
    return TokenLoader(options).evaluation_sequences();
}

}  // namespace ferry::train
