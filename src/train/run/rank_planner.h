// The plans of one rank: the run's, and what it would have been for another run of the kind.
#pragma once

#include <cstdint>
#include <optional>

#include "comm/comm.h"
#include "ferry/device.h"
#include "model/model.h"
#include "planner/planner.h"

namespace ferry::train {

// It knows the device as it was before the run took any of its memory.
class RankPlanner {
public:
    // `request` is this rank's. `ranks` is null where there is only one; else every rank makes one
    // at once. `decoder` must outlive it.
    RankPlanner(const planner::PlanRequest& request, const Device& device,
                const model::Decoder& decoder, const zero::Partition& partition,
                const cost::Measurements& machine, comm::Communicator* ranks, Executor& executor);

    // Before plan(): plans for another stage of the pipeline, or for the same in another order.
    void take(const zero::Stage& stage) { partition_.stage = stage; }

    // The plan by which every rank starts the same exchanges. It goes by the device memory that
    // each of them has, and by the chunks that the tightest can pass through its memory. All make
    // it at once. Throws does_not_fit.
    planner::Plan plan(comm::Communicator* ranks, Executor& executor);
    // The same in the same chunks, had this share of the steps been expected to be clipped.
    planner::Plan expecting(double clipped) const;
    // The plan of the rank that has this one's position in that stage, for that rank's request,
    // with the device memory that all ranks have. Without `chunk_elements` it has the chunks that
    // the ranks have agreed on, if they have.
    planner::Plan plan_of(planner::PlanRequest request, const zero::Stage& stage,
                          std::optional<int64_t> chunk_elements) const;
    // This rank's measurements, by which plans are weighed.
    const cost::Measurements& machine() const { return machine_; }

private:
    planner::Plan plan_of(const planner::PlanRequest& request) const;

    planner::PlanRequest possible_;
    const model::Decoder& decoder_;
    planner::DeviceNeeds needs_;
    zero::Partition partition_;
    const cost::Measurements machine_;
};

}  // namespace ferry::train
