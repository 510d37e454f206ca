// ZeRO: how the ranks of a run share what a layer needs. Every segment of a layer's flat buffer is
// cut into equal shards, one a rank, each a multiple of 4,096 elements. The stage says who keeps
// what besides (docs/decisions/0017). Beside that arithmetic stand the two exchanges of a step:
// weights that all gather, and gradients that each rank cuts and their owners add.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "comm/comm.h"
#include "ferry/dtype.h"
#include "model/model.h"
#include "zero/codec.h"

namespace ferry::zero {

// What a rank keeps only its shard of. It keeps the rest whole. A gradient is kept beside the
// state, where it is used.
struct Sharding {
    bool state = false, weights = false;
};
// Stage 0: nothing; 1 and 2: state and gradients; 3: weights too.
constexpr Sharding sharding_of(int64_t stage) {
    return {.state = stage >= 1, .weights = stage >= 3};
}

// What ranks exchange in a step: gradients during backward, momentum after the outcome, or nothing
// at a local step (zero/feedback.h).
enum class Exchanged : uint8_t { gradients, momentum, nothing };

// What travels as codes, and as which.
struct Codecs {
    Codec gradients{}, weights{};
    Codec momentum{};  // of 1-bit and 0/1 Adam, in place of gradients
    // 0/1 Adam: between two exchanges each rank also makes updates alone.
    bool local_steps = false;
};

// Elements of a layer's flat buffer.
struct Run {
    int64_t first = 0, count = 0;
};

// Layers [first, end) that micro-batches go through one after the other on one rank.
struct VirtualStage {
    int64_t first = 0, end = 0;
    bool trains_below = false;  // something in the layers before
};

// Which of a model's layers a rank has, where its depth is cut among ranks. The plan of such a rank
// has the layers of other stages too, but they are empty.
struct Stage {
    int index = 0, count = 1;
    // Layers [first, end); a single stage has all of them. Where a stage has several virtual
    // stages, layers of other stages lie between.
    int64_t first = 0, end = 0;
    bool trains_below = false;  // something in the layers before
    // The head multiplies by the embedding's table: the first stage updates it, and the last one
    // has its weights.
    bool tied = false;
    // Backward leaves the gradients of matrices and biases for later. They are computed where a
    // stage would wait for others.
    bool splits_backward = false;
    // Its virtual stages where it has several. The output of the last stage's then goes on to the
    // first stage (zero/stage_order.h).
    std::vector<VirtualStage> several{};
    // All groups of micro-batches go through one virtual stage before the next one.
    bool round_robin = false;

    bool all() const { return count == 1; }
    bool is_first() const { return index == 0; }
    bool is_last() const { return index == count - 1; }
    // Computes with it as embedding, block or head.
    bool has(int64_t layer) const {
        const auto in = [layer](const auto& of) { return of.first <= layer && layer < of.end; };
        return all() || (in(*this) && (several.empty() || std::ranges::any_of(several, in)));
    }
    int64_t virtual_stages() const { return std::max<int64_t>(std::ssize(several), 1); }
    VirtualStage virtual_stage(int64_t which) const {
        return several.empty() ? VirtualStage{first, end, trains_below}
                               : several.at(static_cast<size_t>(which));
    }
    // Whether something trains in layers of others before the virtual stage that this layer is in
    // or behind.
    bool trains_before(int64_t layer) const {
        return trains_below || std::ranges::any_of(several, [layer](const VirtualStage& of) {
                   return of.first <= layer && of.trains_below;
               });
    }
    bool copies_table() const { return !all() && tied && is_last(); }
    bool gives_table() const { return !all() && tied && is_first(); }
    // The most groups of micro-batches that are between their forward and their backward: in each
    // virtual stage, and in the one that has most.
    std::vector<int64_t> under_way_of_each(int64_t groups) const;
    int64_t under_way(int64_t groups) const;
    // The same by layer; none in those of others.
    std::vector<int64_t> under_way_by_layer(int64_t groups, int64_t layers) const;
    // The most groups whose backward has left gradients of weights for later. The further down a
    // stage is, the more stages wait for the results of its backward. Nobody waits for the first
    // stage's.
    int64_t deferred(int64_t groups) const {
        return splits_backward ? std::min<int64_t>(index, groups) : 0;
    }
};

// The ranks that share a host, where they exchange among themselves first. They are neighbours, and
// every host has as many. Between hosts a rank then exchanges only with the ranks that have its
// position in the other hosts.
struct Hosts {
    int each = 1;  // ranks of a host; 1: none of this
    // Its ranks together keep a copy of the weights that they have gathered of a layer, each a
    // part.
    bool second_shards = false;
};

// One rank's view of the cut. Where several ranks share tensors, `ranks` are those that have the
// same slices: they share what these slices need.
struct Partition {
    int rank = 0, ranks = 1;
    Sharding sharding{};
    Codecs codecs{};            // none where a rank is alone
    int slice = 0, slices = 1;  // of the tensors
    Stage stage{};              // of the layers
    Hosts hosts{};

    bool alone() const { return ranks == 1; }
    int of_run() const { return ranks * slices * stage.count; }  // ranks
    // Whether the head of these layers, or of the stage that has it, multiplies by the embedding's
    // table, and this rank takes part in that.
    bool ties(const std::vector<model::Layer>& layers) const {
        return stage.all() ? layers.back().find(model::Role::head_table) == nullptr : stage.tied;
    }
    bool decides_alone() const { return of_run() == 1; }
    // Whether this rank counts what lies in a segment. Of the ranks that hold it one does.
    bool counts(const model::Segment& segment) const { return slice % segment.holders == 0; }
    // Segments are padded for it: model::layers_of(..., ranks).
    int64_t shard_elements(const model::Segment& segment) const { return segment.count / ranks; }
    Run shard(const model::Segment& segment, int owner) const {
        const int64_t count = shard_elements(segment);
        return {segment.offset + owner * count, count};
    }
    // The run of elements whose weights this rank keeps.
    Run weights(const model::Segment& segment) const {
        return sharding.weights ? shard(segment, rank) : Run{segment.offset, segment.count};
    }
    // The elements of a layer's weights that this rank keeps. They lie together, segment after
    // segment; the second function says where an element stands among them.
    int64_t weight_elements(const model::Layer& layer) const {
        return sharding.weights ? layer.elements / ranks : layer.elements;
    }
    int64_t weight_position(const model::Segment& segment, int64_t element) const {
        if (!sharding.weights) return element;
        return segment.offset / ranks + element - shard(segment, rank).first;
    }
    // Bytes of one rank's part of a chunk's gradient, as it travels.
    int64_t part_bytes(int64_t elements, DType wire) const {
        return codecs.gradients.on() ? codecs.gradients.bytes(elements) : elements * size_of(wire);
    }
    int host_count() const { return ranks / hosts.each; }
    // Whether coded gradients are added inside each host first, and coded once more.
    bool two_levels() const { return hosts.each > 1 && codecs.gradients.on(); }
    // Where the part for another rank stands in the order in which a turn's parts leave. With two
    // levels, the parts for ranks of the same position in their hosts lie together.
    int part_for(int other) const {
        return two_levels() ? other % hosts.each * host_count() + other / hosts.each : other;
    }
    // Parts that the owner of a shard adds.
    int summed_parts() const { return two_levels() ? host_count() : ranks; }
    bool keeps_second_shards() const { return sharding.weights && hosts.second_shards; }
    // Whether an update of a layer is followed by an all-gather that every rank keeps.
    bool shares_updates() const { return ranks > 1 && sharding.state && !sharding.weights; }
};

// The partition of a rank among several; one alone shards nothing.
Partition partition_of(int64_t stage, int rank, int ranks, const Codecs& codecs = {},
                       const model::Slicing& slicing = {}, const Stage& layers = {},
                       const Hosts& hosts = {});

// A model's layers as a stage of it has them: those of the others are empty.
std::vector<model::Layer> layers_of_stage(const std::vector<model::Layer>& whole,
                                          const Stage& stage);

// The segment that an element lies in.
const model::Segment& segment_of(const model::Layer& layer, int64_t element);

// Bytes of a layer's weights as codes, of all ranks' shards. They lie segment after segment, and in
// each of them rank after rank.
int64_t coded_bytes(const Codec& codec, const model::Layer& layer, int ranks);

// Bytes of one rank's shard of a layer's weights, as all gather it.
int64_t shard_bytes(const Partition& partition, const model::Layer& layer, DType type);
// Bytes that reach this rank from the others.
int64_t gathered_bytes(const Partition& partition, const model::Layer& layer, DType type);
// The same of a gather of second shards, from the ranks of its host.
int64_t gathered_in_host_bytes(const Partition& partition, const model::Layer& layer, DType type);
constexpr int64_t exchanged_bytes(const Partition& partition, int64_t part_bytes) {
    return (partition.ranks - 1) * part_bytes;
}
// Of an exchange in two levels, in the host and then across hosts.
inline int64_t exchanged_in_host_bytes(const Partition& partition, int64_t part_bytes) {
    return part_bytes * (partition.hosts.each - 1) * partition.host_count();
}
inline int64_t exchanged_across_bytes(const Partition& partition, int64_t part_bytes) {
    return (partition.host_count() - 1) * part_bytes;
}

// A run of bytes of a layer's weights, or of their codes, as they are gathered.
struct ByteRun {
    int64_t first = 0, bytes = 0;
};
// The parts that this rank keeps until its host's ranks gather them again. Of each segment it keeps
// the shards of as many ranks as there are hosts. They are runs of the whole layer, or of its
// codes.
std::vector<ByteRun> second_shards(const Partition& partition, const model::Layer& layer,
                                   DType type);

// Enqueues the all-gather that makes a layer's weights whole in `whole`, on the device. Where
// weights are sharded it gathers all segments, else those that train, whose shards the ranks have
// updated. `shards` are this rank's, one behind the other. Null: they stand at their place in
// `whole`.
void gather_weights(comm::Communicator& ranks, const Partition& partition,
                    const model::Layer& layer, DType type, const std::byte* shards,
                    std::byte* whole, comm::Topic topic);
// The same of codes, of which this rank's are at their place in `codes` (coded_bytes()).
void gather_codes(comm::Communicator& ranks, const Partition& partition, const model::Layer& layer,
                  std::byte* codes, comm::Topic topic);
// The same of second shards, which stand at their place in `all`, the whole layer or its codes.
// `host`: the ranks of this host.
void gather_second_shards(comm::Communicator& host, const Partition& partition,
                          const model::Layer& layer, DType type, std::byte* all, comm::Topic topic);

}  // namespace ferry::zero
