#include "passing_state.h"

#include <algorithm>

#include "ferry/error.h"
#include "saving.h"
#include "train/stack/seconds_of.h"

namespace ferry::train {

using planner::Chunk;
using swap::Tier;

bool evaluates_behind(const Config& config, int64_t step) {
    return config.evaluate.every > 0 && step % config.evaluate.every == 0;
}

bool saves_on_the_way(const Config& config) {
    return !config.checkpoint.dir.empty() && !config.checkpoint.every.never();
}

bool saves_behind(const Config& config, int64_t step) {
    const int64_t every = config.checkpoint.every.steps;
    return every > 0 && step % every == 0;
}

bool drains_before_checkpoint(const Config& config, int64_t step) {
    return config.hash_every == HashEvery::step || evaluates_behind(config, step);
}

bool passes_by(const planner::Plan& plan) {
    if (!reads_own_part(plan)) return false;
    const auto home = [&](swap::ObjectId object) { return plan.objects[object].home; };
    const bool all = std::ranges::all_of(plan.chunks, [&](const Chunk& chunk) {
        if (chunk.replica) return true;  // its owner's is read
        return chunk.trainable ? home(chunk.state) != Tier::device
                               : home(chunk.weight) == Tier::host;
    });
    const bool any = std::ranges::any_of(plan.chunks, [&](const Chunk& chunk) {
        return chunk.trainable && home(chunk.state) == Tier::nvme;
    });
    // Both go through the layers in their order, and through a layer's elements.
    return all && any &&
           std::ranges::is_sorted(plan.layer_plans, {}, &planner::LayerPlan::first_chunk) &&
           std::ranges::all_of(plan.layers, [](const model::Layer& layer) {
               return std::ranges::is_sorted(layer.tensors, {}, &model::Tensor::offset);
           });
}

size_t PassingState::index_of(const Chunk& chunk) const {
    return static_cast<size_t>(&chunk - plan_.chunks.data());
}

// Its bytes are where they are until the next update but one.
bool PassingState::stays(const Chunk& chunk) const {
    const auto in_host = [&](swap::ObjectId object) {
        return plan_.objects[object].home == Tier::host;
    };
    return in_host(chunk.state) && (!plan_.state.split || in_host(chunk.weight));
}

void PassingState::updated(const Chunk& chunk, const UpdatedBytes& place) noexcept {
    const size_t index = index_of(chunk);
    std::unique_lock lock(mutex_);
    places_[index] = place;
    ready_ = index + 1;
    changed_.notify_all();
    if (stays(chunk)) return;
    held_back_ +=
        seconds_of([&] { changed_.wait(lock, [&] { return closed_ || taken_ > index; }); });
}

double PassingState::held_back_seconds() const {
    const std::lock_guard lock(mutex_);
    return held_back_;
}

void PassingState::end() noexcept {
    const std::lock_guard lock(mutex_);
    ready_ = places_.size();
    changed_.notify_all();
}

UpdatedChunks::UpdatedBytes PassingState::take(const Chunk& chunk) {
    const size_t index = index_of(chunk);
    std::unique_lock lock(mutex_);
    FERRY_CHECK(index >= taken_, "a chunk that has passed");
    taken_ = index;
    changed_.notify_all();
    changed_.wait(lock, [&] { return closed_ || ready_ > index; });
    if (closed_) throw Closed();
    return places_[index];
}

void PassingState::close() noexcept {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    changed_.notify_all();
}

}  // namespace ferry::train
