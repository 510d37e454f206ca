// Ranks that exchange momentum keep more state than others (zero/feedback.h). MomentumIo begins,
// restores, reads and hashes it, outside of any schedule.
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
#include "train/kernels/step_state.h"
#include "train/step/momentum_schedule.h"
#include "zero/feedback.h"

namespace ferry::train {

// Whether ranks have exchanged momentum after so many updates of it: codes then have left errors.
bool has_errors(const planner::Plan& plan, const MomentumSchedule& momentum,
                int64_t moment_updates);

// Its calls block, and all ranks make the same ones. Nothing else moves state meanwhile.
class MomentumIo {
public:
    // `arena`: the plan's host arena, with a buffer for what is on NVMe.
    MomentumIo(const planner::Plan& plan, swap::Store& store, comm::Communicator& ranks,
               Executor& executor, std::span<std::byte> arena);

    // Gives every rank all moments, from the ranks that own them. `off`: codes have left errors by
    // now, and they are kept. Otherwise errors begin as zeros.
    void begin(StateIo& state, bool off);
    // Gives elements of one of a checkpoint's arrays, from `first` on. Padding is left as it is.
    using Fill = std::function<void(const model::Layer&, const StateArray& array, int64_t first,
                                    std::span<std::byte> out)>;
    void restore(const Fill& fill);
    // Computes the weights of a local step again, from the state that all ranks share and from what
    // this rank has moved alone since.
    void restore_weights(StateIo& state, const ScalarsByKind& scalars);
    // Reads the error arrays of a tensor that trains, all ranks', run after run.
    void read_errors(int64_t layer, const model::Tensor& tensor, const ArraySink& sink);
    // Adds this rank's errors to a hash. It goes by leaves of shards, so that neither chunk size
    // nor placement changes it.
    uint64_t hash(uint64_t before);
    // What begin() has sent.
    const CollectiveReport& sent() const { return sent_; }
    void count_anew() { sent_ = {.collective = sent_.collective}; }

private:
    // A turn, named by the chunk of it that this rank owns.
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
    // A chunk's feedback in host memory. From NVMe it is read into the buffer first.
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
