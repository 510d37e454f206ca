// How a run writes a checkpoint (Inside::save), and how large it becomes.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/steps.h"
#include "ferry/config.h"
#include "model/model.h"
#include "planner/planner.h"

namespace ferry::train {

// The first rank has the directory; it is null on the others.
struct Saving {
    checkpoint::Steps* directory = nullptr;
    std::optional<double> held_back_loss{};  // the loss of these weights, where it was evaluated
    // Called by the thread that writes: the last time when all is published.
    std::function<void(int64_t bytes, int64_t of)> progress{};
    // Called by the thread that trains. `started`: parts are read and written from here on.
    // `begun`: what the last step left under way is finished. `waited`: so many seconds more were
    // waited.
    std::function<void()> started{};
    std::function<void()> begun{};
    std::function<void(double seconds)> waited{};
    std::string program{};  // the version that writes it
    // Whether ranks have exchanged momentum: what its codes were off by is state
    // (error_arrays).
    bool errors = false;
    int64_t shard_bytes = 16LL << 30;  // the most that the files of one number hold together
};

// Of all its files but the manifest. `layers`: the whole model's, of which a plan may have a stage.
int64_t checkpoint_bytes(const planner::Plan& plan, const std::vector<model::Layer>& layers,
                         const Saving& saving);
int64_t checkpoint_files(const planner::Plan& plan, const std::vector<model::Layer>& layers,
                         const Saving& saving);
// Whether checkpoints are due before the end of the run.
bool saves_on_the_way(const Config& config);
// Whether a rank reads no more than what it has. Threads of theirs then send that to the first
// rank. Where ranks share tensors or layers, or exchange momentum, all gather it while training
// waits.
bool reads_own_part(const planner::Plan& plan);
int64_t own_checkpoint_bytes(const planner::Plan& plan);  // of that part, without files' headers
// Whether all that this rank reads of the state lies in host memory. It stays as it is until the
// next step but one, whose schedule has the next updates: so it is read while the next step is
// taken, by as many threads.
bool reads_meanwhile(const planner::Plan& plan);
constexpr int kMeanwhileThreads = 4;
// Whether the updates that finish a step can hand the state over, so that storage is not read for a
// checkpoint (passing_state.h). Some of it lies on NVMe then, none on the device; frozen
// weights lie in host memory, and the updates go in a checkpoint's order.
bool passes_by(const planner::Plan& plan);
// The steps that the program evaluates behind, and those whose checkpoint is known before them: by
// the clock or by a signal it is not.
bool evaluates_behind(const Config& config, int64_t step);
bool saves_behind(const Config& config, int64_t step);
// Whether the program evaluates or takes a hash behind this step and before its checkpoint, which
// finishes the updates: nothing is handed over then.
bool drains_before_checkpoint(const Config& config, int64_t step);
// Of these bytes, what a rank reads from storage first.
int64_t stored_checkpoint_bytes(const planner::Plan& plan);

}  // namespace ferry::train
