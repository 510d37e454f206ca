#include "measured_rank.h"

#include <span>
#include <utility>

#include "ferry/config.h"
#include "ferry/optim.h"
#include "measure.h"
#include "ops/patterns.h"
#include "planner/work.h"
#include "train/setup/from_config.h"
#include "train/stack/memory_left.h"
#include "train/step/step.h"

namespace ferry::train {

using planner::Plan;

MeasuredRank::MeasuredRank(ModelOnDevice& model, int rank, Plan buffers)
    : model_(model),
      share_{.budgets = model.config.budgets, .threads = model.share().threads},
      own_executor_(rank > 0 ? make_thread_executor() : nullptr),
      executor_(own_executor_ ? *own_executor_ : *model.executor),
      own_device_(rank > 0 ? Device::open(DeviceKind::cpu, executor_) : nullptr),
      stack_({.config = model.config,
              .share = share_,  // nothing is stored: the paths are the run's
              .executor = executor_,
              .device = own_device_ ? *own_device_ : *model.device,
              .machine = model.own_machine(rank),
              .ranks = model.world.ranks},
             TierStack::Model{model.decoder.shape(), model.decoder.numerics(),
                              model.decoder.layers()}) {
    buffers.host_bytes = buffers.io_bytes;
    stack_.plan(std::move(buffers));
    stack_.reserve({.host_budget_bytes = stack_.plan().host_bytes, .name = "staging"});
    stack_.open({.buffers_alone = true});
    stack_.kernels().states()[StepStates::kMeasured] = {.step = 1, .gradient_scale = 1};
}

cost::Measurements MeasuredRank::measure(int64_t working_bytes, Together& together) {
    const Plan& sample = stack_.plan();
    const optim::Scalars scalars = optim::scalars_of(elements_hyper_of(model_.config), 1, 1.0);
    const Bench bench = stack_.bench();
    cost::Measurements found = take_measurements(
        record_step(sample, Previous::not_speculative, false), bench, stack_.teams(), scalars,
        stack_.arena(), model_.decoder.shape().vocab,
        [&] {
            return time_updates(stack_.teams(), left_now(), scalars, sample, working_bytes,
                                staging_buffers(sample, stack_.arena()), together);
        },
        together);
    if (sample.has_feedback()) {
        found.kernels.seconds.merge(
            time_kernels(kernels_of_momentum(sample), bench, together).seconds);
        found.momentum_bytes_per_s = time_momentum(bench, left_now(), together);
        agree_on_slowest(together, found);
    }
    stack_.store().drain();  // throws what went wrong
    return found;
}

cost::KernelTimes MeasuredRank::measure_missing(const cost::KernelTimes& known,
                                                Together& together) {
    const Plan& sample = stack_.plan();
    const cost::WorkOf work_of = planner::work_of(sample);
    swap::Schedule untimed;
    for (const swap::Task& task : record_step(sample, Previous::not_speculative, false).tasks) {
        if (!cost::is_timed(task)) continue;
        const auto kind = cost::KernelTimes::kind_of(task, work_of);
        if (!known.seconds.contains(kind)) untimed.tasks.push_back(task);
    }
    if (untimed.tasks.empty()) return {};
    const Bench bench = stack_.bench();
    fill_buffers(bench, make_patterns(staging_buffers(sample, stack_.arena()),
                                      model_.decoder.shape().vocab));
    cost::Measurements found{.kernels = time_kernels(untimed, bench, together)};
    agree_on_slowest(together, found);
    stack_.store().drain();  // throws what went wrong
    return std::move(found.kernels);
}

// Of budgets.host a rank has its part.
Topology MeasuredRank::left_now() {
    BudgetConfig mine = model_.config.budgets;
    if (mine.host_bytes != kUnlimited) mine.host_bytes /= model_.here;
    return as_left_now(stack_.machine(), left_of_budget(mine, stack_.pool().reserved_bytes()));
}

}  // namespace ferry::train
