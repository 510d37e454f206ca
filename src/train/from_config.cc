#include "train/from_config.h"

#include "ferry/error.h"
#include "outcome.h"

namespace ferry::train {

planner::PlanRequest request_of(const Config& config) {
    return {.device = config.device,
            .micro_batches = config.batch.micro_batches,
            .clips = config.clip_norm > 0,
            .durable = config.checkpoint.durable_steps,
            .state = format_of(config),
            .budgets = config.budgets,
            .swap = config.swap};
}

aio::BackendKind backend_of(IoBackend backend) {
    switch (backend) {
        case IoBackend::automatic:
            return aio::BackendKind::automatic;
        case IoBackend::uring:
            return aio::BackendKind::uring;
        case IoBackend::posix:
            return aio::BackendKind::posix;
    }
    bug("unknown backend");
}

}  // namespace ferry::train
