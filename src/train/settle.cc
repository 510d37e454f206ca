#include "settle.h"

#include <cmath>

#include "ferry/train.h"

namespace ferry::train {

optim::Hyper hyper_of(const Config& config) {
    const OptimizerConfig& optimizer = config.optimizer;
    return {.method = optim::method_from(optimizer.method),
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
            .moment_type = dtype_from_name(config.optimizer.moments).value_or(DType::f32),
            .split = config.optimizer.master == "split"};
}

optim::LrSchedule schedule_of(const Config& config) {
    const ScheduleConfig& s = config.schedule;
    const optim::LrSchedule schedule{
        .kind = optim::decay_from(s.kind),
        .peak = config.optimizer.lr,
        .final_fraction = s.final_fraction,
        .warmup_steps = s.warmup_steps,
        .total_steps = s.total_steps > 0 ? s.total_steps : config.steps,
        .decay_steps = s.decay_steps,
        .log_warmup = s.log_warmup};
    optim::check(schedule);
    return schedule;
}

Settler::Settler(const Config& config, const optim::Hyper& hyper, const optim::LrSchedule& schedule,
                 const planner::Plan& plan, const float* leaves)
    : plan_(plan),
      leaves_(leaves),
      clip_norm_(config.clip_norm),
      always_bet_(config.swap.bets == "all"),
      hyper_(hyper),
      schedule_(schedule) {}

Verdict Settler::settle(double loss, double loss_scale) {
    Verdict verdict;
    verdict.norm =
        std::sqrt(optim::sum_leaves({leaves_, static_cast<size_t>(plan_.leaves)})) / loss_scale;
    verdict.finite = std::isfinite(verdict.norm) && std::isfinite(loss);
    if (!verdict.finite) {
        verdict.layer = static_cast<int64_t>(plan_.layers.size()) - 1;
        for (const planner::Chunk& chunk : plan_.chunks) {
            if (!std::isfinite(loss) || !chunk.trainable) continue;
            for (int64_t leaf = chunk.first_leaf;
                 leaf < chunk.first_leaf + chunk.count / optim::kLeaf; ++leaf) {
                if (!std::isfinite(leaves_[leaf])) verdict.layer = chunk.layer;
            }
        }
        unclipped_in_a_row_ = 0;
        return verdict;
    }
    verdict.clip_factor = optim::clip_factor(verdict.norm, clip_norm_);
    unclipped_in_a_row_ = verdict.clip_factor == 1 ? unclipped_in_a_row_ + 1 : 0;
    return verdict;
}

double Settler::learning_rate(int64_t update) const {
    return optim::learning_rate(schedule_, update);
}

std::array<optim::Scalars, 2> Settler::scalars(int64_t update, double gradient_scale) const {
    optim::Hyper hyper = hyper_;
    hyper.lr = learning_rate(update);
    const optim::Scalars decayed = optim::scalars_of(hyper, update, gradient_scale);
    hyper.weight_decay = 0;
    return {optim::scalars_of(hyper, update, gradient_scale), decayed};
}

}  // namespace ferry::train
