#include "model_on_device.h"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "cost/kernel_times.h"
#include "cost/measurements.h"
#include "ferry/config.h"
#include "ferry/device.h"
#include "ferry/executor.h"
#include "ferry/units.h"
#include "model/model.h"
#include "planned_device.h"
#include "planner/planner.h"
#include "planner/request.h"
#include "planner/work.h"
#include "swap/schedule.h"
#include "topology/topology.h"
#include "train/setup/from_config.h"
#include "train/setup/model_of.h"
#include "train/setup/rank_share.h"
#include "train/setup/stages.h"
#include "train/stack/device_needs.h"
#include "train/stack/threads.h"
#include "train/step/step.h"
#include "zero/zero.h"

namespace ferry::train {

using planner::Plan;

namespace {

// A GPU's library asks for it on every GPU of Hopper's kind, and for less elsewhere.
constexpr int64_t kAbsentMatrixScratch = 33 * kMiB;

planner::DeviceNeeds needs_of_absent(const AbsentDevice& absent, const model::Decoder& decoder) {
    const int64_t scratch = absent.needs.scratch;
    return {.activation = decoder.activation_bytes(),
            .scratch = scratch > 0 ? scratch : decoder.scratch_bytes(),
            .overhead = absent.needs.overhead,
            .lists = decoder.pattern_bytes(),
            .matrix_scratch = kAbsentMatrixScratch,
            .exchanges = decoder.exchanges(),
            .saved = saved_bytes(decoder),
            .saved_flops = saved_flops(decoder),
            .maps_host = true,
            .deferred = decoder.deferred_bytes()};
}

}  // namespace

ModelOnDevice::ModelOnDevice(const Config& of_run, const RankCount& count,
                             const std::optional<AbsentDevice>& not_here)
    : world(world_of(of_run, 0, count.ranks, count.on_a_host)),
      gpu(count.gpu),
      here(std::max(count.here, count.on_a_host)),
      config(of_run),
      absent(not_here),
      executor(make_thread_executor()),
      device(Device::open(absent ? DeviceKind::cpu : config.device, *executor, gpu)),
      ops(ops_on(*device, config, team)),
      decoder(decoder_of(config, world.ranks, *ops)),
      stages(stages_of(config, model_of(config).shape, decoder.layers())),
      needs(absent ? needs_of_absent(*absent, decoder) : needs_of(*device, decoder)),
      device_most(!absent                    ? device_bytes_within(kUnlimited, *device)
                  : absent->memory_bytes > 0 ? absent->memory_bytes
                                             : kUnlimited) {
    require_ranks(config, world.ranks);
    schedule_of(config);                                        // refuses one that makes no sense
    device_bytes_within(config.budgets.device_bytes, *device);  // warns of what it has not got
}

cost::KernelTimes ModelOnDevice::assumed_times_of(const swap::Schedule& step, const Plan& plan,
                                                  double flops_per_s) const {
    return cost::assumed_times(step, planner::work_of(plan), decoder.numerics().tokens(),
                               most_saved_flops(decoder),
                               {flops_per_s, cost::kAssumedDeviceBytesPerS});
}

swap::Schedule ModelOnDevice::momentum_step(const Plan& plan, Previous previous,
                                            cost::Measurements& measurements) const {
    swap::Schedule step = record_step(plan, previous, false, Exchanged::momentum);
    for (const auto& [kind, seconds] :
         assumed_times_of(step, plan, measurements.assumed_flops_per_s).seconds)
        measurements.kernels.seconds.try_emplace(kind, seconds);
    return step;
}

Topology ModelOnDevice::own_machine(int rank) const {
    return with_part_of_limits(with_part_of_cores(machine_for(config), rank, here), here);
}

int ModelOnDevice::at_once() const { return config.device == DeviceKind::cpu ? here : 1; }

planner::PlanRequest ModelOnDevice::possible(const planner::PlanRequest& of_run) const {
    planner::PlanRequest request = of_rank(of_run, world);
    request.budgets.device_bytes = std::min(request.budgets.device_bytes, device_most);
    return request;
}

std::vector<model::Layer> ModelOnDevice::layers_with(MomentType moments) const {
    if (moments == config.optimizer.moments) return decoder.layers();
    return layers_of(config, model_of(config).shape, world.ranks, 0, moments);
}

zero::Partition ModelOnDevice::partition_of(const zero::Stage& stage) const {
    return zero::partition_of(config.zero.stage, 0, world.sharers(), codecs_of(config),
                              world.slicing(), stage, hosts_of(config));
}

Plan ModelOnDevice::plan_of(const planner::PlanRequest& request, const zero::Stage& stage,
                            const cost::Measurements& machine) const {
    return planner::make_plan(in_groups(request, stage),
                              zero::layers_of_stage(layers_with(request.state.moment_type), stage),
                              decoder.numerics(), needs, machine, partition_of(stage));
}

}  // namespace ferry::train
