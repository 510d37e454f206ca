#include "run_report.h"

#include <algorithm>

#include "train/prediction/simulated_stages.h"
#include "train/prediction/step_timeline.h"

namespace ferry::train {

Timelines predict_all(const Schedules& schedules, const planner::Plan& plan,
                      const cost::Measurements& measured) {
    Timelines planned{};
    for (size_t p = 0; p < kPrevious; ++p) {
        if (static_cast<Previous>(p) == Previous::alone) continue;  // only momentum comes after it
        for (const bool speculative : {false, true}) {
            if (speculative && !plan.speculative) continue;
            planned[p][speculative ? 1 : 0] =
                predict_steps(plan, schedules.step(Previous::none, speculative),
                              schedules.step(static_cast<Previous>(p), speculative), measured);
        }
    }
    return planned;
}

void add_links(std::vector<LinkReport>& links, const swap::Store& store, int ranks) {
    const auto lanes = store.report();
    links.resize(swap::lanes_of(ranks));
    for (size_t lane = 0; lane < links.size(); ++lane) {
        LinkReport& link = links[lane];
        link.lane = swap::name_of(static_cast<swap::Lane>(lane));
        link.bytes += lanes[lane].bytes;
        link.busy_seconds += static_cast<double>(lanes[lane].busy_ns) * 1e-9;
        link.exposed_seconds += static_cast<double>(lanes[lane].exposed_ns) * 1e-9;
    }
}

void add_collectives(std::vector<CollectiveReport>& collectives,
                     const std::vector<CollectiveReport>& more) {
    for (const CollectiveReport& one : more) {
        const auto known =
            std::ranges::find(collectives, one.collective, &CollectiveReport::collective);
        if (known == collectives.end()) {
            collectives.push_back(one);
            continue;
        }
        known->calls += one.calls;
        known->raw_bytes += one.raw_bytes;
        known->sent_bytes += one.sent_bytes;
    }
}

PredictedSeconds seconds_of(const Timelines& planned) {
    return {planned[static_cast<size_t>(Previous::not_speculative)][0].step_seconds,
            planned[static_cast<size_t>(Previous::committed)][1].step_seconds};
}

void add_momentum(PredictedSeconds& seconds, const Schedules& schedules, const planner::Plan& plan,
                  const model::Decoder& decoder, cost::Measurements measured) {
    if (!plan.has_feedback()) return;
    const swap::Schedule& first = schedules.step_by_momentum(Previous::none);
    const auto of = [&](Previous previous) {
        const swap::Schedule& steady = schedules.step_by_momentum(previous);
        add_assumed_kernels(steady, plan, decoder, measured);
        return predict_steps(plan, first, steady, measured).step_seconds;
    };
    seconds.momentum = of(Previous::not_speculative);
    if (plan.partition.codecs.local_steps) seconds.local = of(Previous::alone);
}

PredictedSeconds seconds_of_stages(std::span<const planner::Plan> plans,
                                   const model::Decoder& decoder,
                                   const cost::Measurements& measured) {
    const auto seconds = [&](bool speculative) {
        double longest_s = 0;
        for (const StageStep& stage : simulate_stages(plans, speculative, decoder, measured))
            longest_s = std::max(longest_s, stage.seconds);
        return longest_s;
    };
    const bool speculates = std::ranges::all_of(plans, &planner::Plan::speculative);
    return {seconds(false), speculates ? seconds(true) : 0};
}

void note_predicted(RunReport& report, const PredictedSeconds& seconds, const BudgetConfig& budgets,
                    const planner::Plan& plan, const model::Decoder& decoder,
                    const Schedules& schedules, const cost::Measurements& measured) {
    report.predicted_seconds = seconds.plain;
    report.predicted_momentum_seconds = seconds.momentum;
    report.predicted_local_seconds = seconds.local;
    if (plan.speculative) report.predicted_speculative_seconds = seconds.speculative;
    report.gemm_flops_per_s = std::max(report.gemm_flops_per_s, measured.product_flops_per_s);
    if (plan.has_feedback()) return;  // some steps exchange momentum, which is less, or nothing
    const swap::Schedule& step = schedules.steady();
    const double peaks = bound_by_peaks(budgets, plan, decoder, step, measured).seconds;
    if (report.peak_bound_seconds == 0 || peaks < report.peak_bound_seconds)
        report.peak_bound_seconds = peaks;
    const cost::Bound bound = bound_of(budgets, plan, decoder.shape(), step, measured);
    if (report.bound_seconds > 0 && bound.seconds >= report.bound_seconds) return;
    report.bound_seconds = bound.seconds;
    report.binding = cost::name_of(bound.binding);
}

}  // namespace ferry::train
