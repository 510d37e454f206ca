// Which updates of a run exchange momentum instead of gradients, and which change the second
// moment. Updates are counted from 1; one that is skipped is none.
//
// 1-bit Adam (Tang et al. 2021, arXiv 2102.02888): the first freeze_step updates are AdamW's. Then
// the second moment stays, and every update exchanges momentum.
//
// 0/1 Adam (Lu et al. 2022, arXiv 2202.06009, algorithm 1; names as in DeepSpeed's ZeroOneAdam).
// Up to var_freeze_step some updates change the second moment (the paper's T_v): var_update_scaler
// of them 1 apart, then as many 2 apart, then 4, and so on. They take in gradients in full, which
// makes the first moment exact too, so no signs go with them. All other updates exchange
// momentum. Beyond var_freeze_step exchanges grow apart (the paper's T_u): for local_step_scaler
// updates they are 1 apart, for as many 2 apart, then 4, and so on, local_step_clipper at the most.
// The updates between them are local steps: each rank makes them alone. Where the distance grows
// there is an exchange too.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include "ferry/config.h"
#include "step.h"

namespace ferry::train {

constexpr int kExchanged = 3;
constexpr std::string_view name_of(Exchanged what) {
    constexpr std::array<std::string_view, kExchanged> kNames{"gradients", "momentum", "nothing"};
    return kNames[static_cast<size_t>(what)];
}

class MomentumSchedule {
public:
    explicit MomentumSchedule(const OptimizerConfig& optimizer);

    Exchanged of(int64_t update) const;
    // The first update that exchanges momentum; beyond any run where none does.
    int64_t first() const;
    // How many of the updates up to this one exchange what, by Exchanged.
    std::array<int64_t, kExchanged> of_each(int64_t update) const;
    // How many of the updates up to this one change the second moment.
    int64_t changes_of_variance(int64_t update) const;
    // The first update after the exchange before this update. This one must take in no gradient in
    // full.
    int64_t interval_begin(int64_t update) const;

private:
    bool changes_variance(int64_t update) const;

    const optim::Method method_;
    const int64_t last_change_;  // freeze_step or var_freeze_step
    const int64_t changes_, local_steps_, most_apart_;
};

}  // namespace ferry::train
