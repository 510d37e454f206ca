// What the kernels of a step need to know about it.
#pragma once

#include <array>
#include <atomic>
#include <vector>

#include "ferry/optim.h"
#include "model/model.h"

namespace ferry::train {

// Schedules in the lanes carry a sequence number; each training schedule has one of these.
struct StepState {
    int64_t step = 0;          // of the run, from 1
    float gradient_scale = 0;  // of each target's loss: 1 / the step's real targets
    // With and without weight decay, for the update after the outcome and for a speculative update.
    std::array<optim::Scalars, 2> after_outcome{}, speculative{};
};

// A ring: at most three schedules are in the lanes at once.
class StepStates {
public:
    StepState& operator[](int64_t sequence) {
        return ring_[static_cast<size_t>(sequence) % ring_.size()];
    }
    const StepState& operator[](int64_t sequence) const {
        return ring_[static_cast<size_t>(sequence) % ring_.size()];
    }

private:
    std::array<StepState, 4> ring_{};
};

}  // namespace ferry::train
