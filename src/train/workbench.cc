#include "workbench.h"

#include "setup.h"
#include "step.h"

namespace ferry::train {
namespace {

// The same buffers and nothing else: kernels are the same wherever their weights come from.
planner::Plan buffers_of(const Stage& stage, const planner::Plan& plan,
                         const Workbench::MakePlan& make) {
    Config config = stage.config;
    config.budgets = {.device_bytes = plan.device_overhead_bytes + device_buffer_bytes(plan)};
    config.swap = {.chunk_elements = plan.chunk_elements,
                   .groups = plan.groups,
                   .state_on_device = 0,
                   .keep_attention = plan.attention_kept()};
    planner::Plan sample = make(config);
    sample.host_bytes = sample.io_bytes;
    return within_memory(sample, stage.config, stage.machine, stage.device);
}

std::span<std::byte> reserve_staging(const Stage& stage, const planner::Plan& plan,
                                     pinned_mem::Pool& pool) {
    const std::span<std::byte> staging = pool.reserve("staging", plan.host_bytes, stage.teams);
    pool.lock_for(stage.device, stage.teams.all());
    pool.seal();
    return staging;
}

}  // namespace

Workbench::Workbench(const Stage& stage, const planner::Plan& plan, const MakePlan& make)
    : stage_(stage),
      plan_(buffers_of(stage, plan, make)),
      step_(record_step(plan_, Previous::rest, false)),
      arena_(stage.device, plan_.device_bytes),
      pool_(stage.machine, plan_.host_bytes),
      staging_(reserve_staging(stage, plan_, pool_)),
      kernels_(plan_, stage.teams, {&stage_.decoder, &stage_.ops, nullptr}),
      store_(swap::Store::make({.host_arena = staging_}, stage.executor, stage.device, nullptr,
                               kernels_)) {
    kernels_.states()[0] = {.step = 1, .gradient_scale = 1};
}

Bench Workbench::bench() {
    return {plan_, stage_.device, stage_.executor, kernels_, *store_, &stage_.ops, &stage_.decoder};
}

void Workbench::end() { store_->drain(); }

planner::DeviceNeeds measured_needs(const Stage& stage, const PlanWith& make) {
    planner::DeviceNeeds needs = needs_of(stage.device, stage.decoder);
    if (stage.device.kind() == DeviceKind::cpu) return needs;
    const auto plan = [&](const Config& config) { return make(config, needs); };
    {
        Workbench workbench(stage, plan(stage.config), plan);
        warm_up(workbench.step(), workbench.bench());
        workbench.end();
    }
    // The optimizer's and the yardstick's kernels; among ranks, what NCCL takes when it connects.
    const int64_t still_to_come = (stage.ranks > 1 ? 128 : 32) * kMiB;
    // Rounded, so that what the driver takes here and there does not change a plan.
    needs.overhead = round_up(stage.device.overhead_bytes() + still_to_come, 16 * kMiB);
    return needs;
}

}  // namespace ferry::train
