// What the measurements in a machine file are of: its entries are found by that.
#pragma once

#include <cstdint>
#include <string>

#include "cost/measurements.h"
#include "train/prediction/predictor.h"

namespace ferry::tools {

// The kernels, ranks and device that measurements are of.
struct MeasurementsOf {
    cost::KernelsOf kernels{};  // with device and threads
    train::RankCount count{};
    // Ranks that compute on the host's processors meanwhile, each with as many threads.
    int at_once = 1;
    ParallelConfig groups{};   // of these ranks
    int ranks_per_host = 1;    // zero.ranks_per_host; 1: hosts are none of their business
    std::string by{};          // comm::Communicator::kind() of several ranks
    int64_t device_bytes = 0;  // device memory that a process can have
    planner::DeviceNeeds needs{};
};
// "2 ranks, 2 on a host, by nccl"; "4 ranks, 4 on a host, tensors over 2, by nccl".
std::string text_of_ranks(const MeasurementsOf& what);

}  // namespace ferry::tools
