#include "first_state.h"

#include <spdlog/fmt/fmt.h>

#include "base/log.h"
#include "ferry/error.h"
#include "train/rank_agreement.h"
#include "train/setup/loader_of.h"

namespace ferry::train {
namespace {

void refuse_restored(const Runtime& runtime, const Config& config) {
    const bool slices = config.parallel.tensor > 1;
    if (!slices || runtime.checkpoint.empty() || config.optimizer.moments != MomentType::int8)
        return;
    throw Error(
        Trouble::usage,
        {.what = "blocks of coded moments are of a slice, and a checkpoint has the whole tensor's",
         .where = runtime.checkpoint,
         .measured = fmt::format("moments int8, parallel.tensor {}", config.parallel.tensor),
         .remedy = "set parallel.tensor to 1"});
}

std::unique_ptr<SavedRun> open_saved(const FirstState::Of& of, const Runtime& runtime) {
    refuse_restored(runtime, of.config);
    if (runtime.checkpoint.empty()) return nullptr;
    auto saved = std::make_unique<SavedRun>(runtime.checkpoint);
    saved->require(of.identity, of.config.steps);
    return saved;
}

// Null where something else has the weights, or nothing.
std::unique_ptr<LoadedWeights> open_weights(const FirstState::Of& of, const Runtime& runtime) {
    check_vocabulary(of.config, of.described, of.tokens);
    if (!runtime.checkpoint.empty() || !runtime.imported.directory.empty()) return nullptr;
    return LoadedWeights::of(of.config.model, of.described.shape, of.layers);
}

std::unique_ptr<ImportedState> open_imported(const FirstState::Of& of, const Imported& imported) {
    if (imported.directory.empty()) return nullptr;
    FERRY_CHECK(of.ranks == 1, "state is imported by one rank");
    return std::make_unique<ImportedState>(imported.directory, of.described.shape, of.layers);
}

}  // namespace

FirstState::FirstState(const Of& of, const Runtime& runtime)
    : shape_(of.described.shape),
      seed_(of.config.seed),
      saved_(open_saved(of, runtime)),
      loaded_(open_weights(of, runtime)),
      imported_(open_imported(of, runtime.imported)) {}

std::string FirstState::text() const {
    return saved_ ? saved_->text() : first_weights(loaded_.get(), shape_);
}

void FirstState::prove(const Proving& by) const {
    const int rank = by.world.rank, ranks = by.world.ranks;
    if (saved_) {
        const bool errors = has_errors(by.plan, by.momentum, saved_->manifest().moment_updates);
        saved_->require(by.plan);
        if (errors)
            find_alike(by.ranks, by.executor,
                       [&] { saved_->require_errors(by.plan, by.momentum.first()); });
        saved_->prove(by.team, rank, ranks, by.start_up);
        if (errors) saved_->prove_errors(by.plan, by.team, rank, ranks, by.start_up);
        if (rank == 0 && saved_->manifest().numerics != by.numerics)
            log_info("the checkpoint was written under other numerics (" +
                     saved_->manifest().numerics +
                     "): from here on numbers may differ from those of that run");
    }
    if (imported_) {
        imported_->require(by.plan);
        imported_->prove(by.team, by.start_up);
    }
    if (loaded_) loaded_->prove(by.team, rank, ranks, by.start_up);
}

StateIo::Contents FirstState::contents(const planner::Plan& plan,
                                       const StateIo::FirstMoment& first_moment, Team& team,
                                       int64_t memory) {
    if (saved_) return saved_->contents(plan, first_moment, team, memory);
    if (imported_) return imported_->contents(first_moment);
    StateIo::Contents contents{.master = weights(), .first_moment = first_moment};
    if (!loaded_) return contents;
    contents.begin = [&plan, &team, memory,
                      loaded = loaded_.get()](std::span<const StateIo::ChunkRun> parts) {
        loaded->begin(plan, parts, team, memory);
    };
    contents.next = [loaded = loaded_.get()] { loaded->next(); };
    return contents;
}

StateIo::Fill FirstState::weights() const {
    return [loaded = loaded_.get(), &shape = shape_, seed = seed_](
               const model::Layer& layer, int64_t first, std::span<float> out) {
        if (loaded) return loaded->fill(layer, first, out);
        model::initialise(shape, layer, seed, first, out);
    };
}

MomentumIo::Fill FirstState::momentum() const {
    return [saved = saved_.get()](const model::Layer& layer, const StateArray& array, int64_t first,
                                  std::span<std::byte> out) {
        saved->read_proved(layer, array, first, out);
    };
}

void FirstState::log_rate(double seconds) const {
    if (loaded_) loaded_->log_rate(seconds);
}

}  // namespace ferry::train
