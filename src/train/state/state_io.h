// Whole-state passes outside of any schedule: first contents, the hash, reading a tensor back.
#pragma once

#include <functional>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "ferry/optim.h"
#include "ferry/team.h"
#include "model/model.h"
#include "passing_state.h"
#include "planner/planner.h"
#include "shared_values.h"
#include "state_arrays.h"
#include "swap/store.h"
#include "train/kernels/state_span.h"
#include "train/stack/start_up.h"

namespace ferry::train {

class StateIo {
public:
    // Memory for one chunk's state, and one chunk's weights.
    struct Staging {
        std::span<std::byte> state, weight;
    };
    // With several of `staging`, one is filled while the others are on their way.
    StateIo(const planner::Plan& plan, swap::Store& store, Team& team, std::vector<Staging> staging)
        : plan_(plan), store_(store), team_(team), staging_(std::move(staging)) {}
    // The plan's buffers of a chunk in its host arena.
    static std::vector<Staging> staging_of(const planner::Plan& plan, std::span<std::byte> arena);

    int64_t bytes() const;  // weights and state together
    // fp32 values of elements [first, first + out.size()) of a layer; called by any thread.
    using Fill = std::function<void(const model::Layer&, int64_t first, std::span<float> out)>;
    // The first moment's start value, and the map of its codes; the second starts as zero.
    struct FirstMoment {
        float value = 0;
        optim::Map map = optim::Map::with_sign;
    };
    static FirstMoment first_moment_of(const optim::Hyper& hyper);
    // A run of a chunk's elements.
    struct ChunkRun {
        const planner::Chunk* chunk = nullptr;
        int64_t at = 0, count = 0;
    };
    // The state's first contents: the master, or a frozen weight, and the moments. Without
    // `moments` the first moment has the same value everywhere and the second is zero. What
    // `moments` writes is in the type that they are kept in.
    struct Contents {
        Fill master{};
        FirstMoment first_moment{};
        // Elements from `first` on of one of the arrays of moments.
        std::function<void(const model::Layer&, const StateArray& array, int64_t first,
                           std::span<std::byte> out)>
            moments{};
        // For whoever reads ahead. `begin` gets all parts in the order in which they are filled.
        // `next` is called before each of them is filled.
        std::function<void(std::span<const ChunkRun>)> begin{};
        std::function<void()> next{};
    };
    // Who hears how initialise() gets on.
    struct Watch {
        std::function<void(std::span<std::byte>)> before_filled;  // gets that part of host memory
        std::function<void()> copied;  // once: the last copy to the device is under way
    };
    // Gives every chunk its state and its weights in the compute type, at their homes. Returns the
    // hash of the frozen weights.
    uint64_t initialise(const Contents& contents, const Watch& watch, StartUp& start_up);
    // The same where the state is stored already. It is read back and checked, and compute weights
    // are made from it; `fill` gives frozen ones. Throws io where it is not what was written.
    // `proved` is called when all of it is checked, before a frozen weight is written. Where it
    // returns false none is written, and there is no hash.
    std::optional<uint64_t> restore(const Fill& fill, const std::function<bool()>& proved);
    // After restore(), on all ranks: makes the weights that a rank keeps of the others' shards,
    // from their owners' masters. `share` is share_values() of a layer.
    using Share = std::function<void(int64_t layer, const zero::Run& run, const Source& mine,
                                     const Sink& sink)>;
    void restore_replicas(const Share& share);
    // The hash of this rank's shards. It goes by leaves of 4,096 elements, so that chunk size and
    // placement do not change it. It is of the master in fp32, however that is kept.
    uint64_t hash();
    // fp32 values of elements [first, first + count) of a layer: the master's, or the compute
    // weights' where the chunk is frozen.
    void read(int64_t layer, int64_t first, int64_t count, const Sink& sink);
    // The same for all that a checkpoint keeps (state_arrays), of this rank's shards. A pass begins
    // with begin_arrays(), and nothing else is called until its end. So a chunk in storage that
    // holds several tensors is read once. `team` does the work, by default this object's own. With
    // `passing` the state is taken as it passes, and storage is not read.
    void begin_arrays() { begin_arrays(team_); }
    void begin_arrays(Team& team, PassingState* passing = nullptr) {
        held_ = nullptr;
        arrays_team_ = &team;
        passing_ = passing;
    }
    void read_arrays(int64_t layer, int64_t first, int64_t count, const ArraySink& sink);
    // Writes the weight of a chunk that trains anew. `write` gets its state, and where to put the
    // weight.
    void rewrite_weight(const planner::Chunk& chunk,
                        const std::function<void(const optim::Span&)>& write);
    // Reads the gradients that wait for their update; zeros where the chunk is frozen.
    void read_gradient(int64_t layer, int64_t first, int64_t count, const Sink& sink);

private:
    int64_t bytes_of(const planner::Chunk& chunk) const;
    // A chunk's bytes: where they lie in host memory, or else in staging memory.
    Staging place_of(const planner::Chunk& chunk, const Staging& staging);
    // The same after they are there.
    Staging brought(const planner::Chunk& chunk, bool state, bool weight);
    // The same of one whose arrays are read, in a pass over all of them.
    Staging held(const planner::Chunk& chunk);
    // Weights and state, all of it.
    bool lies_in_host(const planner::Chunk& chunk) const;
    bool lies_on(swap::Tier tier, const planner::Chunk& chunk) const;  // any of it
    // The order in which chunks get their first contents.
    std::vector<size_t> in_turns() const;
    // Those of the two that do not lie there already; how many.
    int64_t begin_put(const planner::Chunk& chunk, const Staging& from);
    // Calls body(first element, elements) for parts of a run, on the team's threads.
    template <class Body>
    void in_parts(int64_t first, int64_t count, const Body& body) const {
        in_parts(team_, first, count, body);
    }
    template <class Body>
    static void in_parts(Team& team, int64_t first, int64_t count, const Body& body);
    // What initialise() fills at a time, in its order.
    std::vector<ChunkRun> parts_of(std::span<const size_t> turns) const;
    // Elements [at, at + count) of a chunk.
    void fill_part(const planner::Chunk& chunk, const Staging& to, int64_t at, int64_t count,
                   const Contents& contents) const;
    void read_moments(const planner::Chunk& chunk, const Staging& to, int64_t at, int64_t count,
                      const Contents& contents) const;
    // The compute weights of such masters.
    void cast(std::span<const float> master, std::byte* weights) const;
    // Elements from `first` on of a layer, as far as they are replicas: each chunk is stored with
    // its last.
    void take_replicas(int64_t layer, int64_t first, std::span<const float> master);
    // Gives elements [at, at + count) of a fetched chunk to the sink.
    void give_arrays(const planner::Chunk& chunk, const Staging& from, int64_t at, int64_t count,
                     const ArraySink& sink);
    void load_master(const Staging& from, int64_t at, std::span<float> p) const;
    static void fill_moments(void* array, float* scales, MomentType type, int64_t at, int64_t count,
                             const FirstMoment& moment);
    // Gives the sink what load(chunk) returns of each chunk that overlaps the range.
    template <class Load>
    void gather(int64_t layer, int64_t first, int64_t count, const Sink& sink, const Load& load);

    const planner::Plan& plan_;
    swap::Store& store_;
    Team& team_;
    const std::vector<Staging> staging_;
    const planner::Chunk* held_ = nullptr;  // in a pass over all arrays
    Staging held_place_{};                  // where it lies
    Team* arrays_team_ = nullptr;           // of such a pass
    PassingState* passing_ = nullptr;       // that it takes from; null: all lies where it is kept
    std::vector<float> master_{};           // of the elements that such a pass gives
    std::vector<std::byte> cast_{};         // and their weights
};

}  // namespace ferry::train
