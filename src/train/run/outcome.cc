#include "outcome.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "ferry/train.h"
#include "planner/recording/recorder.h"
#include "train/loss_scale.h"
#include "train/setup/from_config.h"
#include "train/setup/model_of.h"

namespace ferry::train {

namespace {

// NaN without the sign that printf gives it.
std::string number_text(double value) { return std::isnan(value) ? "nan" : std::to_string(value); }

std::string divergence_remedy(const Config& config, const Divergence& how) {
    if (how.scales) {
        return "the activations may exceed fp16's 65,504: train in bf16 or fp32, or lower "
               "optimizer.lr";
    }
    std::string text = "lower optimizer.lr";
    if (config.clip_norm == 0) text += ", set clip_norm";
    return text + (how.skipped_in_a_row == kSkipsMost
                       ? ": " + std::to_string(kSkipsMost) + " steps in a row were skipped"
                       : ", or set on_nonfinite to \"skip\"");
}

}  // namespace

std::string place_of(const Outcome& outcome, const std::vector<model::Layer>& layers) {
    using enum cost::Op;
    const bool at_end = outcome.layer == std::ssize(layers) - 1;
    const cost::Op operation = outcome.forward_was_finite ? backward : at_end ? head : forward;
    return layer_name(layers, outcome.layer) + ", " + cost::name_of(operation);
}

Error diverged(const Config& config, const Outcome& outcome, const Divergence& how) {
    return {Trouble::diverged,
            {.what = "loss or gradient is not finite",
             .where = how.where,
             .measured = "loss " + number_text(outcome.loss) + ", gradient norm " +
                         number_text(outcome.norm),
             .limit = "the last good step is " + std::to_string(how.last_good_step),
             .remedy = divergence_remedy(config, how)}};
}

Error diverged(const HeldBack& found, const std::vector<model::Layer>& layers, DType compute) {
    const bool head = found.output_layer < 0;
    const int64_t layer = head ? std::ssize(layers) - 1 : found.output_layer;
    const cost::Op operation = head ? cost::Op::head_loss : cost::Op::forward;
    return {Trouble::diverged,
            {.what = "the evaluation is not finite",
             .where = layer_name(layers, layer) + ", " + cost::name_of(operation),
             .measured = "loss " + number_text(found.mean().loss),
             .remedy = compute == DType::f16
                           ? "the activations may exceed fp16's 65,504: set precision to bf16 or "
                             "fp32; if they are not finite there either, the weights are damaged"
                           : "the weights are damaged or the training has diverged: go back to "
                             "earlier ones"}};
}

void HeldBack::add(const HeldBack& part) {
    loss_sum += part.loss_sum;
    targets += part.targets;
    if (part.output_layer < 0) return;
    output_layer = output_layer < 0 ? part.output_layer : std::min(output_layer, part.output_layer);
}

bool HeldBack::finite() const { return output_layer < 0 && std::isfinite(loss_sum); }

OutcomeJudge::OutcomeJudge(const Config& config, const optim::Hyper& hyper,
                           const optim::LrSchedule& schedule, const planner::Plan& plan,
                           std::span<const std::byte> host)
    : plan_(plan),
      host_(host),
      clip_norm_(config.clip_norm),
      momentum_(config.optimizer),
      sends_moves_(config.optimizer.method == optim::Method::zeroone_adam),
      always_speculates_(config.swap.speculate == Speculate::all),
      hyper_(hyper),
      elements_(elements_hyper_of(config)),
      schedule_(schedule),
      elements_schedule_(schedule) {
    elements_schedule_.peak = elements_.lr;
}

double OutcomeJudge::loss_sum(int64_t micro_batches) const {
    const auto* losses = reinterpret_cast<const double*>(host_.data() + plan_.report_offset);
    return std::accumulate(losses, losses + micro_batches, 0.0);
}

int64_t OutcomeJudge::output_layer() const {
    const auto* nonfinite = reinterpret_cast<const uint32_t*>(host_.data() + plan_.report_offset +
                                                              plan_.nonfinite_offset());
    for (int64_t l = 0; l < std::ssize(plan_.layers); ++l) {
        if (nonfinite[l] != 0) return l;
    }
    return -1;
}

HeldBack OutcomeJudge::held_back(int64_t micro_batches) const {
    return {.loss_sum = loss_sum(micro_batches), .output_layer = output_layer()};
}

// Of this rank's leaves, in their order; what neighbours hold as well, one of them counts.
double OutcomeJudge::squares() const {
    if (plan_.partition.slices == 1) return optim::sum_leaves(leaves());
    double sum = 0;
    for (const planner::Chunk& chunk : plan_.chunks) {
        const model::Layer& layer = plan_.layers[static_cast<size_t>(chunk.layer)];
        if (!chunk.trainable || !plan_.owns(chunk) ||
            !plan_.partition.counts(zero::segment_of(layer, chunk.first)))
            continue;
        for (const float leaf : leaves_of(chunk)) sum += double{leaf};
    }
    return sum;
}

RankReport OutcomeJudge::report() const {
    const bool counts_loss = plan_.partition.slice == 0;  // the others' is the same
    RankReport report{.squares = squares(),
                      .loss_sum = counts_loss ? loss_sum(plan_.micro_batches) : 0,
                      .output_layer = output_layer()};
    if (std::isfinite(report.squares)) return report;
    for (const planner::Chunk& chunk : plan_.chunks) {
        if (!chunk.trainable || !plan_.owns(chunk)) continue;
        if (!std::ranges::all_of(leaves_of(chunk), [](float leaf) { return std::isfinite(leaf); }))
            report.gradient_layer = chunk.layer;
    }
    return report;
}

Outcome OutcomeJudge::judge(std::span<const RankReport> reports, int64_t targets, double loss_scale,
                            Exchanged what) {
    double squares = 0, loss_sum = 0;
    int64_t gradient_layer = -1, output_layer = -1;
    for (const RankReport& rank : reports) {
        squares += rank.squares;
        loss_sum += rank.loss_sum;
        gradient_layer = std::max(gradient_layer, rank.gradient_layer);
        if (rank.output_layer >= 0 && (output_layer < 0 || rank.output_layer < output_layer))
            output_layer = rank.output_layer;
    }
    if (what != Exchanged::gradients) squares *= plan_.partition.ranks;
    Outcome outcome{.loss = loss_sum / static_cast<double>(targets),
                    .norm = std::sqrt(squares) / loss_scale};
    outcome.finite = std::isfinite(outcome.norm) && std::isfinite(outcome.loss);
    if (!outcome.finite) {
        const bool loss_is_finite = std::isfinite(outcome.loss);
        outcome.forward_was_finite = loss_is_finite && output_layer < 0;
        outcome.layer = output_layer >= 0                       ? output_layer
                        : loss_is_finite && gradient_layer >= 0 ? gradient_layer
                                                                : std::ssize(plan_.layers) - 1;
        unclipped_in_a_row_ = 0;
        return outcome;
    }
    outcome.clip_factor = optim::clip_factor(outcome.norm, clip_norm_);
    unclipped_in_a_row_ = outcome.clip_factor == 1 ? unclipped_in_a_row_ + 1 : 0;
    return outcome;
}

double OutcomeJudge::learning_rate(int64_t update) const {
    return optim::learning_rate(schedule_, update);
}

// Over 1 - beta1^t, as the update has it.
double OutcomeJudge::rate(UpdateNumber update) const {
    const auto t = static_cast<double>(update.of_moments);
    return optim::learning_rate(elements_schedule_, update.of_weights) /
           (1 - std::pow(elements_.beta1, t));
}

OutcomeJudge::Interval OutcomeJudge::interval(UpdateNumber update) const {
    Interval found;
    const int64_t begin = momentum_.interval_begin(update.of_moments);
    for (int64_t back = update.of_moments - begin; back >= 0; --back) {
        const UpdateNumber one{update.of_weights - back, update.of_moments - back};
        found.rates += rate(one);
        found.decay *=
            1 - optim::learning_rate(elements_schedule_, one.of_weights) * elements_.weight_decay;
    }
    return found;
}

zero::MomentumShare OutcomeJudge::momentum_share(UpdateNumber update, double gradient_scale) const {
    const auto ranks = static_cast<double>(plan_.partition.ranks);
    const double beta1 = elements_.beta1;
    zero::MomentumShare share{.gradient_scale = static_cast<float>(gradient_scale),
                              .momentum = static_cast<float>(beta1 / ranks),
                              .gradient = static_cast<float>(1 - beta1)};
    if (!sends_moves_) return share;
    share.momentum = static_cast<float>(beta1);
    share.gradient = static_cast<float>((1 - beta1) * ranks);
    share.step = static_cast<float>(rate(update) / ranks);
    share.average = static_cast<float>(1 / interval(update).rates);
    share.begins = momentum_.interval_begin(update.of_moments) == update.of_moments;
    return share;
}

namespace {

// AdamW's update where its gradient is the momentum: m' is that, and v stays.
optim::Scalars by_momentum(optim::Scalars of_update) {
    of_update.gradient_scale = 1;
    of_update.beta1 = of_update.one_minus_beta2 = 0;
    of_update.one_minus_beta1 = of_update.beta2 = 1;
    return of_update;
}

}  // namespace

ScalarsByKind OutcomeJudge::scalars(UpdateNumber update, double gradient_scale) const {
    ScalarsByKind found = exact_scalars(update, gradient_scale);
    const Exchanged what = exchanged_after(update.of_moments - 1);
    if (!plan_.has_feedback()) return found;
    const int64_t changes = momentum_.changes_of_variance(update.of_moments);
    const ScalarsByKind of_variance = exact_scalars({update.of_weights, changes}, 1);
    for (size_t kind = 0; kind < found.size(); ++kind) {
        found[kind].inv_sqrt_bias2 = of_variance[kind].inv_sqrt_bias2;
        if (what == Exchanged::gradients) continue;
        found[kind] = by_momentum(found[kind]);
        if (!sends_moves_) continue;
        const Interval moves = interval(update);
        // What a rank moved alone is an Nth of that already (zero/feedback.h).
        found[kind].step_size =
            static_cast<float>(what == Exchanged::nothing ? plan_.partition.ranks : moves.rates);
        if (found[kind].decay != 1) found[kind].decay = static_cast<float>(moves.decay);
    }
    return found;
}

ScalarsByKind OutcomeJudge::exact_scalars(UpdateNumber update, double gradient_scale) const {
    optim::Hyper matrices = hyper_, hyper = elements_;
    matrices.lr = learning_rate(update.of_weights);
    hyper.lr = optim::learning_rate(elements_schedule_, update.of_weights);
    const optim::Scalars decayed = optim::scalars_of(hyper, update.of_moments, gradient_scale),
                         of_matrices =
                             optim::scalars_of(matrices, update.of_moments, gradient_scale);
    hyper.weight_decay = 0;
    return {optim::scalars_of(hyper, update.of_moments, gradient_scale), decayed, of_matrices};
}

}  // namespace ferry::train
