#include <algorithm>

#include "zero/zero.h"

namespace ferry::zero {
namespace {

bool travels(const Partition& partition, const model::Segment& segment) {
    return partition.sharding.weights || segment.trainable;
}

}  // namespace

Partition partition_of(int64_t stage, int rank, int ranks, const Codecs& codecs,
                       const model::Slicing& slicing, const Stage& layers, const Hosts& hosts) {
    FERRY_CHECK(rank >= 0 && rank < ranks);
    Partition partition{.rank = rank,
                        .ranks = ranks,
                        .slice = slicing.rank,
                        .slices = slicing.ranks,
                        .stage = layers};
    if (ranks == 1) return partition;
    FERRY_CHECK(stage == 3 || !codecs.weights.on(), "no rank gathers weights to use them");
    partition.sharding = sharding_of(stage);
    partition.codecs = codecs;
    if (hosts.each == 1 || hosts.each >= ranks) return partition;
    FERRY_CHECK(ranks % hosts.each == 0, "every host has as many ranks");
    partition.hosts = hosts;
    return partition;
}

std::vector<model::Layer> layers_of_stage(const std::vector<model::Layer>& whole,
                                          const Stage& stage) {
    std::vector<model::Layer> found = whole;
    if (stage.all()) return found;
    for (int64_t l = 0; l < std::ssize(found); ++l) {
        model::Layer& layer = found[static_cast<size_t>(l)];
        if (!stage.has(l) && !(l == 0 && stage.copies_table()))
            layer = {.kind = layer.kind, .index = layer.index};
    }
    return found;
}

const model::Segment& segment_of(const model::Layer& layer, int64_t element) {
    const auto behind = std::ranges::find_if(layer.segments, [element](const model::Segment& s) {
        return element < s.offset + s.count;
    });
    FERRY_CHECK(behind != layer.segments.end(), "no element of this layer");
    return *behind;
}

int64_t coded_bytes(const Codec& codec, const model::Layer& layer, int ranks) {
    int64_t bytes = 0;
    for (const model::Segment& segment : layer.segments)
        bytes += ranks * codec.bytes(segment.count / ranks);
    return bytes;
}

int64_t shard_bytes(const Partition& partition, const model::Layer& layer, DType type) {
    const Codec& codec = partition.codecs.weights;
    int64_t bytes = 0;
    for (const model::Segment& segment : layer.segments) {
        if (!travels(partition, segment)) continue;
        const int64_t shard = partition.shard_elements(segment);
        bytes += codec.on() ? codec.bytes(shard) : shard * size_of(type);
    }
    return bytes;
}

int64_t gathered_bytes(const Partition& partition, const model::Layer& layer, DType type) {
    return exchanged_bytes(partition, shard_bytes(partition, layer, type));
}

namespace {

// One segment of the layer, or of its codes, and this rank's second shard of it.
struct SecondShardOf {
    ByteRun segment{}, mine{};
};
std::vector<SecondShardOf> second_shards_by_segment(const Partition& partition,
                                                    const model::Layer& layer, DType type) {
    const Codec& codec = partition.codecs.weights;
    const int place = partition.rank % partition.hosts.each;
    std::vector<SecondShardOf> found;
    int64_t first = 0;
    for (const model::Segment& segment : layer.segments) {
        const int64_t shard = partition.shard_elements(segment);
        const int64_t bytes =
            partition.host_count() * (codec.on() ? codec.bytes(shard) : shard * size_of(type));
        if (!codec.on()) first = segment.offset * size_of(type);
        found.push_back({.segment = {first, partition.hosts.each * bytes},
                         .mine = {first + place * bytes, bytes}});
        first += partition.hosts.each * bytes;
    }
    return found;
}

}  // namespace

std::vector<ByteRun> second_shards(const Partition& partition, const model::Layer& layer,
                                   DType type) {
    std::vector<ByteRun> found;
    for (const SecondShardOf& one : second_shards_by_segment(partition, layer, type))
        found.push_back(one.mine);
    return found;
}

int64_t gathered_in_host_bytes(const Partition& partition, const model::Layer& layer, DType type) {
    int64_t bytes = 0;
    for (const ByteRun& mine : second_shards(partition, layer, type))
        bytes += (partition.hosts.each - 1) * mine.bytes;
    return bytes;
}

void gather_second_shards(comm::Communicator& host, const Partition& partition,
                          const model::Layer& layer, DType type, std::byte* all,
                          comm::Topic topic) {
    std::array<comm::Gather, comm::Communicator::kTransfers> transfers;
    size_t count = 0;
    for (const SecondShardOf& one : second_shards_by_segment(partition, layer, type)) {
        FERRY_CHECK(count < transfers.size(), "a layer has few segments");
        transfers[count++] = {
            .mine = all + one.mine.first, .all = all + one.segment.first, .bytes = one.mine.bytes};
    }
    host.all_gather(std::span(transfers).first(count), topic);
}

void gather_weights(comm::Communicator& ranks, const Partition& partition,
                    const model::Layer& layer, DType type, const std::byte* shards,
                    std::byte* whole, comm::Topic topic) {
    std::array<comm::Gather, comm::Communicator::kTransfers> transfers;
    size_t count = 0;
    for (const model::Segment& segment : layer.segments) {
        if (!travels(partition, segment)) continue;
        const Run mine = partition.shard(segment, partition.rank);
        FERRY_CHECK(count < transfers.size(), "a layer has few segments");
        transfers[count++] = {
            .mine = shards ? shards + partition.weight_position(segment, mine.first) * size_of(type)
                           : whole + mine.first * size_of(type),
            .all = whole + segment.offset * size_of(type),
            .bytes = mine.count * size_of(type)};
    }
    ranks.all_gather(std::span(transfers).first(count), topic);
}

void gather_codes(comm::Communicator& ranks, const Partition& partition, const model::Layer& layer,
                  std::byte* codes, comm::Topic topic) {
    std::array<comm::Gather, comm::Communicator::kTransfers> transfers;
    size_t count = 0;
    for (const model::Segment& segment : layer.segments) {
        FERRY_CHECK(count < transfers.size(), "a layer has few segments");
        const int64_t bytes = partition.codecs.weights.bytes(partition.shard_elements(segment));
        transfers[count++] = {.mine = codes + partition.rank * bytes, .all = codes, .bytes = bytes};
        codes += partition.ranks * bytes;
    }
    ranks.all_gather(std::span(transfers).first(count), topic);
}

}  // namespace ferry::zero
