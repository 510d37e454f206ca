#include "rank_planner.h"

#include <algorithm>

#include "train/rank_agreement.h"
#include "train/setup/rank_share.h"
#include "train/stack/device_needs.h"

namespace ferry::train {

RankPlanner::RankPlanner(const planner::PlanRequest& request, const Device& device,
                         const model::Decoder& decoder, const zero::Partition& partition,
                         const cost::Measurements& machine, comm::Communicator* ranks,
                         Executor& executor)
    : possible_(request),
      decoder_(decoder),
      needs_(needs_of(device, decoder)),
      partition_(partition),
      machine_(machine) {
    possible_.budgets.device_bytes = device_bytes_within(request.budgets.device_bytes, device);
    if (!ranks) return;
    struct Memory {
        int64_t budget = 0, overhead = 0, lists = 0;
    };
    const Memory mine{possible_.budgets.device_bytes, needs_.overhead, needs_.lists};
    for (const Memory& memory : gather(*ranks, executor, mine, "device memory")) {
        possible_.budgets.device_bytes = std::min(possible_.budgets.device_bytes, memory.budget);
        needs_.overhead = std::max(needs_.overhead, memory.overhead);
        needs_.lists = std::max(needs_.lists, memory.lists);
    }
}

planner::Plan RankPlanner::plan(comm::Communicator* ranks, Executor& executor) {
    planner::Plan first = plan_of(possible_);
    possible_.swap.chunk_elements = first.chunk_elements;
    if (!ranks) return first;
    const std::vector<int64_t> all = gather(*ranks, executor, first.chunk_elements, "chunk size");
    possible_.swap.chunk_elements = *std::ranges::min_element(all);
    return possible_.swap.chunk_elements == first.chunk_elements ? first : plan_of(possible_);
}

planner::Plan RankPlanner::expecting(double clipped) const {
    planner::PlanRequest request = possible_;
    request.swap.expect_clipped = clipped;
    return plan_of(request);
}

planner::Plan RankPlanner::plan_of(planner::PlanRequest request, const zero::Stage& stage,
                                   std::optional<int64_t> chunk_elements) const {
    request.budgets.device_bytes = possible_.budgets.device_bytes;
    request.swap.chunk_elements = chunk_elements ? chunk_elements : possible_.swap.chunk_elements;
    zero::Partition partition = partition_;
    partition.stage = stage;
    return planner::make_plan(in_groups(std::move(request), stage),
                              zero::layers_of_stage(decoder_.layers(), stage), decoder_.numerics(),
                              needs_, machine_, partition);
}

planner::Plan RankPlanner::plan_of(const planner::PlanRequest& request) const {
    return plan_of(request, partition_.stage, request.swap.chunk_elements);
}

}  // namespace ferry::train
