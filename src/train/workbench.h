// A plan's buffers with nothing in them: where a run's kernels are tried before there is a run.
#pragma once

#include <functional>
#include <memory>
#include <span>

#include "ferry/config.h"
#include "ferry/device.h"
#include "ferry/model.h"
#include "ferry/ops.h"
#include "ferry/pinned_mem.h"
#include "ferry/planner.h"
#include "ferry/swap.h"
#include "ferry/topology.h"
#include "measure.h"
#include "step_kernels.h"

namespace ferry::train {

// One process of a run: the budgets are its own, the teams' cores too.
struct Stage {
    const Config& config;
    const Topology& machine;
    NodeTeams& teams;
    const model::Decoder& decoder;
    ops::Ops& ops;
    Device& device;
    Executor& executor;
    int ranks;  // of the run
};

class Workbench {
public:
    // Takes the buffers that `plan` has, on the device and for staging, until its end: no resident
    // weights, no state. `make`: the plan of a configuration whose budgets and swap keys alone are
    // others. Throws does_not_fit.
    using MakePlan = std::function<planner::Plan(const Config&)>;
    Workbench(const Stage& stage, const planner::Plan& plan, const MakePlan& make);
    Workbench(const Workbench&) = delete;
    Workbench& operator=(const Workbench&) = delete;

    Bench bench();
    // The step that the kernels belong to.
    const swap::Schedule& step() const { return step_; }
    std::span<std::byte> staging() const { return staging_; }
    // Waits for everything started. Throws what went wrong.
    void end();

private:
    struct Arena {
        Device& device;
        Arena(Device& on, int64_t bytes) : device(on) { on.reserve(bytes); }
        ~Arena() { device.release(); }
        Arena(const Arena&) = delete;
        Arena& operator=(const Arena&) = delete;
    };

    const Stage stage_;
    const planner::Plan plan_;
    const swap::Schedule step_;
    const Arena arena_;
    pinned_mem::Pool pool_;
    const std::span<std::byte> staging_;
    StepKernels kernels_;
    const std::unique_ptr<swap::Store> store_;
};

// What the planner must know of device and model. A driver loads a kernel's code at its first call,
// and which kernels the libraries choose depends on the model's shape: on a GPU each kernel runs
// once, in memory that is given back, and then the driver is asked what is taken.
// `make`: the plan of a configuration with these needs.
using PlanWith = std::function<planner::Plan(const Config&, const planner::DeviceNeeds&)>;
planner::DeviceNeeds measured_needs(const Stage& stage, const PlanWith& make);

}  // namespace ferry::train
