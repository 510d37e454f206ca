// How a run saves a checkpoint while it goes on.
#include <algorithm>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <span>

#include "base/log.h"
#include "engine_impl.h"
#include "outcome.h"
#include "train/inside.h"
#include "train/kernels/step_kernels.h"
#include "train/saving/background_save.h"
#include "train/saving/save.h"
#include "train/state/passing_state.h"
#include "train/state/saving.h"
#include "train/state/state_io.h"

namespace ferry::train {

void Engine::Run::begin_save(const Saving& saving) {
    FERRY_CHECK(!checkpoint_.save, "a checkpoint is on its way");
    guarded([&] {
        Saving whole = saving;
        if (!whole.progress && setup_.progress) whole.progress = told_progress();
        if (begin_passing(whole)) return;
        drain();
        if (saving.started) saving.started();
        if (saving.begun) saving.begun();
        const bool gathers = setup_.ranks && !saves_beside();
        const bool may = !gathers && !checkpoint_room_.empty() && reads_meanwhile(plan());
        Team* const copiers = may ? copiers_or_none() : nullptr;
        Team& team = copiers ? *copiers : stack_->teams().all();
        state_->begin_arrays(team);
        const ReadArrays read = gathers ? reader() : own_reader();
        whole.errors = has_errors(now_.moment_updates);
        if (gathers && setup_.world.rank != 0)
            return read_checkpoint(
                plan(), setup_.layers, whole.errors, read,
                [](std::span<const std::span<const std::byte>>) {}, [] { return true; });
        checkpoint_.save = std::make_unique<BackgroundSave>(
            plan(), setup_.layers, unwritten(saving), whole, checkpoint_room_, team,
            steps_->checkpoint_rows, nullptr, joiner());
        checkpoint_.waited = saving.waited;
        try {
            if (!copiers || !checkpoint_.save->begin_reading(read))
                checkpoint_.save->read(read, gathers);
        } catch (const std::exception& error) {
            drop_save(error.what());
            throw;
        }
    });
}

std::optional<Error> Engine::Run::end_save() {
    if (!checkpoint_.save) return std::nullopt;
    guarded([this] { await_reading(); });
    auto failed = checkpoint_.save->end();
    checkpoint_.save.reset();
    return failed;
}

// The other ranks hear of it first: their threads wait for this rank's part.
void Engine::Run::drop_save(const char* why) noexcept {
    if (setup_.ranks) setup_.context->abandon(why);
    checkpoint_.save->stop();
    checkpoint_.save.reset();
}

// Where all ranks end by an error that is not the checkpoint's: it is written all the same, as
// one rank's is.
void Engine::Run::finish_save_of_ranks() {
    if (!setup_.ranks || !checkpoint_.save) return;
    if (const auto failed = checkpoint_.save->end()) log_warn(failed->what());
}

// Whether the updates that are still to come are those of all chunks.
bool Engine::Run::updates_all() const {
    return replayed_.previous == Previous::not_speculative ||
           replayed_.previous == Previous::rolled_back;
}

// Whether updates can hand over all that this rank has of a checkpoint. Of ranks whose updates
// wait for room each would wait for the others'.
bool Engine::Run::can_pass() const {
    if (setup_.executor.simulated() || !passes_by(plan())) return false;
    return !setup_.ranks ||
           (saves_beside() && std::ssize(checkpoint_room_) >= own_checkpoint_bytes(plan()));
}

// A checkpoint of state that lies in storage, all or some of it: the updates that finish its
// step hand it over, so that nothing is read for it. False: it cannot be had so.
bool Engine::Run::begin_passing(const Saving& saving) {
    if (!updates_all() || !can_pass()) return false;
    Team* const copiers = copiers_or_none();
    if (!copiers) return false;
    const auto passing = std::make_shared<PassingState>(plan());
    checkpoint_.save = std::make_unique<BackgroundSave>(plan(), setup_.layers, unwritten(saving),
                                                        saving, checkpoint_room_, *copiers,
                                                        steps_->checkpoint_rows, passing, joiner());
    state_->begin_arrays(*copiers, passing.get());
    try {
        if (!checkpoint_.save->begin_reading(own_reader())) {  // not of ranks, which throw
            checkpoint_.save->stop();
            checkpoint_.save.reset();
            return false;
        }
        if (saving.started) saving.started();
        kernels().tell_of_updates(passing);
        finish_last_step();
    } catch (const std::exception& error) {
        drop_save(error.what());
        throw;
    }
    kernels().tell_of_updates(nullptr);
    passing->end();
    checkpoint_.waited = saving.waited;
    if (saving.begun) saving.begun();
    if (checkpoint_.waited) checkpoint_.waited(passing->held_back_seconds());
    return true;
}

// Of a checkpoint, to the runtime's program.
std::function<void(int64_t, int64_t)> Engine::Run::told_progress() {
    return [this, told = Nanos{}, last = int64_t{-1}](int64_t bytes, int64_t of) mutable {
        constexpr Nanos kBetween = 100'000'000;
        const Nanos now = setup_.executor.now();
        if (bytes == last || (bytes < of && now - told < kBetween)) return;
        told = now;
        last = bytes;
        setup_.progress("checkpoint", bytes, of);
    };
}

Unwritten Engine::Run::unwritten(const Saving& saving) const {
    Unwritten made{.description = setup_.description};
    note_run(run_state(), made.manifest);
    checkpoint::Manifest& manifest = made.manifest;
    const int64_t sequences = setup_.config.batch.micro_batches * setup_.config.batch.micro_batch;
    manifest.steps = setup_.config.steps;
    manifest.sequences = now_.step * sequences;
    manifest.tokens = manifest.sequences * setup_.config.batch.sequence;
    manifest.ferry = saving.program;
    manifest.model = setup_.config.model.path;
    manifest.training = setup_.checkpoint_identity;
    manifest.numerics = numerics_.text;
    manifest.numerics_hash = numerics_.hash;
    manifest.ranks = setup_.world.ranks;
    // Behind a local step each rank evaluated weights of its own, and none of them is saved.
    const bool alone = now_.moment_updates > 0 &&
                       steps_->judge.exchanged_after(now_.moment_updates - 1) == Exchanged::nothing;
    if (saving.held_back_loss && !alone) manifest.held_back = {now_.step, *saving.held_back_loss};
    return made;
}

// Until all of the state is read for a checkpoint that is on its way.
void Engine::Run::await_reading() {
    if (!checkpoint_.save || !checkpoint_.save->reads()) return;
    const Nanos start = setup_.executor.now();
    checkpoint_.save->end_reading();
    if (checkpoint_.waited)
        checkpoint_.waited(static_cast<double>(setup_.executor.now() - start) * 1e-9);
}

// Whether a checkpoint follows this step and gets its state from the updates: all of them then
// come behind it. An evaluation or a hash between the two finishes the updates first.
bool Engine::Run::hands_over() const {
    return !setup_.config.checkpoint.dir.empty() && saves_behind(setup_.config, now_.step) &&
           !drains_before_checkpoint(setup_.config, now_.step) && can_pass();
}

// Null: there are no threads for it to be had.
Team* Engine::Run::copiers_or_none() {
    try {
        if (!checkpoint_.copiers)
            checkpoint_.copiers.emplace(
                std::min(kMeanwhileThreads, stack_->teams().all().threads()));
        return &*checkpoint_.copiers;
    } catch (const Error&) {
        return nullptr;
    }
}

}  // namespace ferry::train
