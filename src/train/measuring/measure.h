// Measures kernels and links, each alone, on the buffers of a plan that is not running yet. Where
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

// The request of a plan with the same buffers on the device and nothing else. A kernel takes
// equally long wherever its weights come from.
planner::PlanRequest request_of_buffers(planner::PlanRequest request, const planner::Plan& plan);

// Small numbers of every sign in any compute type, and tokens: half of `memory` each.
struct Patterns {
    std::span<const std::byte> numbers, tokens;
};
Patterns make_patterns(std::span<std::byte> memory, int64_t vocab);
// Fills the plan's device buffers with numbers and its token buffers with tokens. With what lies
// there by chance, zeros or denormals, kernels would take other times. Each sequence is one
// document.
void fill_buffers(const Bench& on, const Patterns& patterns);
// Times the kernels of a step. A GPU's run alone and warm, again and again, at the clock that the
// GPU holds under the step's own load. The shortest of three times counts. A processor's run in the
// order of the step, so that they find the caches as the step leaves them, and beside the other
// ranks'. A round has at most four of a kind. The median of three to nine rounds counts.
cost::KernelTimes time_kernels(const swap::Schedule& step, const Bench& on,
                               Together& together = alone());
// Seconds of the kernels that compute each activation that blocks may save, in the block where they
// take longest. 0: there is no model.
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
// Times the optimizer on one chunk after another. The memory it goes over must be large enough: a
// part of `working_bytes`, or somewhat more than the last cache holds. It uses `buffers`, which
// nothing else uses meanwhile. Where they are too small and `machine` has more left, it takes
// memory of its own. Where neither is enough it uses the larger of both, and the log says so.
UpdateRates time_updates(NodeTeams& teams, const Topology& machine, const optim::Scalars& scalars,
                         const planner::Plan& plan, int64_t working_bytes,
                         std::span<std::byte> buffers, Together& together = alone());
// The same for the stack's plan, in the arena that its state will fill. Only between reserve() and
// open(), when the budget has room for it and nothing lies there yet. Leaves zeros.
UpdateRates time_updates_before_fill(TierStack& stack, const BudgetConfig& budgets,
                                     const optim::Scalars& scalars, Together& together = alone());
void set_updates(const UpdateRates& rates, cost::Measurements& measured);
// The plan's staging buffers, in the host arena.
std::span<std::byte> staging_buffers(const planner::Plan& plan, std::span<std::byte> host);
// Bytes a second of an update by the GPU, over a buffer in its own memory.
double time_device_updates(const Bench& on, const optim::Scalars& scalars);
// Bytes a second at which the team codes momentum and decodes it. cost::OperationRow counts these
// bytes. It works on turns in memory of its own: as much as the plan's turns go over, or as is
// enough, or as `machine` has left. 0: the plan exchanges no momentum, or not even one turn fits.
double time_momentum(const Bench& on, const Topology& machine, Together& together = alone());
// How much memory to go over before the same place is visited again, so that caches serve updates
// and codes as they do in a run. `working_bytes`: what the run goes over.
int64_t bytes_to_time(int64_t working_bytes, int64_t least_bytes, const Topology& machine);
// The tasks of the kernels that only steps that exchange momentum have.
swap::Schedule kernels_of_momentum(const planner::Plan& plan);
// Sets the rates of storage, with reads and writes mixed. Stored state and weights are rewritten
// through the staging buffers, as in the optimizer pass but without the update. Sets nothing where
// none of them is stored. The rate at which a thread hashes must be known already.
void time_storage(const Config& config, const planner::Plan& plan, swap::Store& store,
                  Executor& executor, cost::Measurements& measured);
// Sets the two rates of exchanges between ranks: all gather the weights of a block, and then a few
// bytes of them.
void time_gathers(const Bench& on, comm::Communicator& ranks, cost::Measurements& measured);
// Takes all of the measurements above, except those of storage, momentum and the ranks. `host` is
// the host arena, at least its staging buffers. It fills the plan's device buffers first. `updates`
// times the updates when their turn is. The slowest of several ranks counts: agree_on_slowest().
cost::Measurements take_measurements(const swap::Schedule& step, const Bench& on, NodeTeams& teams,
                                     const optim::Scalars& scalars, std::span<std::byte> host,
                                     int64_t vocab, const std::function<UpdateRates()>& updates,
                                     Together& together = alone());

}  // namespace ferry::train
