#include "run_plans.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <utility>

#include "base/log.h"
#include "train/measuring/planning_measurements.h"
#include "train/prediction/simulated_stages.h"
#include "train/rank_agreement.h"
#include "train/setup/from_config.h"
#include "train/setup/stages.h"

namespace ferry::train {

Cut cut_of(const RunSetup& setup) {
    const Config& config = setup.config;
    const World& world = setup.world;
    std::vector<zero::Stage> stages = stages_of(config, setup.shape(), setup.layers);
    zero::Partition partition = zero::partition_of(
        config.zero.stage, world.sharer(), world.sharers(), codecs_of(config), world.slicing(),
        stages[static_cast<size_t>(world.stage())], hosts_of(config));
    return {config, std::move(stages), std::move(partition)};
}

Cut with_order(const Cut& cut, const RunSetup& setup, const StageOrder& order) {
    Cut other = cut;
    other.config.parallel.virtual_stages = order.virtual_stages;
    other.stages = stages_of(with_order(setup.config, order), setup.shape(), setup.layers);
    other.partition.stage = other.stages[static_cast<size_t>(setup.world.stage())];
    return other;
}

RunPlans::RunPlans(const RunSetup& setup, const model::Decoder& decoder, Cut cut)
    : setup_(setup),
      cut_(std::move(cut)),
      planner_(request_of(setup.world), setup.device, decoder, cut_.partition,
               planning_measurements(request_of(setup.world), setup.measurements,
                                     setup.world.local_ranks),
               setup.ranks, setup.executor) {
    if (setup.ranks && setup.world.pipeline > 1)
        sharers_of_hosts_ =
            gather(*setup.ranks, setup.executor, setup.world.local_ranks, "ranks of hosts");
    if (!setup.trains || !chooses_schedule(setup.config)) return;
    const std::vector<StageOrder> orders = orders_to_choose(setup.config, setup.shape().layers);
    take(orders[choose(plan_own(orders), decoder)]);
}

planner::PlanRequest RunPlans::request_of(const World& world) const {
    planner::PlanRequest request = of_rank(train::request_of(setup_.config), world);
    request.trains = setup_.trains;
    return request;
}

void RunPlans::take(const StageOrder& order) {
    cut_ = with_order(cut_, setup_, order);
    planner_.take(cut_.partition.stage);
}

std::vector<planner::Plan> RunPlans::of_stages() const {
    return plans_of_stages(cut_.stages, [&](const zero::Stage& stage,
                                            std::optional<int64_t> chunk_elements) {
        // The rank of it that has least of its host.
        const auto ranks = static_cast<size_t>(setup_.world.of_a_stage());
        const std::span<const int> of_stage =
            std::span(sharers_of_hosts_).subspan(static_cast<size_t>(stage.index) * ranks, ranks);
        World other = setup_.world;
        other.local_ranks = std::ranges::max(of_stage);
        return planner_.plan_of(of_rank(train::request_of(setup_.config), other), stage,
                                chunk_elements);
    });
}

// Why this rank cannot have its part of the stages as they are; none: it can.
std::optional<Error> RunPlans::refusal() const {
    const zero::Stage& stage = cut_.partition.stage;
    std::optional<Error> refusal =
        plan_schedule({}, [&] {
            return std::vector{planner_.plan_of(request_of(setup_.world), stage, std::nullopt)};
        }).refusal;
    if (!refusal) return std::nullopt;
    return Error(refusal->trouble(), of_stage(refusal->problem(), stage));
}

// Each rank says what it has no room for: of each order the refusal of any rank, on all of them.
std::vector<PlannedSchedule> RunPlans::plan_own(std::span<const StageOrder> orders) {
    std::vector<PlannedSchedule> planned;
    for (const StageOrder& order : orders) {
        planned.push_back(plan_schedule(order, [&] {
            take(order);
            return std::vector<planner::Plan>{};
        }));
        std::optional<Error>& refused = planned.back().refusal;
        if (!refused) refused = refusal();
        refused = error_of_any(*setup_.ranks, setup_.executor, refused);
    }
    return planned;
}

// The first rank simulates what all have room for, and all take what it chooses: measurements of
// another host could say otherwise.
size_t RunPlans::choose(std::vector<PlannedSchedule> planned, const model::Decoder& decoder) {
    if (std::ranges::all_of(planned, [](const auto& one) { return one.refusal.has_value(); }))
        throw Error(*planned.front().refusal);
    // Where the first rank can plan none for the others, the first that all have room for.
    const auto possible =
        std::ranges::find_if(planned, [](const auto& one) { return !one.refusal.has_value(); });
    auto chosen = static_cast<size_t>(possible - planned.begin());
    // After each plan and each simulation the others hear of the first rank, so that they wait no
    // longer than one takes: once a schedule in each of the two rounds.
    const auto tell = [&] {
        gather(*setup_.ranks, setup_.executor, setup_.world.rank, "schedule");
    };
    if (!setup_.is_first_rank()) {
        for (size_t told = 0; told < 2 * planned.size(); ++told) tell();
    } else {
        for (PlannedSchedule& one : planned) {
            if (!one.refusal)
                one = plan_schedule(one.order, [&] {
                    take(one.order);
                    return of_stages();
                });
            tell();
        }
        ScheduleChoice choice =
            choose_schedule(std::move(planned), decoder, planner_.machine(), tell);
        if (!fastest_of(choice.offers)) choice.chosen = chosen;
        const bool schedules = setup_.config.parallel.schedule == PipelineSchedule::automatic;
        log_info(fmt::format("parallel.{} auto takes {}", schedules ? "schedule" : "virtual_stages",
                             text_of(choice)));
        chosen = choice.chosen;
    }
    return gather(*setup_.ranks, setup_.executor, chosen, "schedule").front();
}

}  // namespace ferry::train
