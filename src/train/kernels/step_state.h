// A step's data that its kernels need.
#pragma once

#include <array>
#include <atomic>
#include <vector>

#include "ferry/optim.h"
#include "model/model.h"
#include "zero/feedback.h"

namespace ferry::train {

// Updates of chunks without weight decay, of chunks with it, and of Muon's matrices.
enum class UpdateKind : uint8_t { plain, decayed, matrix };
constexpr size_t kUpdateKinds = 3;
using ScalarsByKind = std::array<optim::Scalars, kUpdateKinds>;

// A run's schedules are numbered, from 1, as they are appended; each has one of these.
struct StepState {
    int64_t step = 0;              // the run's, from 1
    float gradient_scale = 0;      // weight of each target's loss: 1 / the step's real targets
    int64_t held_back_before = 0;  // evaluation: micro-batches before this schedule's, of all ranks
    ScalarsByKind after_outcome{}, speculative{};  // for the updates of either kind
    zero::MomentumShare momentum_share{};  // where momentum is exchanged: a rank's, of the step
};

// A ring: at most three schedules are in the lanes at once.
class StepStates {
public:
    // Measurement and warming up run as part of a schedule before all others.
    static constexpr int64_t kMeasured = 0;

    StepState& operator[](int64_t sequence) { return ring_[position(sequence)]; }
    const StepState& operator[](int64_t sequence) const { return ring_[position(sequence)]; }
    // The step that this schedule's updates after the outcome finish.
    StepState& before(int64_t sequence) { return ring_[position(sequence - 1)]; }

private:
    static constexpr int64_t kRing = 4;
    static size_t position(int64_t sequence) {
        return static_cast<size_t>((sequence + kRing) % kRing);
    }
    std::array<StepState, kRing> ring_{};
};

}  // namespace ferry::train
