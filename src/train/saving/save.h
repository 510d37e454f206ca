// A run as a checkpoint: docs/checkpoints.md. saved_run.h reads it back.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/manifest.h"
#include "data/tokens.h"
#include "durable.h"
#include "ferry/config.h"
#include "ferry/team.h"
#include "ferry/train.h"
#include "model/model.h"
#include "planner/planner.h"
#include "train/state/saving.h"
#include "train/state/state_arrays.h"

namespace ferry::train {

// All that decides the run's numbers but for what docs/numerics.md lets depend on ranks and device,
// a line each: a checkpoint of the same text is of the same run.
std::string checkpoint_identity_of(const Config& config, const model::Shape& shape,
                                   const TokenFileInfo& tokens);

// Copies a run's state to a manifest, and back.
void note_run(const RunState& state, checkpoint::Manifest& manifest);
RunState run_of(const checkpoint::Manifest& manifest);

// Gives a tensor's arrays (state_arrays, or error_arrays) to a sink, run after run. All ranks
// alike.
enum class Kept : uint8_t { state, errors };
using ReadArrays = std::function<void(int64_t layer, const model::Tensor& tensor, Kept what,
                                      const ArraySink& sink)>;

struct Unwritten {
    checkpoint::Manifest manifest{};  // but for the shards
    std::string description{};        // the model's config.json
};
// Writes the checkpoint of the manifest's step, durably; the team's threads copy and sum. Whatever
// was there before is as it was where io is thrown, which also says how many bytes have no room.
// Throws what `read` throws. `layers`: the whole model's, here as below.
void write_checkpoint(const planner::Plan& plan, const std::vector<model::Layer>& layers,
                      Unwritten unwritten, const Saving& saving, Team& team,
                      const ReadArrays& read);
// Reads all of it, in the order in which it is written: what every rank but the first does.
// `next` is called behind each tensor; false: no more is wanted. `errors`: as Saving has it.
void read_checkpoint(const planner::Plan& plan, const std::vector<model::Layer>& layers,
                     bool errors, const ReadArrays& read, const ArraySink& sink,
                     const std::function<bool()>& next);

}  // namespace ferry::train
