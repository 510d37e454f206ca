// How a run writes a checkpoint (Inside::save), and how large it becomes.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "checkpoint/steps.h"
#include "planner/planner.h"

namespace ferry::train {

// The first rank has the directory; it is null on the others.
struct Saving {
    checkpoint::Steps* directory = nullptr;
    std::optional<double> held_back_loss{};  // the loss of these weights, where it was evaluated
    // Called by the thread that writes: the last time when all is published.
    std::function<void(int64_t bytes, int64_t of)> progress{};
    // Called by the thread that trains: what the last step left under way is finished, and so many
    // seconds were waited after begin_save() had returned.
    std::function<void()> begun{};
    std::function<void(double seconds)> waited{};
    std::string program{};  // the version that writes it
    // Whether ranks have exchanged momentum: what its codes were off by is state
    // (error_arrays).
    bool errors = false;
    int64_t shard_bytes = 16LL << 30;  // the most that the files of one number hold together
};

// Of all its files but the manifest.
int64_t checkpoint_bytes(const planner::Plan& plan, const Saving& saving);
int64_t checkpoint_files(const planner::Plan& plan, const Saving& saving);
// Whether all that is read of the state lies in host memory of one rank. It stays as it is until
// the next step but one, whose schedule has the next updates: so it is read while the next step is
// taken, by as many threads.
bool reads_meanwhile(const planner::Plan& plan);
constexpr int kMeanwhileThreads = 4;
// Of these bytes, what a rank reads from storage first.
int64_t stored_checkpoint_bytes(const planner::Plan& plan);

}  // namespace ferry::train
