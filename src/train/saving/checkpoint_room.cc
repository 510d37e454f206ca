#include "checkpoint_room.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>

#include "base/log.h"
#include "ferry/error.h"
#include "ferry/units.h"
#include "train/stack/memory_left.h"
#include "train/state/saving.h"

namespace ferry::train {

std::span<std::byte> reserve_checkpoint_room(const Config& config, const World& world,
                                             const BudgetConfig& budgets,
                                             const std::vector<model::Layer>& layers, bool own,
                                             TierStack& stack) {
    const CheckpointConfig& saved = config.checkpoint;
    if (!saves_on_the_way(config) || (!own && world.rank != 0)) return {};
    const planner::Plan& plan = stack.plan();
    const int64_t bytes = own ? own_checkpoint_bytes(plan)
                              : checkpoint_bytes(plan, layers, {.errors = plan.has_feedback()});
    const int64_t left = memory_beside(plan, budgets, stack.machine(), stack.device());
    const int64_t asked =
        saved.memory_bytes.value_or(left) / (own && saved.memory_bytes ? world.local_ranks : 1);
    const int64_t wanted = std::min(asked, bytes);
    if (wanted > left)
        throw Error(Trouble::does_not_fit,
                    {.what = "host memory for checkpoints on their way does not fit",
                     .where = "checkpoint.memory",
                     .measured = format_bytes(wanted),
                     .limit = format_bytes(left) + " beside the plan",
                     .remedy = "lower it, raise budgets.host, or set it to auto"});
    std::span<std::byte> room;
    try {
        room = stack.pool().reserve("checkpoint", wanted, 0, stack.teams());
    } catch (const Error&) {
        if (saved.memory_bytes) throw;
    }
    if (world.rank == 0 && std::ssize(room) < bytes)
        log_info(
            fmt::format("checkpoints of {}{}: host memory holds {} while it is written; "
                        "training waits until the rest is (checkpoint.memory)",
                        format_bytes(bytes), own ? " a rank" : "", format_bytes(std::ssize(room))));
    return room;
}

}  // namespace ferry::train
