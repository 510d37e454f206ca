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
    FERRY_CHECK(!save_, "a checkpoint is on its way");
    guarded([&] {
        Saving whole = saving;
        if (!whole.progress && progress_) whole.progress = told_progress();
        if (begin_passing(whole)) return;
        drain();
        if (saving.started) saving.started();
        if (saving.begun) saving.begun();
        const bool gathers = ranks_ && !saves_beside();
        const bool may = !gathers && !checkpoint_room_.empty() && reads_meanwhile(plan_);
        Team* const copiers = may ? copiers_or_none() : nullptr;
        Team& team = copiers ? *copiers : stack_.teams().all();
        state_->begin_arrays(team);
        const ReadArrays read = gathers ? reader() : own_reader();
        whole.errors = has_errors(moment_updates_);
        if (gathers && world_.rank != 0)
            return read_checkpoint(
                plan_, layers_, whole.errors, read,
                [](std::span<const std::span<const std::byte>>) {}, [] { return true; });
        save_ = std::make_unique<BackgroundSave>(plan_, layers_, unwritten(saving), whole,
                                                 checkpoint_room_, team, rows_->checkpoint, nullptr,
                                                 joiner());
        waited_ = saving.waited;
        try {
            if (!copiers || !save_->begin_reading(read)) save_->read(read, gathers);
        } catch (const std::exception& error) {
            drop_save(error.what());
            throw;
        }
    });
}

std::optional<Error> Engine::Run::end_save() {
    if (!save_) return std::nullopt;
    guarded([this] { await_reading(); });
    auto failed = save_->end();
    save_.reset();
    return failed;
}

// The other ranks hear of it first: their threads wait for this rank's part.
void Engine::Run::drop_save(const char* why) noexcept {
    if (ranks_) context_->abandon(why);
    save_->stop();
    save_.reset();
}

// Where all ranks end by an error that is not the checkpoint's: it is written all the same, as
// one rank's is.
void Engine::Run::finish_save_of_ranks() {
    if (!ranks_ || !save_) return;
    if (const auto failed = save_->end()) log_warn(failed->what());
}

// Whether the updates that are still to come are those of all chunks.
bool Engine::Run::updates_all() const {
    return previous_ == Previous::not_speculative || previous_ == Previous::rolled_back;
}

// Whether updates can hand over all that this rank has of a checkpoint. Of ranks whose updates
// wait for room each would wait for the others'.
bool Engine::Run::can_pass() const {
    if (executor_.simulated() || !passes_by(plan_)) return false;
    return !ranks_ ||
           (saves_beside() && std::ssize(checkpoint_room_) >= own_checkpoint_bytes(plan_));
}

// A checkpoint of state that lies in storage, all or some of it: the updates that finish its
// step hand it over, so that nothing is read for it. False: it cannot be had so.
bool Engine::Run::begin_passing(const Saving& saving) {
    if (!updates_all() || !can_pass()) return false;
    Team* const copiers = copiers_or_none();
    if (!copiers) return false;
    const auto passing = std::make_shared<PassingState>(plan_);
    save_ = std::make_unique<BackgroundSave>(plan_, layers_, unwritten(saving), saving,
                                             checkpoint_room_, *copiers, rows_->checkpoint, passing,
                                             joiner());
    state_->begin_arrays(*copiers, passing.get());
    try {
        if (!save_->begin_reading(own_reader())) {  // not of ranks, which throw
            save_->stop();
            save_.reset();
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
    waited_ = saving.waited;
    if (saving.begun) saving.begun();
    if (waited_) waited_(passing->held_back_seconds());
    return true;
}

// Of a checkpoint, to the runtime's program.
std::function<void(int64_t, int64_t)> Engine::Run::told_progress() {
    return [this, told = Nanos{}, last = int64_t{-1}](int64_t bytes, int64_t of) mutable {
        constexpr Nanos kBetween = 100'000'000;
        const Nanos now = executor_.now();
        if (bytes == last || (bytes < of && now - told < kBetween)) return;
        told = now;
        last = bytes;
        progress_("checkpoint", bytes, of);
    };
}

Unwritten Engine::Run::unwritten(const Saving& saving) const {
    Unwritten made{.description = description_};
    note_run(run_state(), made.manifest);
    checkpoint::Manifest& manifest = made.manifest;
    const int64_t sequences = config_.batch.micro_batches * config_.batch.micro_batch;
    manifest.steps = config_.steps;
    manifest.sequences = step_ * sequences;
    manifest.tokens = manifest.sequences * config_.batch.sequence;
    manifest.ferry = saving.program;
    manifest.model = config_.model.path;
    manifest.training = checkpoint_identity_;
    manifest.numerics = numerics_record();
    manifest.numerics_hash = numerics_id();
    manifest.ranks = world_.ranks;
    // Behind a local step each rank evaluated weights of its own, and none of them is saved.
    const bool alone =
        moment_updates_ > 0 && judge_->exchanged_after(moment_updates_ - 1) == Exchanged::nothing;
    if (saving.held_back_loss && !alone) manifest.held_back = {step_, *saving.held_back_loss};
    return made;
}

// Until all of the state is read for a checkpoint that is on its way.
void Engine::Run::await_reading() {
    if (!save_ || !save_->reads()) return;
    const Nanos start = executor_.now();
    save_->end_reading();
    if (waited_) waited_(static_cast<double>(executor_.now() - start) * 1e-9);
}

// Whether a checkpoint follows this step and gets its state from the updates: all of them then
// come behind it. An evaluation or a hash between the two finishes the updates first.
bool Engine::Run::hands_over() const {
    return !config_.checkpoint.dir.empty() && saves_behind(config_, step_) &&
           !drains_before_checkpoint(config_, step_) && can_pass();
}

// Null: there are no threads for it to be had.
Team* Engine::Run::copiers_or_none() {
    try {
        if (!copiers_)
            copiers_.emplace(std::min(kMeanwhileThreads, stack_.teams().all().threads()));
        return &*copiers_;
    } catch (const Error&) {
        return nullptr;
    }
}

}  // namespace ferry::train
