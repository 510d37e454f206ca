#include "rank_lane.h"

namespace ferry::train {

int64_t RankLane::part_bytes(const swap::Task& task) const {
    return plan_.chunks[static_cast<size_t>(task.item)].count * size_of(plan_.wire);
}

void RankLane::start(const swap::Call& call) {
    cost::op::run(cost::op::Exchanges{}, *call.task, call.at,
                  [&](const auto& operands) { exchange(*call.task, operands); });
}

void RankLane::exchange(const swap::Task& task, const cost::op::GatherWeights<At>& at) {
    zero::gather_weights(ranks_, plan_.partition, plan_.layers[static_cast<size_t>(task.layer)],
                         plan_.compute, at.shards, at.whole, topic("weights", task));
}

void RankLane::exchange(const swap::Task& task, const cost::op::Exchange<At>& at) {
    const comm::Exchange parts{at.to_ranks, at.from_ranks, part_bytes(task)};
    ranks_.exchange({&parts, 1}, topic("gradient", task));
}

void RankLane::exchange(const swap::Task& task, const cost::op::GatherGradient<At>& at) {
    const comm::Gather parts{at.mine, at.all, part_bytes(task)};
    ranks_.all_gather({&parts, 1}, topic("gradient", task));
}

void RankLane::exchange(const swap::Task&, const cost::op::Agree<At>&) {
    mine_ = judge_.report();
    ranks_.all_gather_host({.mine = reinterpret_cast<const std::byte*>(&mine_),
                            .all = reinterpret_cast<std::byte*>(reports_.data()),
                            .bytes = sizeof mine_},
                           {.of = "outcome", .step = step_});
}

}  // namespace ferry::train
