// The outcome of a step: its norm, its clip factor, and whether its numbers are finite. The scalars
// of the update follow from it.
#pragma once

#include <array>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "ferry/config.h"
#include "ferry/learning_rate.h"
#include "ferry/optim.h"
#include "ferry/train.h"
#include "planner/planner.h"
#include "train/kernels/step_state.h"
#include "train/step/momentum_schedule.h"
#include "train/step/step.h"

namespace ferry::train {

// A rank's part of an outcome, as the ranks tell each other.
struct RankReport {
    double squares = 0;           // of its shards' gradients: its norm leaves, added in order
    double loss_sum = 0;          // over its micro-batches
    int64_t gradient_layer = -1;  // the highest with a non-finite gradient; -1: none
    int64_t output_layer = -1;    // the lowest with a non-finite output; -1: none
};

// A rank's loss over its part of the held-back text.
struct HeldBack {
    double loss_sum = 0;
    int64_t targets = 0;
    int64_t output_layer = -1;  // the lowest with a non-finite output; -1: none

    void add(const HeldBack& part);
    bool finite() const;
    Evaluation mean() const {
        return {.loss = targets > 0 ? loss_sum / static_cast<double>(targets)
                                    : std::numeric_limits<double>::quiet_NaN(),
                .targets = targets};
    }
};

struct Outcome {
    bool finite = true;
    double loss = 0, norm = 0, clip_factor = 1;
    // The lowest layer with a non-finite output, or the highest with a non-finite gradient; the
    // head when the loss alone is.
    int64_t layer = 0;
    bool forward_was_finite = true;
};

// The error that ends a run whose numbers are not finite.
struct Divergence {
    std::string where{};
    int64_t last_good_step = 0;
    bool scales = false;  // the loss, in fp16
    int64_t skipped_in_a_row = 0;
};
// The layer and the operation that were not finite first.
std::string place_of(const Outcome& outcome, const std::vector<model::Layer>& layers);
Error diverged(const Config& config, const Outcome& outcome, const Divergence& how);
// The error that ends an evaluation whose numbers are not finite: such a loss is no result.
Error diverged(const HeldBack& found, const std::vector<model::Layer>& layers, DType compute);

// The number of an update, from 1, by the weights and by the moments. They differ where moments
// began in the middle of a run. The learning rate follows the weights' number. Bias correction and
// the rounding of moments follow the moments'.
struct UpdateNumber {
    int64_t of_weights = 1, of_moments = 1;
};

class OutcomeJudge {
public:
    // `host` is the host arena: the plan's norm leaves and the step's report are in it, complete
    // when an outcome is due.
    OutcomeJudge(const Config& config, const optim::Hyper& hyper, const optim::LrSchedule& schedule,
                 const planner::Plan& plan, std::span<const std::byte> host);

    // This rank's part.
    RankReport report() const;
    // The loss of the last schedule, which evaluated so many micro-batches. Their targets are not
    // counted.
    HeldBack held_back(int64_t micro_batches) const;
    // `reports` are all ranks', in their order, so that all decide alike. Gradients carry
    // `loss_scale`, and losses are sums over `targets`. Where momentum is exchanged no rank has the
    // sum of the gradients. The norm is then the root mean square of the norms of N times each
    // rank's gradient.
    Outcome judge(std::span<const RankReport> reports, int64_t targets, double loss_scale,
                  Exchanged what = Exchanged::gradients);
    // What ranks exchange for the update after the moments have had so many.
    Exchanged exchanged_after(int64_t updates) const {
        return plan_.has_feedback() ? momentum_.of(updates + 1) : Exchanged::gradients;
    }
    zero::MomentumShare momentum_share(UpdateNumber update, double gradient_scale) const;
    ScalarsByKind scalars(UpdateNumber update, double gradient_scale) const;
    // Of an update of the weights, from 1.
    double learning_rate(int64_t update) const;
    // A speculative update pays when the clip factor will be 1: off after a clipped or skipped
    // step.
    bool speculates_now() const { return always_speculates_ || unclipped_in_a_row_ >= 2; }
    int64_t unclipped_in_a_row() const { return unclipped_in_a_row_; }
    void resume(int64_t unclipped_in_a_row) { unclipped_in_a_row_ = unclipped_in_a_row; }

private:
    double squares() const;
    std::span<const float> leaves_of(const planner::Chunk& chunk) const {
        return leaves().subspan(static_cast<size_t>(chunk.first_leaf),
                                static_cast<size_t>(chunk.count / optim::kLeaf));
    }
    ScalarsByKind exact_scalars(UpdateNumber update, double gradient_scale) const;
    // Since the exchange before this update, which may be a local step: how far a momentum of 1
    // would have moved the weights, and what decay has left of them.
    struct Interval {
        double rates = 0, decay = 1;
    };
    double rate(UpdateNumber update) const;
    Interval interval(UpdateNumber update) const;
    double loss_sum(int64_t micro_batches) const;  // over the last schedule's micro-batches
    int64_t output_layer() const;                  // the lowest whose output was not finite; or -1
    std::span<const float> leaves() const {
        return {reinterpret_cast<const float*>(host_.data() + plan_.leaves_offset),
                static_cast<size_t>(plan_.leaves)};
    }

    const planner::Plan& plan_;
    std::span<const std::byte> host_;
    double clip_norm_;
    MomentumSchedule momentum_;
    bool sends_moves_;  // 0/1 Adam's codes are of what moves the weights
    bool always_speculates_;
    optim::Hyper hyper_, elements_;  // elements_: of what is updated element by element
    optim::LrSchedule schedule_, elements_schedule_;
    int64_t unclipped_in_a_row_ = 0;
};

}  // namespace ferry::train
