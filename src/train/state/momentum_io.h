// What ranks keep where momentum is exchanged (zero/feedback.h), outside of any schedule: how it
// begins, how a checkpoint has it, its hash.
#pragma once

#include <cstdint>
#include <functional>
#include <span>

#include "comm/comm.h"
#include "ferry/executor.h"
#include "ferry/train.h"
#include "planner/planner.h"
#include "shared_values.h"
#include "state_arrays.h"
#include "state_io.h"
#include "swap/store.h"
#include "train/step_state.h"
#include "zero/feedback.h"

namespace ferry::train {

// Blocking; all ranks make the same calls. Nothing else moves state meanwhile.
class MomentumIo {
public:
    // `arena`: the plan's host arena, with a buffer for what is on NVMe.
    MomentumIo(const planner::Plan& plan, swap::Store& store, comm::Communicator& ranks,
               Executor& executor, std::span<std::byte> arena);

    // Of the moments that the owners have, which all get. `off`: some code was; or else none was.
    void begin(StateIo& state, bool off);
    // As a checkpoint has it. Elements from `first` on of one of its arrays; padding stays as it
    // is.
    using Fill = std::function<void(const model::Layer&, const StateArray& array, int64_t first,
                                    std::span<std::byte> out)>;
    void restore(const Fill& fill);
    // The weights of a local step, of the state that all have and what this rank moved alone.
    void restore_weights(StateIo& state, const ScalarsByKind& scalars);
    // All ranks' error_arrays of a tensor that trains, run after run.
    void read_errors(int64_t layer, const model::Tensor& tensor, const ArraySink& sink);
    // Of this rank's errors, leaf by leaf of its shards, so that no chunk size or placement shows.
    uint64_t hash(uint64_t before);
    // What begin() has sent.
    const CollectiveReport& sent() const { return sent_; }
    void count_anew() { sent_ = {.collective = sent_.collective}; }

private:
    // Of a turn, by the chunk that this rank owns of it.
    struct Turn {
        const planner::Chunk& chunk;
        const model::Layer& layer;
        const model::Segment& segment;
        int64_t within = 0;  // where its runs begin in every rank's shard
    };
    template <class Body>
    void each_turn(const Body& body);
    Turn turn_of(const planner::Chunk& chunk) const;
    zero::Feedback feedback_in(const planner::Chunk& chunk, std::span<std::byte> memory) const;
    // In host memory, or in the buffer, where it is read to.
    zero::Feedback brought(const planner::Chunk& chunk);
    template <class Body>
    void write(const planner::Chunk& chunk, const Body& body);
    void set_momentum(const Turn& turn, StateIo& state, float* momentum) const;
    void gather(const planner::Chunk& chunk, float* momentum);

    const planner::Plan& plan_;
    swap::Store& store_;
    comm::Communicator& ranks_;
    Executor& executor_;
    std::span<std::byte> staging_{};        // empty: nothing is on NVMe
    const planner::Chunk* held_ = nullptr;  // what the buffer has
    CollectiveReport sent_{.collective = "gather moments"};
};

}  // namespace ferry::train
