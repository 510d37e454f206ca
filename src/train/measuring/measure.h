// Speeds of kernels and links, each alone, on the buffers of a plan that is not running yet. Where
// processors compute, the ranks of a host measure the same at the same time (together.h).
#pragma once

#include <functional>
#include <span>

#include "comm/comm.h"
#include "cost/measurements.h"
#include "ferry/device.h"
#include "ferry/optim.h"
#include "ferry/team.h"
#include "ops/ops.h"
#include "planner/planner.h"
#include "swap/store.h"
#include "together.h"
#include "topology/topology.h"
#include "train/stack/warm_up.h"

namespace ferry::train {

class TierStack;

// The request of a plan with the same buffers on the device and nothing else: kernels take as long
// wherever their weights come from.
planner::PlanRequest request_of_buffers(planner::PlanRequest request, const planner::Plan& plan);

// Small numbers of every sign in any compute type, and tokens: half of `memory` each.
struct Patterns {
    std::span<const std::byte> numbers, tokens;
};
Patterns make_patterns(std::span<std::byte> memory, int64_t vocab);
// Fills the plan's device buffers with numbers and its token buffers with tokens: what is left
// there by chance, zeros or denormals, takes other times. Each sequence is one document.
void fill_buffers(const Bench& on, const Patterns& patterns);
// A GPU's: each alone and warm, again and again, at the clock that it holds under the step's own
// load; the shortest of three times. The processors': in the order of the step, so that they find
// the caches as it leaves them, and beside the other ranks'; at most four of a kind in a round, of
// which the middle one of three to nine counts.
cost::KernelTimes time_kernels(const swap::Schedule& step, const Bench& on,
                               Together& together = alone());
// Seconds of what gives each activation that blocks may save, of the one where it takes longest. 0:
// without a model.
model::OfSaved<double> time_saved(const Bench& on, Together& together = alone());
// FLOPs a second of one product in the compute type, as large as the plan's buffers allow up to
// where rates stop growing; `numbers` fill its operands. 0: there is no room for one that says
// anything.
double time_product(const Bench& on, std::span<const std::byte> numbers,
                    Together& together = alone());
// Bytes a second that one thread seals.
double time_checks(std::span<std::byte> bytes, Together& together = alone());
// Bytes a second of copies from device to host.
double time_copies(const Bench& on, std::span<std::byte> host, Together& together = alone());
// Bytes a second, read and written, of a copy within the device's memory: over its buffers. 0:
// there is no room for one that says anything.
double time_device_copies(const Bench& on, Together& together = alone());
// Bytes of state, gradients and weights that a step's updates go over, wherever they live.
int64_t footprint_of_updates(const planner::Plan& plan);
// How the team updates host memory.
struct UpdateRates {
    double bytes_per_s = 0, overhead_s = 0;
    double out_of_place = 0;   // seconds of an update to a fresh slot, of one in place
    int64_t memory_bytes = 0;  // gone over by the updates that were timed
};
// The optimizer updates one chunk after another, in as much memory as says something: a part of
// `working_bytes`, or somewhat more than the last cache holds. It lies in `buffers`, which nothing
// uses meanwhile. Where they are less and `machine` has more left than they are, in memory of its
// own; where neither is enough, in the larger of both, and the log says so.
UpdateRates time_updates(NodeTeams& teams, const Topology& machine, const optim::Scalars& scalars,
                         const planner::Plan& plan, int64_t working_bytes,
                         std::span<std::byte> buffers, Together& together = alone());
// The same for the stack's plan, in the arena that its state will fill. Only between reserve() and
// open(): so the budget has room for it, and nothing lies there yet. Leaves zeros.
UpdateRates time_updates_before_fill(TierStack& stack, const BudgetConfig& budgets,
                                     const optim::Scalars& scalars, Together& together = alone());
void set_updates(const UpdateRates& rates, cost::Measurements& measured);
// The plan's staging buffers, in the host arena.
std::span<std::byte> staging_buffers(const planner::Plan& plan, std::span<std::byte> host);
// Bytes a second of an update by the GPU, over its own memory: a buffer's.
double time_device_updates(const Bench& on, const optim::Scalars& scalars);
// Bytes a second at which the team codes momentum and decodes it, as the rows of its operations
// count them, by turns in memory of its own: as much of it as the plan's turns go over, or as says
// something, or as `machine` has left. 0: the plan exchanges none, or not even one turn fits.
double time_momentum(const Bench& on, const Topology& machine, Together& together = alone());
// So much memory lies between two visits of the same place that caches serve as they do in a run,
// of updates and of what codes momentum; `working_bytes`: that the run goes over.
int64_t bytes_to_time(int64_t working_bytes, int64_t least_bytes, const Topology& machine);
// Of a step that exchanges momentum the kernels that the others have not: no more than their tasks.
swap::Schedule kernels_of_momentum(const planner::Plan& plan);
// Sets what storage gives and takes, reads and writes mixed: stored state and weights are rewritten
// through the staging buffers, as the optimizer pass does but without the update. Leaves it where
// none of them is stored. How fast a thread hashes is known by then.
void time_storage(const Config& config, const planner::Plan& plan, swap::Store& store,
                  Executor& executor, cost::Measurements& measured);
// Sets the two rates of what ranks give each other: all gather the weights of a block, and a few
// bytes of them.
void time_gathers(const Bench& on, comm::Communicator& ranks, cost::Measurements& measured);
// All of the above but storage, momentum and the ranks. `host` is the host arena, its staging
// buffers at least. Fills the plan's device buffers first. Updates are timed by `updates`, when
// their turn is. Of several the slowest: see agree_on_slowest().
cost::Measurements take_measurements(const swap::Schedule& step, const Bench& on, NodeTeams& teams,
                                     const optim::Scalars& scalars, std::span<std::byte> host,
                                     int64_t vocab, const std::function<UpdateRates()>& updates,
                                     Together& together = alone());

}  // namespace ferry::train
