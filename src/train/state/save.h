// A run as a checkpoint, and back: docs/checkpoints.md.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/manifest.h"
#include "checkpoint/saved.h"
#include "data/tokens.h"
#include "durable.h"
#include "ferry/config.h"
#include "ferry/team.h"
#include "ferry/train.h"
#include "model/model.h"
#include "planner/planner.h"
#include "saving.h"
#include "state_arrays.h"
#include "state_io.h"

namespace ferry::train {

// All that decides the run's numbers but for what docs/numerics.md lets depend on ranks and device,
// a line each: a checkpoint of the same text is of the same run.
std::string checkpoint_identity_of(const Config& config, const model::Shape& shape,
                                   const TokenFileInfo& tokens);

// Copies a run's state to a manifest, and back.
void note_run(const RunState& state, checkpoint::Manifest& manifest);
RunState run_of(const checkpoint::Manifest& manifest);

// ---------------------------------------------------------------- writing

// Gives a tensor's arrays (state_arrays) to a sink, run after run. All ranks alike.
using ReadArrays =
    std::function<void(int64_t layer, const model::Tensor& tensor, const ArraySink& sink)>;

struct Unwritten {
    checkpoint::Manifest manifest{};  // but for the shards
    std::string description{};        // the model's config.json
};
// Writes the checkpoint of the manifest's step, durably. Whatever was there before is as it was
// where io is thrown, which also says how many bytes have no room. Throws what `read` throws.
void write_checkpoint(const planner::Plan& plan, Unwritten unwritten, const Saving& saving,
                      const ReadArrays& read);
// Reads all of it, in the order in which it is written: what every rank but the first does.
// `next` is called behind each tensor; false: no more is wanted.
void read_checkpoint(const planner::Plan& plan, const ReadArrays& read, const ArraySink& sink,
                     const std::function<bool()>& next);

// ---------------------------------------------------------------- reading

// The checkpoint that a run goes on from.
class SavedRun {
public:
    // Opens it. Throws usage and io (checkpoint/saved.h); beside io it names the newest checkpoint
    // that is whole.
    explicit SavedRun(std::string path);

    const std::string& path() const { return path_; }
    const checkpoint::Manifest& manifest() const { return saved_->manifest(); }
    std::string text() const;  // equal for equal checkpoints
    // Throws usage, naming what differs, where it is of another run.
    void require(const std::string& identity, int64_t steps) const;
    // Throws usage where an array of these layers is missing or of another kind.
    void require(const planner::Plan& plan) const;
    // Reads part `part` of `parts` of it, whole; throws io as above.
    void prove(Team& team, int part, int parts, StartUp& start_up) const;
    // Padding's moments are as in a run that begins.
    StateIo::Contents contents(const planner::Plan& plan,
                               const StateIo::FirstMoment& first_moment) const;

private:
    template <class Work>
    void naming_another(const Work& work) const;
    void fill(const model::Layer& layer, const StateArray& array, int64_t first,
              std::span<std::byte> out) const;

    std::string path_;
    std::unique_ptr<checkpoint::Saved> saved_;
};

}  // namespace ferry::train
