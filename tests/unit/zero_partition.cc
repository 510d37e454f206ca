#include <gtest/gtest.h>

#include <vector>

#include "tests/support/simulated_ranks.h"
#include "zero/zero.h"

namespace ferry::zero {
namespace {

// Sizes that no number of ranks divides; something frozen.
std::vector<model::Layer> layers_for(int ranks) {
    const model::Shape shape{.hidden = 72,
                             .layers = 2,
                             .heads = 3,
                             .kv_heads = 1,
                             .head_dim = 24,
                             .intermediate = 100,
                             .vocab = 131};
    const std::vector<std::string> frozen{"*.down_proj.weight"};
    return model::layers_of(shape, frozen, false, ranks);
}

TEST(Partition, CutsEverySegmentIntoEqualShardsOfWholeLeaves) {
    for (const int ranks : {1, 2, 3, 4, 7}) {
        for (const model::Layer& layer : layers_for(ranks)) {
            int64_t end = 0;
            for (const model::Segment& segment : layer.segments) {
                for (int owner = 0; owner < ranks; ++owner) {
                    const zero::Run shard = partition_of(3, 0, ranks).shard(segment, owner);
                    EXPECT_EQ(shard.first, end);
                    EXPECT_EQ(shard.count, segment.count / ranks);
                    EXPECT_EQ(shard.count % 4096, 0);
                    end = shard.first + shard.count;
                }
                EXPECT_EQ(end, segment.offset + segment.count);
            }
            EXPECT_EQ(end, layer.elements);
        }
    }
}

TEST(Partition, TensorsKeepTheirOrderWhateverTheNumberOfRanks) {
    const auto one = layers_for(1), five = layers_for(5);
    for (size_t l = 0; l < one.size(); ++l) {
        ASSERT_EQ(one[l].tensors.size(), five[l].tensors.size());
        for (size_t t = 0; t < one[l].tensors.size(); ++t) {
            EXPECT_EQ(one[l].tensors[t].name, five[l].tensors[t].name);
            EXPECT_EQ(one[l].tensors[t].count, five[l].tensors[t].count);
        }
    }
}

TEST(Partition, StagesShardMoreAndMore) {
    EXPECT_FALSE(sharding_of(0).state || sharding_of(0).weights);
    for (const int64_t stage : {1, 2})
        EXPECT_TRUE(sharding_of(stage).state && !sharding_of(stage).weights);
    EXPECT_TRUE(sharding_of(3).state && sharding_of(3).weights);
    EXPECT_FALSE(partition_of(3, 0, 1).sharding.state);  // one rank shards nothing
    EXPECT_TRUE(partition_of(2, 1, 2).shares_updates());
    EXPECT_FALSE(partition_of(3, 1, 2).shares_updates());
    EXPECT_FALSE(partition_of(0, 1, 2).shares_updates());
    EXPECT_FALSE(partition_of(2, 0, 1).shares_updates());
}

// Shards lie together without a gap, in the order of the segments.
TEST(Partition, PositionsOfAShardFillItsBuffer) {
    constexpr int kRanks = 3;
    for (const model::Layer& layer : layers_for(kRanks)) {
        const Partition partition = partition_of(3, 2, kRanks);
        int64_t next = 0;
        for (const model::Segment& segment : layer.segments) {
            const zero::Run mine = partition.weights(segment);
            EXPECT_EQ(partition.weight_position(segment, mine.first), next);
            next += mine.count;
        }
        EXPECT_EQ(next, partition.weight_elements(layer));
        const Partition whole = partition_of(2, 2, kRanks);
        EXPECT_EQ(whole.weight_elements(layer), layer.elements);
        EXPECT_EQ(whole.weight_position(layer.segments.back(), layer.elements - 1),
                  layer.elements - 1);
    }
}

TEST(Partition, FindsTheSegmentOfAnElement) {
    const model::Layer block = layers_for(2)[1];
    ASSERT_EQ(block.segments.size(), 3u);
    for (const model::Segment& segment : block.segments) {
        EXPECT_EQ(&segment_of(block, segment.offset), &segment);
        EXPECT_EQ(&segment_of(block, segment.offset + segment.count - 1), &segment);
    }
}

class Gathering : public testing::TestWithParam<std::tuple<int, int64_t, bool>> {};

// Each rank fills its own shards; then all have all, but for frozen ones where nobody shards them.
TEST_P(Gathering, MakesALayerWholeOnEveryRank) {
    const auto [ranks, stage, apart] = GetParam();
    const model::Layer block = layers_for(ranks)[1];
    const auto value = [](int64_t element) { return static_cast<uint16_t>(element * 7 + 1); };
    comm::run_ranks({.size = ranks}, [&](comm::Communicator& others, Executor& executor) {
        const int rank = others.rank();
        const Partition partition = partition_of(stage, rank, ranks);
        std::vector<uint16_t> whole(static_cast<size_t>(block.elements));
        std::vector<uint16_t> shards(static_cast<size_t>(partition.weight_elements(block)));
        for (const model::Segment& segment : block.segments) {
            const zero::Run mine = partition.shard(segment, rank);
            for (int64_t e = mine.first; e < mine.first + mine.count; ++e) {
                shards[static_cast<size_t>(partition.weight_position(segment, e))] = value(e);
                if (!apart) whole[static_cast<size_t>(e)] = value(e);
            }
        }
        gather_weights(others, partition, block, DType::bf16,
                       apart ? reinterpret_cast<const std::byte*>(shards.data()) : nullptr,
                       reinterpret_cast<std::byte*>(whole.data()), {.of = "weights"});
        std::atomic<uint64_t> done = 0;
        others.signal(done);
        while (done == 0) executor.wait(kForever);
        for (const model::Segment& segment : block.segments) {
            if (!segment.trainable && stage < 3) continue;
            for (int64_t e = segment.offset; e < segment.offset + segment.count; ++e)
                ASSERT_EQ(whole[static_cast<size_t>(e)], value(e)) << "rank " << rank;
        }
    });
}

INSTANTIATE_TEST_SUITE_P(ranks, Gathering,
                         testing::Combine(testing::Values(2, 3, 4), testing::Values(1, 3),
                                          testing::Bool()));

TEST(GatheredBytes, AreThoseOfTheOthers) {
    const model::Layer block = layers_for(4)[1];
    EXPECT_EQ(gathered_bytes(partition_of(3, 0, 4), block, DType::bf16),
              block.elements * 2 * 3 / 4);
    EXPECT_EQ(gathered_bytes(partition_of(1, 0, 4), block, DType::f32),
              block.trainable_elements * 4 * 3 / 4);
    EXPECT_EQ(exchanged_bytes(partition_of(1, 0, 4), 100), 300);
}

constexpr Codecs kCodecs{.gradients = {CodecKind::int4, 64}, .weights = {CodecKind::int8, 256}};

// Six ranks on hosts of two.
TEST(Hosts, OrderPartsByWhereTheirOwnersStand) {
    const Partition two = partition_of(3, 3, 6, kCodecs, {}, {}, {.each = 2});
    ASSERT_TRUE(two.two_levels());
    EXPECT_EQ(two.host_count(), 3);
    EXPECT_EQ(two.summed_parts(), 3);
    for (const auto& [rank, part] :
         {std::pair{0, 0}, std::pair{2, 1}, std::pair{4, 2}, std::pair{1, 3}, std::pair{5, 5}})
        EXPECT_EQ(two.part_for(rank), part);
    EXPECT_EQ(exchanged_in_host_bytes(two, 100), 300);
    EXPECT_EQ(exchanged_across_bytes(two, 100), 200);
    // Uncoded gradients, and one host: every rank exchanges with every other.
    for (const Partition& one :
         {partition_of(3, 3, 6, {}, {}, {}, {.each = 2}),
          partition_of(3, 3, 6, kCodecs, {}, {}, {.each = 6}), partition_of(3, 3, 6, kCodecs)}) {
        EXPECT_FALSE(one.two_levels());
        EXPECT_EQ(one.part_for(4), 4);
        EXPECT_EQ(one.summed_parts(), 6);
    }
}

// What all have gathered is cut among a host's ranks, and they make it whole again.
TEST(SecondShards, OfAHostAreTheWholeLayer) {
    constexpr int kRanks = 4, kEach = 2;
    for (const bool coded : {false, true}) {
        const Codecs codecs = coded ? kCodecs : Codecs{};
        const model::Layer block = layers_for(kRanks)[1];
        const int64_t bytes =
            coded ? coded_bytes(codecs.weights, block, kRanks) : block.elements * 2;
        comm::run_ranks({.size = kRanks}, [&](comm::Communicator& others, Executor& executor) {
            const Partition partition = partition_of(3, others.rank(), kRanks, codecs, {}, {},
                                                     {.each = kEach, .second_shards = true});
            ASSERT_TRUE(partition.keeps_second_shards());
            const auto host = others.group(comm::run_of(others.rank(), kEach));
            std::vector<std::byte> want(static_cast<size_t>(bytes)), got(want.size());
            for (size_t i = 0; i < want.size(); ++i) want[i] = static_cast<std::byte>(i * 7 + 1);
            int64_t kept = 0;
            for (const ByteRun& run : second_shards(partition, block, DType::bf16)) {
                std::copy_n(want.begin() + run.first, run.bytes, got.begin() + run.first);
                kept += run.bytes;
            }
            EXPECT_EQ(kept * kEach, bytes);
            EXPECT_EQ(gathered_in_host_bytes(partition, block, DType::bf16), bytes - kept);
            gather_second_shards(*host, partition, block, DType::bf16, got.data(),
                                 {.of = "weights"});
            std::atomic<uint64_t> done = 0;
            host->signal(done);
            while (done == 0) executor.wait(kForever);
            EXPECT_EQ(got, want) << "rank " << others.rank();
        });
    }
}

TEST(CodedBytes, AreThoseOfTheCodecs) {
    const model::Layer block = layers_for(4)[1];
    const int64_t all = block.elements + block.elements / 256 * 4;
    EXPECT_EQ(coded_bytes(kCodecs.weights, block, 4), all);
    EXPECT_EQ(gathered_bytes(partition_of(3, 0, 4, kCodecs), block, DType::bf16), all * 3 / 4);
    EXPECT_EQ(partition_of(3, 0, 4, kCodecs).part_bytes(8192, DType::f32), 4096 + 8192 / 64 * 4);
    EXPECT_EQ(partition_of(3, 0, 4).part_bytes(8192, DType::f32), 4 * 8192);
    EXPECT_EQ(partition_of(3, 0, 1, kCodecs).part_bytes(8192, DType::f32), 4 * 8192);  // alone
}

// Each rank puts its codes at their places; then all have all.
TEST(GatheringCodes, BringsThoseOfEveryRank) {
    for (const int ranks : {2, 3}) {
        const model::Layer block = layers_for(ranks)[1];
        comm::run_ranks({.size = ranks}, [&](comm::Communicator& others, Executor& executor) {
            const Partition partition = partition_of(3, others.rank(), ranks, kCodecs);
            const int64_t bytes = coded_bytes(kCodecs.weights, block, ranks);
            std::vector<std::byte> want(static_cast<size_t>(bytes)), codes(want.size());
            size_t at = 0;
            for (const model::Segment& segment : block.segments) {
                const int64_t part = kCodecs.weights.bytes(partition.shard_elements(segment));
                for (int64_t i = 0; i < ranks * part; ++i, ++at) {
                    want[at] = static_cast<std::byte>(at * 7 + 1);
                    if (i / part == others.rank()) codes[at] = want[at];
                }
            }
            ASSERT_EQ(at, want.size());
            gather_codes(others, partition, block, codes.data(), {.of = "weight codes"});
            std::atomic<uint64_t> done = 0;
            others.signal(done);
            while (done == 0) executor.wait(kForever);
            EXPECT_EQ(codes, want) << "rank " << others.rank();
        });
    }
}

}  // namespace
}  // namespace ferry::zero
