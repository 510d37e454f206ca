#include "rank_lane.h"

#include "planner/recorder.h"

namespace ferry::train {

using planner::Op;

int64_t RankLane::piece_bytes(const swap::Task& task) const {
    return plan_.chunks[static_cast<size_t>(task.item)].count * size_of(plan_.wire);
}

void RankLane::start(const swap::Call& call) {
    const swap::Task& task = *call.task;
    switch (static_cast<Op>(task.op)) {
        case Op::gather_weights:
            return zero::gather_weights(
                ranks_, plan_.partition, plan_.layers[static_cast<size_t>(task.layer)],
                plan_.compute, call.at[1], call.at[0], topic("weights", task));
        case Op::exchange: {
            const comm::Exchange pieces{call.at[0], call.at[1], piece_bytes(task)};
            return ranks_.exchange({&pieces, 1}, topic("gradient", task));
        }
        case Op::gather_gradient: {
            const comm::Gather pieces{call.at[0], call.at[1], piece_bytes(task)};
            return ranks_.all_gather({&pieces, 1}, topic("gradient", task));
        }
        case Op::agree:
            mine_ = judge_.report();
            return ranks_.all_gather_host({.mine = reinterpret_cast<const std::byte*>(&mine_),
                                           .all = reinterpret_cast<std::byte*>(reports_.data()),
                                           .bytes = sizeof mine_},
                                          {.of = "outcome", .step = step_});
        default:
            bug("no task of the comm lane");
    }
}

}  // namespace ferry::train
