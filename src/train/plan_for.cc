#include "ferry/train.h"
#include "setup.h"
#include "train/forecast.h"

namespace ferry::train {

planner::Plan plan_for(const Config& config) { return Forecaster::make(config)->plan(config); }

int64_t evaluation_sequences(const Config& config) {
    TokenLoader::Options options = loader_options(config, {});  // any vocabulary
    options.trains = false;
    return TokenLoader(options).evaluation_sequences();
}

}  // namespace ferry::train
