#include "clipped_share.h"

#include <spdlog/fmt/fmt.h>

#include <cmath>

#include "base/log.h"
#include "planner/work.h"
#include "train/prediction/step_timeline.h"
#include "train/step/step.h"

namespace ferry::train {

StepKinds predict_kinds(const planner::Plan& plan, const cost::Measurements& measured) {
    const auto seconds = [&](Previous previous, bool speculative) {
        return predict_steps(plan, record_step(plan, Previous::none, speculative),
                             record_step(plan, previous, speculative), measured)
            .step_seconds;
    };
    const double not_speculative = seconds(Previous::not_speculative, false);
    return {plan.speculative ? seconds(Previous::committed, true) : not_speculative,
            not_speculative};
}

std::string saved_by_expecting(const RunReport& run, const planner::Plan& plan,
                               const std::function<planner::Plan(double clipped)>& expecting,
                               const cost::Measurements& measured) {
    constexpr int64_t kFewest = 20;
    constexpr double kWorthIt = 0.98;
    const int64_t applied = run.steps - run.skipped_steps;
    if (!plan.speculative || applied < kFewest) return "";
    const double share = static_cast<double>(run.clipped_steps) / static_cast<double>(applied);
    const double clipped = std::round(share * 100) / 100;  // as a user would give it
    planner::Plan other;
    try {
        other = expecting(clipped);
    } catch (const Error& error) {  // a run that has ended well ends no worse for it
        log_debug(error.what());
        return "";
    }
    if (!measured.kernels.covers(record_step(other, Previous::not_speculative, false),
                                 planner::work_of(other)))
        return "";
    const double was = predict_kinds(plan, measured).mean(clipped);
    const StepKinds is = predict_kinds(other, measured);
    if (is.mean(clipped) > kWorthIt * was) return "";
    return fmt::format(
        "{} of {} steps were clipped: by a plan made for that (swap.expect_clipped={:g}) a step is "
        "predicted to take {:.3g} s on average instead of {:.3g}, a clipped one {:.3g}",
        run.clipped_steps, applied, clipped, is.mean(clipped), was, is.not_speculative);
}

void log_clipped_otherwise(const RunReport& run, const planner::Plan& plan,
                           const RankPlanner& planner, const cost::Measurements& measured) {
    const std::string saved = saved_by_expecting(
        run, plan, [&](double clipped) { return planner.expecting(clipped); }, measured);
    if (!saved.empty()) log_info(saved);
}

}  // namespace ferry::train
