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
    // The thread that writes calls this, the last time when all is published.
    std::function<void(int64_t bytes, int64_t of)> progress{};
    // The thread that trains calls these. `started`: parts are read and written from now on.
    // `begun`: what the last step left under way is finished. `waited`: it has waited so many
    // seconds more.
    std::function<void()> started{};
    std::function<void()> begun{};
    std::function<void(double seconds)> waited{};
    std::string program{};  // the version that writes it
    // Whether ranks have exchanged momentum: what its codes were off by is state
    // (error_arrays).
    bool errors = false;
    int64_t shard_bytes = 16LL << 30;  // the most that the files of one number hold together
};

// Bytes of a checkpoint's files without the manifest, and how many files there are. `layers` are
// the whole model's; a plan may have one stage of them.
int64_t checkpoint_bytes(const planner::Plan& plan, const std::vector<model::Layer>& layers,
                         const Saving& saving);
int64_t checkpoint_files(const planner::Plan& plan, const std::vector<model::Layer>& layers,
                         const Saving& saving);
// Whether checkpoints are due before the end of the run.
bool saves_on_the_way(const Config& config);
// Whether each rank reads only what it has. Threads of the ranks then send that to the first one.
// Where ranks share tensors or layers, or exchange momentum, they gather it while training waits.
bool reads_own_part(const planner::Plan& plan);
int64_t own_checkpoint_bytes(const planner::Plan& plan);  // of that part, without files' headers
// Whether all that this rank reads of the state lies in host memory. It does not change during the
// next step, as its updates are in the schedule after that. So kMeanwhileThreads read it while the
// next step is taken.
bool reads_meanwhile(const planner::Plan& plan);
constexpr int kMeanwhileThreads = 4;
// Whether the updates that finish a step can hand the state over, so that a checkpoint reads
// nothing from storage (passing_state.h). They can where some of it lies on NVMe and none on the
// device, frozen weights lie in host memory, and the updates go in a checkpoint's order.
bool passes_by(const planner::Plan& plan);
// Whether the program evaluates after this step, and whether it is known beforehand to save a
// checkpoint after it. By the clock or by a signal it is not known.
bool evaluates_behind(const Config& config, int64_t step);
bool saves_behind(const Config& config, int64_t step);
// Whether the program evaluates or takes a hash after this step and before its checkpoint. That
// finishes the updates, so nothing is handed over then.
bool drains_before_checkpoint(const Config& config, int64_t step);
// Those of the checkpoint's bytes that a rank first reads from storage.
int64_t stored_checkpoint_bytes(const planner::Plan& plan);

}  // namespace ferry::train
