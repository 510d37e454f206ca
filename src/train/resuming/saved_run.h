// The checkpoint that a run resumes from.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "checkpoint/manifest.h"
#include "checkpoint/saved.h"
#include "checkpoint/tensors_ahead.h"
#include "ferry/team.h"
#include "model/model.h"
#include "planner/planner.h"
#include "train/stack/start_up.h"
#include "train/state/state_arrays.h"
#include "train/state/state_io.h"

namespace ferry::train {

// A run resumes in this order: it requires that the checkpoint is its own, proves its bytes, and
// reads its contents.
class SavedRun {
public:
    // Opens it. Throws usage and io (checkpoint/saved.h). An io error names the newest checkpoint
    // that is whole.
    explicit SavedRun(std::string path);

    const std::string& path() const { return path_; }
    const checkpoint::Manifest& manifest() const { return saved_->manifest(); }
    std::string text() const;  // equal for equal checkpoints
    // Throws usage where another run wrote it, and names what differs.
    void require(const std::string& identity, int64_t steps) const;
    // Throws usage where an array of the plan's layers is missing, or is of another kind.
    void require(const planner::Plan& plan) const;
    // The same for the errors of momentum's codes. They exist from update `first` on, and another
    // number of ranks has other ones.
    void require_errors(const planner::Plan& plan, int64_t first) const;
    // Proves a file that can only be proved as a whole, by reading part `part` of `parts` of it.
    // Throws io as above.
    void prove(Team& team, int part, int parts, StartUp& start_up) const;
    // The same for files with errors of momentum's codes, and with the moments that are read beside
    // them: those are read in an order of their own, so they are proved first.
    void prove_errors(const planner::Plan& plan, Team& team, int part, int parts,
                      StartUp& start_up) const;
    // Gives elements of such an array, from `first` on.
    void read_proved(const model::Layer& layer, const StateArray& array, int64_t first,
                     std::span<std::byte> out) const;
    // What to fill the state with. Every byte is proved before it is given. Arrays that this run
    // does not want are proved too, each by one rank. Padding has the moments of a run that begins.
    // The team and this must outlive what is returned.
    StateIo::Contents contents(const planner::Plan& plan, const StateIo::FirstMoment& first_moment,
                               Team& team, int64_t memory);

private:
    template <class Work>
    void naming_another(const Work& work) const;
    void require(const model::Tensor& tensor, const StateArray& array) const;
    void want(const planner::Plan& plan, const StateIo::ChunkRun& part);
    // Calls body(array, first byte of it, where it goes to) for each tensor's part of `out`.
    template <class Body>
    void each_part(const model::Layer& layer, const StateArray& array, int64_t first,
                   std::span<std::byte> out, const Body& body) const;

    std::string path_;
    std::unique_ptr<checkpoint::Saved> saved_;
    std::unique_ptr<checkpoint::TensorsAhead> ahead_{};
};

}  // namespace ferry::train
