// A checkpoint as the state of a run that goes on from it.
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
    // The same of the errors of momentum's codes, which exist from this update on. Another number
    // of ranks has others.
    void require_errors(const planner::Plan& plan, int64_t first) const;
    // Where it can only be proved whole, reads part `part` of `parts` of it; throws io as above.
    void prove(Team& team, int part, int parts, StartUp& start_up) const;
    // Errors of momentum's codes, and the moments that are read beside them, are taken part by
    // part in an order of their own: the files that hold them are proved whole before, in parts as
    // above. Then elements from `first` on of one of these arrays.
    void prove_errors(const planner::Plan& plan, Team& team, int part, int parts,
                      StartUp& start_up) const;
    void read_proved(const model::Layer& layer, const StateArray& array, int64_t first,
                     std::span<std::byte> out) const;
    // Padding's moments are as in a run that begins. Every byte is proved before it is given, and
    // also that of arrays that are not wanted themselves, each by one rank. The team and this must
    // outlive it.
    StateIo::Contents contents(const planner::Plan& plan, const StateIo::FirstMoment& first_moment,
                               Team& team, int64_t memory);

private:
    template <class Work>
    void naming_another(const Work& work) const;
    void require(const model::Tensor& tensor, const StateArray& array) const;
    void want(const planner::Plan& plan, const StateIo::Part& part);
    // Calls body(array, first byte of it, where it goes to) for each tensor's part of `out`.
    template <class Body>
    void each_part(const model::Layer& layer, const StateArray& array, int64_t first,
                   std::span<std::byte> out, const Body& body) const;

    std::string path_;
    std::unique_ptr<checkpoint::Saved> saved_;
    std::unique_ptr<checkpoint::TensorsAhead> ahead_{};
};

}  // namespace ferry::train
