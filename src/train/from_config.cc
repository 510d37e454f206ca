#include "train/from_config.h"

#include "ferry/error.h"
#include "ferry/train.h"

namespace ferry::train {

namespace {

optim::Method method_of(OptimizerMethod method) {
    switch (method) {
        case OptimizerMethod::adamw:
            return optim::Method::adamw;
        case OptimizerMethod::adam:
            return optim::Method::adam;
        case OptimizerMethod::sgd:
            return optim::Method::sgd;
        case OptimizerMethod::lion:
            return optim::Method::lion;
        case OptimizerMethod::adagrad:
            return optim::Method::adagrad;
    }
    bug("unknown optimizer method");
}

optim::Decay decay_of(ScheduleKind kind) {
    switch (kind) {
        case ScheduleKind::constant:
            return optim::Decay::constant;
        case ScheduleKind::linear:
            return optim::Decay::linear;
        case ScheduleKind::cosine:
            return optim::Decay::cosine;
        case ScheduleKind::wsd:
            return optim::Decay::wsd;
        case ScheduleKind::one_cycle:
            return optim::Decay::one_cycle;
        case ScheduleKind::warmup_decay:
            return optim::Decay::warmup_decay;
    }
    bug("unknown kind of schedule");
}

}  // namespace

planner::PlanRequest request_of(const Config& config) {
    return {.device = config.device,
            .micro_batches = config.batch.micro_batches,
            .clips = config.clip_norm > 0,
            .durable = config.checkpoint.durable_steps,
            .state = format_of(config),
            .budgets = config.budgets,
            .swap = config.swap};
}

optim::Hyper hyper_of(const Config& config) {
    const OptimizerConfig& optimizer = config.optimizer;
    return {.method = method_of(optimizer.method),
            .lr = optimizer.lr,
            .beta1 = optimizer.beta1,
            .beta2 = optimizer.beta2,
            .eps = optimizer.eps,
            .weight_decay = optimizer.weight_decay,
            .momentum = optimizer.momentum,
            .nesterov = optimizer.nesterov,
            .initial_accumulator = optimizer.initial_accumulator,
            .seed = config.seed};
}

StateFormat format_of(const Config& config) {
    return {.moments = optim::moments_of(hyper_of(config)),
            .moment_type = config.optimizer.moments,
            .split = config.optimizer.master == MasterFormat::split};
}

optim::LrSchedule schedule_of(const Config& config) {
    const ScheduleConfig& s = config.schedule;
    const optim::LrSchedule schedule{
        .kind = decay_of(s.kind),
        .peak = config.optimizer.lr,
        .final_fraction = s.final_fraction,
        .warmup_steps = s.warmup_steps,
        .total_steps = s.total_steps > 0 ? s.total_steps : config.steps,
        .decay_steps = s.decay_steps,
        .log_warmup = s.log_warmup};
    optim::check(schedule);
    return schedule;
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

aio::Leftover leftover_of(Leftovers leftovers) {
    switch (leftovers) {
        case Leftovers::remove:
            return aio::Leftover::remove;
        case Leftovers::reuse:
            return aio::Leftover::reuse;
        case Leftovers::refuse:
            return aio::Leftover::refuse;
        case Leftovers::remove_any:
            return aio::Leftover::remove_any;
        case Leftovers::reuse_any:
            return aio::Leftover::reuse_any;
    }
    bug("unknown kind of leftovers");
}

}  // namespace ferry::train
