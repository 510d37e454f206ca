// The measurements of a machine by which a plan is weighed.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "cost/drives.h"
#include "cost/measurements.h"
#include "ferry/config.h"
#include "planner/request.h"

namespace ferry::train {

// The storage paths, each as fast as its kind by default. Those of one drive have one number, and
// all of memory (tmpfs) is one drive more, a tenth as fast as updates stream through it.
std::vector<cost::Path> assumed_paths(DeviceKind device, const std::vector<NvmePath>& nvme);
// Where nobody has measured: the device kind's defaults, and the paths together, a host's drives.
cost::Measurements assumed_measurements(DeviceKind device, const std::vector<NvmePath>& nvme);
// DRAM traffic of a byte from or to the storage paths: once where a device's DMA moves it, twice
// where it is copied into a file that is memory.
double dram_per_stored_byte(const Config& config);

// One rank's part; unknown ones are assumed. `known` may be null.
cost::Measurements planning_measurements(const planner::PlanRequest& request,
                                         const cost::Measurements* known, int local_ranks);

// Those of the defaults: "small machine".
std::string_view default_machine_name(const Config& config);
// Says whose they were. `known` may be null: the defaults.
void log_planned_by(const cost::Measurements* known, const Config& config);
// The links that this rank measured to be at least twice as fast, or as slow, as its part of
// assumed_measurements() has them, in words; empty: none.
std::string unlike_assumed(const Config& config, const cost::Measurements& measured,
                           int local_ranks);
// In a run that was planned by the defaults: says which of them this machine is far from. Beside a
// GPU only: elsewhere they matter little, and a small model's copies stay in the caches.
void log_unlike_assumed(const Config& config, const cost::Measurements& measured, int local_ranks);

}  // namespace ferry::train
