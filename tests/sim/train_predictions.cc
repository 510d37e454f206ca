// Whatever run `ferry plan` is asked for: the step that it predicts is no shorter than the lower
// bound, nor than what any lane, link or stage of its own plan does in it.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "cost/measurements.h"
#include "tests/support/random_machine.h"
#include "tests/support/random_runs.h"
#include "tests/support/seeds.h"
#include "train/prediction/predictor.h"
#include "train/prediction/simulated_stages.h"
#include "train/setup/from_config.h"

namespace ferry::train {
namespace {

constexpr double kRounding = 1 + 1e-6;

void expect_no_less_than_links(const Prediction& found) {
    EXPECT_TRUE(std::isfinite(found.step_seconds));
    EXPECT_GT(found.step_seconds, 0);
    for (const LinkPrediction& link : found.links)
        EXPECT_LE(link.seconds, found.step_seconds * kRounding) << name_of(link.link);
    EXPECT_LE(found.bound_seconds, found.step_seconds * kRounding);
    EXPECT_LE(found.peak_bound_seconds, found.bound_seconds * kRounding);
    for (const StagePrediction& stage : found.stages) {
        EXPECT_LE(stage.compute_seconds, found.step_seconds * kRounding);
        EXPECT_NEAR(stage.waits, 1 - stage.compute_seconds / found.step_seconds, 1e-6);
    }
}

// What the plan's own schedules take: simulated, and by the sums of what they are made of.
struct OwnWork {
    double simulated_s = 0;
    Busiest busiest{};
    void add(const swap::Schedule& schedule, const swap::Timeline& timeline,
             const planner::Plan& plan, const cost::Measurements& measured) {
        simulated_s = std::max(simulated_s, timeline.step_seconds);
        const Busiest one = busiest_of(schedule, plan, measured, plan.partition.stage.all());
        if (one.seconds > busiest.seconds) busiest = one;
    }
    double most_s() const { return std::max(simulated_s, busiest.seconds); }
};

OwnWork own_work(const Prediction& found, const std::vector<planner::Plan>& plans,
                 const cost::Measurements& of_rank) {
    OwnWork own;
    if (found.stages.empty()) own.add(found.schedule, found.timeline, plans.front(), of_rank);
    for (size_t s = 0; s < found.stages.size(); ++s)
        own.add(found.stages[s].schedule, found.stages[s].timeline, plans[s], of_rank);
    return own;
}

// The bound lies below what the plan does by itself: the prediction, which is held to the bound,
// would not show one that is too long.
void expect_no_less_than_own_work(const Prediction& found, const std::vector<planner::Plan>& plans,
                                  const cost::Measurements& of_rank) {
    if (found.by) return;  // its schedules are of a shorter step
    const OwnWork own = own_work(found, plans, of_rank);
    EXPECT_LE(own.simulated_s, found.step_seconds * kRounding);
    EXPECT_LE(own.busiest.seconds, found.step_seconds * kRounding) << own.busiest.what;
    double most_s = own.most_s();
    for (const LinkPrediction& link : found.links) most_s = std::max(most_s, link.seconds);
    EXPECT_LE(found.bound_seconds, most_s * kRounding) << name_of(found.bound_link);
}

// How many of each kind were drawn.
struct Met {
    int64_t planned = 0, staged = 0, by_short_steps = 0, chosen = 0, speculative = 0, durable = 0,
            of_momentum = 0;
};

// Kernels as by arithmetic and varied; of half of the machines one link binds.
cost::Measurements measured_of(const RandomRun& run, Random& random, const Predictor& predictor,
                               const planner::Plan& plan) {
    cost::Measurements measured = predictor.with_assumed_kernels(run.links, plan);
    vary(random, measured.kernels);
    if (random.once_in(2)) return measured;
    const auto slow = random.one_of({Slow::copies, Slow::drives, Slow::memory, Slow::network});
    bind(random, slow, measured, record_step(plan, Previous::not_speculative, false), plan,
         run.count.on_a_host);
    return measured;
}

// The schedule's own prediction is that by which it was chosen.
void expect_as_chosen(const Predictor& predictor, const planner::PlanRequest& request,
                      const planner::Plan& plan) {
    const ScheduleChoice& choice = predictor.schedules();
    const Prediction found = predictor.predict(request, plan, predictor.planned_by());
    EXPECT_LE(choice.offers[choice.chosen].seconds, found.step_seconds * kRounding);
}

void expect_of(const RandomRun& run, Random& random, Met& met) {
    const auto predictor = run.absent ? Predictor::make(run.config, run.count, *run.absent)
                                      : Predictor::make(run.config, run.count);
    const planner::PlanRequest request = request_of(run.config);
    predictor->plan_by(run.links);
    const std::vector<planner::Plan> plans = predictor->plans(request);
    const planner::Plan& plan = plans.front();
    const cost::Measurements measured = measured_of(run, random, *predictor, plan);
    const Prediction found = predictor->predict(request, plan, measured);
    expect_no_less_than_links(found);
    expect_no_less_than_own_work(found, plans, cost::of_rank(measured, run.count.on_a_host));
    met.planned += 1;
    met.staged += std::ssize(plans) > 1;
    met.by_short_steps += found.by.has_value();
    met.speculative += found.speculative;
    met.durable += plan.durable;
    if (predictor->chooses()) {
        met.chosen += 1;
        expect_as_chosen(*predictor, request, plan);
    }
    if (!plan.has_feedback()) return;
    met.of_momentum += 1;
    expect_no_less_than_links(predictor->predict(request, plan, measured, Exchanged::momentum));
    if (plan.partition.codecs.local_steps)
        expect_no_less_than_links(predictor->predict(request, plan, measured, Exchanged::nothing));
}

TEST(Predictions, AreNoShorterThanBoundsAndLinks) {
    Met met;
    constexpr int64_t kOfAllKinds = 160;
    Seeds seeds(kOfAllKinds);
    do {
        RandomRunDrawer drawer(seeds.now());
        const RandomRun run = drawer.draw();
        SCOPED_TRACE(testing::Message()
                     << "FERRY_SIM_SEED=" << seeds.now() << ": " << testing::PrintToString(run));
        try {
            expect_of(run, drawer.random(), met);
        } catch (const Error& error) {
            EXPECT_EQ(error.trouble(), Trouble::does_not_fit) << error.what();
        }
    } while (seeds.next());
    if (seeds.replays()) return;
    EXPECT_GT(met.planned, seeds.count() / 2) << "budgets are too small to plan for";
    if (seeds.count() < kOfAllKinds) return;
    EXPECT_GT(met.staged, seeds.count() / 5);
    EXPECT_GT(met.speculative, seeds.count() / 10);
    EXPECT_GT(met.by_short_steps, 0);
    EXPECT_GT(met.chosen, 0);
    EXPECT_GT(met.durable, 0);
    EXPECT_GT(met.of_momentum, 0);
}

}  // namespace
}  // namespace ferry::train
