#include "train/setup/from_config.h"

#include "ferry/train.h"

namespace ferry::train {

planner::PlanRequest request_of(const Config& config) {
    return {
        .device = config.device,
        .micro_batches = config.batch.micro_batches,
        .clips = config.clip_norm > 0,
        .durable = config.checkpoint.durable_steps,
        .state = format_of(config),
        .ns_steps = config.optimizer.method == optim::Method::muon ? config.optimizer.ns_steps : 0,
        .ns_products = config.optimizer.ns_products,
        .budgets = config.budgets,
        .swap = config.swap};
}

optim::Hyper hyper_of(const Config& config) {
    const OptimizerConfig& optimizer = config.optimizer;
    const bool sends = optim::sends_momentum(optimizer.method);
    return {.method = sends ? optim::Method::adamw : optimizer.method,
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

optim::Hyper elements_hyper_of(const Config& config) {
    optim::Hyper hyper = hyper_of(config);
    if (hyper.method != optim::Method::muon) return hyper;
    hyper.method = optim::Method::adamw;
    hyper.lr = config.optimizer.adamw_lr.value_or(hyper.lr);
    return hyper;
}

StateFormat format_of(const Config& config) {
    return {.moments = optim::moments_of(hyper_of(config)),
            .moment_type = config.optimizer.moments,
            .split = config.optimizer.master == MasterFormat::split};
}

zero::Codecs codecs_of(const Config& config) {
    const CompressConfig& compress = config.zero.compress;
    const OptimizerConfig& o = config.optimizer;
    const bool sends = optim::sends_momentum(o.method);
    return {.gradients = {compress.gradients, compress.block},
            .weights = {compress.weights, compress.block},
            .momentum = {sends ? CodecKind::sign : CodecKind::none, compress.block},
            .local_steps = o.method == optim::Method::zeroone_adam && o.local_step_clipper > 1};
}

zero::Hosts hosts_of(const Config& config) {
    return {.each = config.zero.ranks_per_host,
            .second_shards = config.zero.second_shard == SecondShard::host};
}

optim::LrSchedule schedule_of(const Config& config) {
    const ScheduleConfig& s = config.schedule;
    const optim::LrSchedule schedule{
        .kind = s.kind,
        .peak = config.optimizer.lr,
        .final_fraction = s.final_fraction,
        .warmup_steps = s.warmup_steps,
        .total_steps = s.total_steps > 0 ? s.total_steps : config.steps,
        .decay_steps = s.decay_steps,
        .log_warmup = s.log_warmup};
    optim::check(schedule);
    return schedule;
}

}  // namespace ferry::train
