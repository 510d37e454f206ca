// What is known of a machine, as the planner weighs with it.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "ferry/config.h"
#include "ferry/device.h"
#include "planner/planner.h"
#include "train/forecast.h"

namespace ferry::train {

// Where nobody has measured: the device kind's defaults. The storage paths together are as fast as
// the drives that they lie on, and take a chunk for each at once. tmpfs counts as one more drive, a
// tenth as fast as updates stream through memory.
planner::MachineFigures assumed_figures(DeviceKind device, const std::vector<NvmePath>& paths);
// DRAM traffic of a byte from or to the storage paths: once where a device's DMA moves it, twice
// where it is copied into a file that is memory.
double dram_per_stored_byte(const Config& config);

// What is not known is assumed, for one rank. Ranks share what is known of a machine's drives and
// memory.
planner::MachineFigures planning_figures(const planner::PlanRequest& request,
                                         const std::vector<model::Layer>& layers,
                                         const std::optional<Machine>& machine,
                                         const std::optional<KernelTimes>& kernels,
                                         int local_ranks);
// `figures` may be null: none are known.
planner::MachineFigures planning_figures(const planner::PlanRequest& request,
                                         const std::vector<model::Layer>& layers,
                                         const Figures* figures, int local_ranks);

// What each of the ranks of a host has of it: they share the drives, and the memory that updates
// stream through.
Machine shared_by(Machine machine, int ranks);
Figures shared_by(Figures of_machine, int ranks);

// Says whose figures they were. `figures` may be null: the defaults.
void log_planned_by(const Figures* figures, const Config& config);
// The links that were measured to be at least twice as fast, or as slow, as assumed_figures() has
// them, in words; empty: none.
std::string unlike_assumed(const Config& config, const LinkSpeeds& measured);
// In a run that was planned by the defaults: says which of them this machine is far from. Beside a
// GPU only: elsewhere they matter little, and a small model's copies stay in the caches.
void log_unlike_assumed(const Config& config, const LinkSpeeds& measured);

// Where nobody has measured: rates of a GPU's memory, and of a thread that hashes.
constexpr double kAssumedDeviceBytesPerS = 2e12, kAssumedCheckBytesPerS = 1.2e10;
// Of every kernel of the step, from what it multiplies or moves. saved_flops: of what
// gives each result that a block may keep.
KernelTimes assumed_times(const swap::Schedule& step, const planner::Plan& plan, int64_t tokens,
                          const model::OfSaved<double>& saved_flops, double flops_per_s);

}  // namespace ferry::train
