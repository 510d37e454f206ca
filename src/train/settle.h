// The verdict on a step: its norm, its clip factor, whether its numbers are finite; and from it the
// scalars of the update.
#pragma once

#include <array>

#include "ferry/config.h"
#include "ferry/learning_rate.h"
#include "ferry/optim.h"
#include "ferry/planner.h"

namespace ferry::train {

struct Verdict {
    bool finite = true;
    double norm = 0, clip_factor = 1;
    int64_t layer = 0;  // the highest with a non-finite gradient; the head when the loss is
};

// The optimizer of a configuration; its learning rate is the schedule's peak.
optim::Hyper hyper_of(const Config& config);
StateFormat format_of(const Config& config);

class Settler {
public:
    // `leaves` are the plan's norm leaves in host memory, complete when a step's verdict is due.
    Settler(const Config& config, const optim::Hyper& hyper, const optim::LrSchedule& schedule,
            const planner::Plan& plan, const float* leaves);

    // The gradients carry `loss_scale`.
    Verdict settle(double loss, double loss_scale);
    // Without ([0]) and with ([1]) weight decay, for update number `update` (from 1).
    std::array<optim::Scalars, 2> scalars(int64_t update, double gradient_scale) const;
    double learning_rate(int64_t update) const;
    // A bet pays when the clip factor will be 1: off after a clipped or skipped step.
    bool bets_now() const { return always_bet_ || unclipped_in_a_row_ >= 2; }

private:
    const planner::Plan& plan_;
    const float* leaves_;
    double clip_norm_;
    bool always_bet_;
    optim::Hyper hyper_;
    optim::LrSchedule schedule_;
    int64_t unclipped_in_a_row_ = 0;
};

}  // namespace ferry::train
