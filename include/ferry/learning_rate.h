// Learning-rate schedules: the rate as a pure function of the step.
#pragma once

#include <cstdint>
#include <string_view>

#include "ferry/optim_kinds.h"

namespace ferry::optim {

// The rate is peak times a factor. Steps count from 1, and
// r = (step - 1 - warmup_steps) / (total_steps - warmup_steps).
// The fall is over after the last step, as in PyTorch and transformers: the last step still moves
// where final_fraction is 0. The first step moves too, which it does not there.
//   warm-up       step / warmup_steps; log_warmup: log(step) / log(max(2, warmup_steps))
//   constant      1
//   linear        from 1 to final_fraction along r
//   cosine        final_fraction + (1 - final_fraction) * (1 + cos(pi * r)) / 2
//   wsd           1, over the last decay_steps linear to final_fraction (MiniCPM, Hu et al. 2024)
//   one_cycle     DeepSpeed's OneCycle (first step size = warmup_steps, both = total_steps). Linear
//                 from final_fraction at the first step to 1 at step warmup_steps + 1, and back.
//                 It has no cycle of momentum and no decay after the cycle
//   warmup_decay  DeepSpeed's WarmupDecayLR as its engine runs it, a step later than one_cycle.
//                 With a warm-up the first two steps have final_fraction, and step
//                 warmup_steps + 2 the peak. DeepSpeed's default is log_warmup, for 2 steps at
//                 least
// After total_steps (warmup_decay: and one more) final_fraction holds, except for constant.
struct LrSchedule {
    Decay kind = Decay::constant;
    double peak = 1e-3;
    double final_fraction = 0;  // as a fraction of the peak, after total_steps
    int64_t warmup_steps = 0;   // linear from peak / warmup_steps at step 1 to peak
    int64_t total_steps = 0;
    int64_t decay_steps = 0;  // wsd: length of the last, falling part
    bool log_warmup = false;  // not for one_cycle
};
// Throws Trouble::usage where the fields contradict each other (a decay without total_steps, ...),
// naming the configuration's keys.
void check(const LrSchedule& schedule);
// Pure function of the step (from 1).
double learning_rate(const LrSchedule& schedule, int64_t step);
std::string_view name_of(Decay kind);

}  // namespace ferry::optim
