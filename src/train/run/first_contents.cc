#include "first_contents.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <optional>

#include "base/log.h"
#include "checkpoint/tensors_ahead.h"
#include "train/saving/save.h"
#include "train/stack/memory_left.h"
#include "train/state/shared_values.h"

namespace ferry::train {
namespace {

int64_t memory_to_read_ahead(const OpenState& open) {
    return std::min(checkpoint::TensorsAhead::kMemory,
                    memory_for_reading(open.stack.plan(), open.setup.share.budgets,
                                       open.stack.machine(), open.setup.device));
}

RunState begun_by(const FirstState& first, const Imported& imported, const LossScale& scale) {
    if (first.saved()) return run_of(first.saved()->manifest());
    if (first.imported()) return run_of(imported, first.imported()->has_moments(), scale);
    return {.loss_scale = scale.state()};
}

// What the checkpoint of this run has beside the state.
void restore_momentum(const OpenState& open, const FirstState& first, const RunState& run) {
    const MomentumSchedule& momentum = open.setup.momentum;
    if (has_errors(open.stack.plan(), momentum, run.moment_updates))
        open.momentum->restore(first.momentum());
    if (momentum.of(run.moment_updates) == Exchanged::nothing)
        open.momentum->restore_weights(open.state,
                                       open.judge.scalars({run.updates, run.moment_updates}, 1));
}

}  // namespace

RunState run_of(const Imported& imported, bool has_moments, const LossScale& scale) {
    RunState run{.step = imported.step,
                 .updates = imported.updates,
                 .moment_updates = has_moments ? imported.moment_updates : 0,
                 .loss_scale = scale.state()};
    if (scale.scales() && imported.loss_scale > 0)
        run.loss_scale = {.value = imported.loss_scale, .good = imported.good_steps};
    return run;
}

RunState fill_state(const OpenState& open, FirstState& first, const Imported& imported) {
    TierStack& stack = open.stack;
    RunState run = begun_by(first, imported, LossScale(open.setup.scales_loss()));
    const StateIo::Contents contents =
        first.contents(stack.plan(), StateIo::first_moment_of(open.setup.hyper),
                       stack.teams().all(), memory_to_read_ahead(open));
    run.frozen = open.state.initialise(
        contents,
        {.before_filled =
             [&](std::span<std::byte> part) { stack.pool().touch(part, stack.teams()); },
         .copied = [&] { stack.lock_homes(); }},
        stack.start_up());
    if (!first.saved()) return run;
    restore_momentum(open, first, run);
    if (open.setup.is_first_rank())
        log_info(fmt::format("resumed after step {} from {}", run.step, first.saved()->path()));
    return run;
}

RunState resume_state(const OpenState& open, const FirstState& first, const RunRecord& record) {
    TierStack& stack = open.stack;
    const RunSetup& setup = open.setup;
    stack.lock_homes();
    if (!stack.volume()) throw nothing_to_resume();
    const Prove prove = [&](const auto& may_write) {
        return open.state.restore(first.weights(), may_write);
    };
    const RunState run = setup.ranks
                             ? resume(stack.store(), record, prove, *setup.ranks, setup.executor)
                             : resume(stack.store(), record, prove);
    if (open.partition.shares_updates())
        open.state.restore_replicas(
            [&](int64_t layer, const zero::Run& of, const Source& mine, const Sink& sink) {
                share_values(*setup.ranks, setup.executor, open.partition,
                             stack.plan().layers[static_cast<size_t>(layer)], of, mine, sink);
            });
    log_info(resumed_text(run.step, stack.volume()->noted_step()));
    return run;
}

}  // namespace ferry::train
