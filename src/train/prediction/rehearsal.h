// A run without a model, for `ferry bench swap`. Its parameters lie on real tiers. The schedules,
// the store, the device's streams and the optimizer of a training run move and update them. A pause
// on the compute stream stands for all else that the device would compute.
#pragma once

#include <array>
#include <cstdint>
#include <memory>

#include "ferry/train.h"
#include "swap/store.h"
#include "train/prediction/predictor.h"

namespace ferry::train {

enum class Pass : uint8_t {
    swap_out,   // all that lives on NVMe is written there, from memory: its first contents again
    swap_in,    // and read back and checked
    optimizer,  // every chunk is read, updated and written, wherever it lives
    step,       // a step's own schedule, the optimizer pass beside forward and backward
};
constexpr int kPasses = 4;

struct RehearsalOptions {
    int64_t parameters = 0;      // rounded up to 4,096 in each layer
    int64_t layers = 8;          // blocks, alike
    double compute_seconds = 0;  // a step's: a quarter forward, the rest backward
    // Says that measure() will be called. Updates are then timed at the start, in the memory that
    // the state gets afterwards. Otherwise they are timed in what budgets.host has left later.
    bool measures = false;
};

struct PassReport {
    double seconds = 0;
    std::array<swap::LaneReport, swap::kLanes> lanes{};
};

class Rehearsal {
public:
    // Uses the configuration's device, budgets, swap, io, optimizer, precision, threads and verify.
    // Plans, reserves, and gives everything first contents. On a CPU device without a limit that is
    // to keep no state, weights live in host memory, or further away: its memory is the host's by
    // another name. A recording gets the lanes as its first rows, in their order. Throws Error;
    // does_not_fit also where budgets.device leaves room for less than swap.state_on_device.
    static std::unique_ptr<Rehearsal> make(const Config& config, const RehearsalOptions& options,
                                           const Runtime& runtime);
    ~Rehearsal();
    Rehearsal(const Rehearsal&) = delete;
    Rehearsal& operator=(const Rehearsal&) = delete;

    // Blocks until all of it is done. Throws what went wrong.
    PassReport run(Pass pass);
    // Everything but storage, measured alone.
    cost::Measurements measure();
    const planner::Plan& plan() const;
    // Bytes that the pass's updates on this lane read and write: the team's in host memory, those
    // of compute in the device's.
    double bytes_of_pass(Pass pass, swap::Lane lane) const;
    double state_on(swap::Tier tier) const;  // the part of the optimizer's that is there
    uint64_t state_hash();

private:
    class OnRealTiers;
    explicit Rehearsal(std::unique_ptr<OnRealTiers> tiers);
    const std::unique_ptr<OnRealTiers> tiers_;
};

}  // namespace ferry::train
