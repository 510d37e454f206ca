// Whole-state passes outside of any schedule: first contents, the hash, reading a tensor back.
#pragma once

#include <functional>
#include <span>
#include <vector>

#include "ferry/model.h"
#include "ferry/optim.h"
#include "ferry/planner.h"
#include "ferry/swap.h"
#include "ferry/topology.h"

namespace ferry::train {

// The arrays of a chunk's state at `in` and `out`, as far as the optimizer keeps them, in a span
// without gradient, weights and the chunk's place in the model.
optim::Span state_span(const planner::Plan& plan, int64_t count, const std::byte* in,
                       std::byte* out);

// Bytes of memory that an update of `count` elements reads and writes.
int64_t update_bytes(const planner::Plan& plan, int64_t count);

class StateIo {
public:
    // `state` and `weight` are staging memory: one chunk's state, and one chunk's weights.
    StateIo(const planner::Plan& plan, swap::Store& store, Team& team, std::span<std::byte> state,
            std::span<std::byte> weight)
        : plan_(plan), store_(store), team_(team), state_(state), weight_(weight) {}

    // fp32 values of elements [first, first + out.size()) of a layer; called by any thread.
    using Fill = std::function<void(const model::Layer&, int64_t first, std::span<float> out)>;
    // Master weights as `fill` says, the first moment everywhere at `moment` and the second at
    // zero, weights in the compute type, each chunk to its home. The hash of the frozen weights.
    uint64_t initialise(const Fill& fill, float moment);
    // The same where the state is stored already, and read back and checked here: compute weights
    // are made from it, frozen ones by `fill`. Throws io where it is not what was written.
    uint64_t restore(const Fill& fill);
    // Leaf by leaf of 4,096 elements, so that no chunk size or placement shows; of the master in
    // fp32, however it is kept. Of this rank's shards.
    uint64_t hash();
    // Takes values in order, in pieces.
    using Sink = std::function<void(std::span<const float>)>;
    // fp32 values of elements [first, first + count) of a layer: the master's, or the compute
    // weights' where the chunk is frozen.
    void read(int64_t layer, int64_t first, int64_t count, const Sink& sink);
    // The same of the gradients that wait for their update, zeros where the chunk is frozen.
    void read_gradient(int64_t layer, int64_t first, int64_t count, const Sink& sink);

private:
    std::span<std::byte> state_bytes(const planner::Chunk& chunk) const {
        return state_.first(static_cast<size_t>(plan_.state_bytes(chunk)));
    }
    std::span<std::byte> weight_bytes(const planner::Chunk& chunk) const {
        return weight_.first(static_cast<size_t>(chunk.count * size_of(plan_.compute)));
    }
    // Between fp32 and the staging memory, from element `at` of the chunk there on.
    void store_master(const planner::Chunk& chunk, int64_t at, std::span<const float> p);
    void fill_master(const planner::Chunk& chunk, const Fill& fill);
    void recast(const planner::Chunk& chunk);
    void load_master(int64_t at, std::span<float> p) const;
    void fill_moments(void* array, int64_t count, float value) const;
    // Gives the sink what load(chunk) returns of each chunk that overlaps the range.
    template <class Load>
    void gather(int64_t layer, int64_t first, int64_t count, const Sink& sink, const Load& load);

    const planner::Plan& plan_;
    swap::Store& store_;
    Team& team_;
    std::span<std::byte> state_, weight_;
};

}  // namespace ferry::train
