// The model and the device that a predictor plans for.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "cost/kernel_times.h"
#include "cost/measurements.h"
#include "ferry/config.h"
#include "ferry/device.h"
#include "ferry/executor.h"
#include "ferry/team.h"
#include "model/model.h"
#include "ops/ops.h"
#include "planned_device.h"
#include "planner/planner.h"
#include "planner/request.h"
#include "swap/schedule.h"
#include "topology/topology.h"
#include "train/setup/rank_share.h"
#include "train/step/step.h"
#include "zero/zero.h"

namespace ferry::train {

// A model on a device that is opened once, for all plans; or that is not here, for none but plans.
struct ModelOnDevice {
    ModelOnDevice(const Config& of_run, const RankCount& count,
                  const std::optional<AbsentDevice>& not_here);

    RankShare share() const { return share_of(config, world); }
    cost::KernelTimes assumed_times_of(const swap::Schedule& step, const planner::Plan& plan,
                                       double flops_per_s) const;
    // Of a step where momentum is exchanged: kernels that only it has were not measured.
    swap::Schedule momentum_step(const planner::Plan& plan, Previous previous,
                                 cost::Measurements& measurements) const;
    Topology own_machine(int rank = 0) const;  // what one of the ranks here has of it
    // Ranks that compute on its processors at the same time; beside a GPU each measures alone.
    int at_once() const;
    planner::PlanRequest possible(const planner::PlanRequest& of_run) const;

    // As they lie where the moments are kept so.
    std::vector<model::Layer> layers_with(MomentType moments) const;

    // Of the first rank of a stage.
    zero::Partition partition_of(const zero::Stage& stage) const;
    // `request`: of a rank.
    planner::Plan plan_of(const planner::PlanRequest& request, const zero::Stage& stage,
                          const cost::Measurements& machine) const;

    const World world;
    const int gpu;        // of this host, as RankCount has it
    const int here;       // ranks that share this machine
    const Config config;  // the whole run's
    const std::optional<AbsentDevice> absent;
    Team team{1};  // for operations that only say how much scratch they need
    std::unique_ptr<Executor> executor;
    std::unique_ptr<Device> device;
    std::unique_ptr<ops::Ops> ops;
    model::Decoder decoder;
    const std::vector<zero::Stage> stages;
    // As it was before anything was measured there.
    const planner::DeviceNeeds needs;
    const int64_t device_most;
};

}  // namespace ferry::train
