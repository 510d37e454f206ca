// The numerics that the configuration leaves open, and what they depend on.
#include <gtest/gtest.h>

#include "train/saving/save.h"
#include "train/setup/model_of.h"
#include "train/setup/numerics_record.h"

namespace ferry::train {
namespace {

Config config_of(DeviceKind device, int64_t sequence, int64_t micro_batch) {
    Config config;
    config.device = device;
    config.batch.sequence = sequence;
    config.batch.micro_batch = micro_batch;
    return config;
}

int64_t head_tile_of(const Config& config, int64_t vocab, int64_t intermediate) {
    return numerics_of(config, {.intermediate = intermediate, .vocab = vocab}).head_tile;
}

TEST(Numerics, head_tile_on_a_gpu_follows_from_the_vocabulary) {
    const Config config = config_of(DeviceKind::cuda, 1024, 1);
    EXPECT_EQ(head_tile_of(config, 100, 64), 4096);
    EXPECT_EQ(head_tile_of(config, 32'000, 8192), 4096);
    EXPECT_EQ(head_tile_of(config, 1 << 15, 64), 4096);
    EXPECT_EQ(head_tile_of(config, (1 << 15) + 1, 64), 2048);
    EXPECT_EQ(head_tile_of(config, 50'257, 6400), 2048);
    EXPECT_EQ(head_tile_of(config, 128'256, 8192), 1024);
    EXPECT_EQ(head_tile_of(config, 1'000'000, 8192), 1024);
}

// Shapes of Qwen2.5-0.5B, Qwen3-4B, Llama-3.2-1B and Llama-3-8B: the table is 27, 10, 21 and 7 % of
// the parameters.
TEST(Numerics, head_tile_on_a_gpu_is_larger_where_the_table_is_much_of_the_model) {
    const Config config = config_of(DeviceKind::cuda, 2048, 8);
    const model::Shape small{.hidden = 896,
                             .layers = 24,
                             .heads = 14,
                             .kv_heads = 2,
                             .head_dim = 64,
                             .intermediate = 4864,
                             .vocab = 151'936,
                             .tie_embeddings = true};
    EXPECT_EQ(numerics_of(config, small).head_tile, 2048);
    EXPECT_EQ(numerics_of(config_of(DeviceKind::cpu, 2048, 8), small).head_tile, 1024);
    const model::Shape large{.hidden = 2560,
                             .layers = 36,
                             .heads = 32,
                             .kv_heads = 8,
                             .head_dim = 128,
                             .intermediate = 9728,
                             .vocab = 151'936,
                             .tie_embeddings = true};
    EXPECT_EQ(numerics_of(config, large).head_tile, 2048);
    const model::Shape larger{.hidden = 4096,
                              .layers = 32,
                              .heads = 32,
                              .kv_heads = 8,
                              .head_dim = 128,
                              .intermediate = 14336,
                              .vocab = 128'256};
    EXPECT_EQ(numerics_of(config, larger).head_tile, 1024);
    const model::Shape between{.hidden = 2048,
                               .layers = 16,
                               .heads = 32,
                               .kv_heads = 8,
                               .head_dim = 64,
                               .intermediate = 8192,
                               .vocab = 128'256,
                               .tie_embeddings = true};
    EXPECT_EQ(numerics_of(config_of(DeviceKind::cuda, 1024, 1), between).head_tile, 2048);
}

TEST(Numerics, logits_may_be_as_many_as_the_activations_of_the_mlp) {
    Config config = config_of(DeviceKind::cuda, 4096, 8);
    EXPECT_EQ(head_tile_of(config, 128'256, 8192), 2048);
    config.numerics.mlp_tile = 4096;
    EXPECT_EQ(head_tile_of(config, 128'256, 8192), 1024);
    config.numerics.mlp_tile = 1 << 20;  // more tokens than there are
    EXPECT_EQ(head_tile_of(config, 128'256, 8192), 2048);
}

TEST(Numerics, a_long_micro_batch_goes_through_the_mlp_in_equal_tiles) {
    const auto tile_of = [](Config config) { return numerics_of(config, {}).mlp_tile; };
    for (const DeviceKind device : {DeviceKind::cpu, DeviceKind::cuda}) {
        EXPECT_EQ(tile_of(config_of(device, 16'384, 1)), 0);  // all of it
        EXPECT_EQ(tile_of(config_of(device, 2048, 8)), 0);
        EXPECT_EQ(tile_of(config_of(device, 16'385, 1)), 8320);  // two, of whole rows of a tile
        EXPECT_EQ(tile_of(config_of(device, 131'072, 1)), 16'384);
        EXPECT_EQ(tile_of(config_of(device, 100'000, 1)), 14'336);
        Config shared = config_of(device, 131'072, 1);
        shared.parallel.sequence = 8;  // a rank has 16,384 of them
        EXPECT_EQ(tile_of(shared), 0);
        shared.numerics.mlp_tile = 100;
        EXPECT_EQ(tile_of(shared), 100);
    }
}

// One tile is one, however large it was asked for: the numbers are the same, and so is the record.
TEST(Numerics, record_has_no_tile_that_cuts_nothing) {
    const model::Shape shape{.intermediate = 64, .vocab = 100};
    const auto record = [&](const Config& config) {
        return numerics_text(config, shape, "a machine", 1) +
               checkpoint_identity_of(config, shape, {});
    };
    for (const DeviceKind device : {DeviceKind::cpu, DeviceKind::cuda}) {
        const Config config = config_of(device, 512, 2);
        for (const int64_t tile : {1024, 5000}) {
            Config asked = config;
            asked.numerics.mlp_tile = tile;
            EXPECT_EQ(record(asked), record(config));
            asked.numerics.head_tile = tile;
            EXPECT_EQ(record(asked), record(config));
        }
        for (const int64_t tile : {1, 1023}) {
            Config asked = config;
            asked.numerics.mlp_tile = tile;
            EXPECT_NE(record(asked), record(config));
            asked = config;
            asked.numerics.head_tile = tile;
            EXPECT_NE(record(asked), record(config));
        }
    }
    // Where `auto` cuts, one tile is another order.
    const Config cut = config_of(DeviceKind::cpu, 32'768, 1);
    Config whole = cut, larger = cut;
    whole.numerics.mlp_tile = 32'768;
    larger.numerics.mlp_tile = 40'000;
    EXPECT_NE(record(whole), record(cut));
    EXPECT_EQ(record(whole), record(larger));
}

TEST(Numerics, head_tile_elsewhere_is_fixed_and_what_is_asked_for_holds) {
    EXPECT_EQ(head_tile_of(config_of(DeviceKind::cpu, 4096, 8), 32'000, 8192), 1024);
    for (DeviceKind device : {DeviceKind::cpu, DeviceKind::cuda}) {
        Config config = config_of(device, 4096, 8);
        config.numerics.head_tile = 50;
        EXPECT_EQ(head_tile_of(config, 32'000, 8192), 50);
    }
}

// A budget decides where bytes lie, never which numbers come out.
TEST(Numerics, no_budget_changes_the_head_tile) {
    Config config = config_of(DeviceKind::cuda, 4096, 8);
    config.budgets.device_bytes = 1 << 30;
    EXPECT_EQ(head_tile_of(config, 128'256, 8192), 2048);
}

// Ranks that share a sequence are one replica: it takes all of its micro-batches.
TEST(Numerics, record_has_the_micro_batches_of_a_replica) {
    const auto record = [](int64_t micro_batches, int parts, int ranks) {
        Config config = config_of(DeviceKind::cpu, 1024, 1);
        config.batch.micro_batches = micro_batches;
        config.parallel.sequence = parts;
        return numerics_text(config, {.intermediate = 64, .vocab = 100}, "a machine", ranks);
    };
    EXPECT_NE(record(2, 2, 2), record(3, 2, 2));
    EXPECT_NE(record(3, 2, 2).find("micro-batch 1 x 3;"), std::string::npos) << record(3, 2, 2);
    EXPECT_NE(record(6, 2, 4).find("micro-batch 1 x 3;"), std::string::npos) << record(6, 2, 4);
    EXPECT_NE(record(6, 1, 2).find("micro-batch 1 x 3;"), std::string::npos) << record(6, 1, 2);
}

// So are ranks that share tensors; how many is in the record.
TEST(Numerics, record_names_ranks_that_share_tensors) {
    Config config = config_of(DeviceKind::cpu, 1024, 1);
    config.batch.micro_batches = 6;
    config.parallel.tensor = 4;
    const std::string shared =
        numerics_text(config, {.intermediate = 64, .vocab = 100}, "a machine", 8);
    EXPECT_NE(shared.find("micro-batch 1 x 3;"), std::string::npos) << shared;
    EXPECT_NE(shared.find("; ranks 8, tensors, vocabulary and rows over 4;"), std::string::npos)
        << shared;
    config.parallel.tensor = 1;
    const std::string apart =
        numerics_text(config, {.intermediate = 64, .vocab = 100}, "a machine", 8);
    EXPECT_EQ(apart.find("tensors and"), std::string::npos) << apart;
}

// Where gradients are coded twice, how many combine theirs is in the record.
TEST(Numerics, record_names_the_hosts_that_combine_gradients) {
    Config config = config_of(DeviceKind::cpu, 1024, 1);
    config.batch.micro_batches = 8;
    config.zero.compress.gradients = CodecKind::int8;
    const auto record = [&](int ranks_per_host) {
        config.zero.ranks_per_host = ranks_per_host;
        return numerics_text(config, {.intermediate = 64, .vocab = 100}, "a machine", 8);
    };
    EXPECT_NE(record(2).find(", gradients int8 in blocks of 256 combined in 4 hosts of 2;"),
              std::string::npos)
        << record(2);
    EXPECT_NE(record(2), record(4));
    EXPECT_EQ(record(8), record(1));  // one host
    config.zero.compress.gradients = CodecKind::none;
    EXPECT_EQ(record(2), record(1));
}

// And a pipeline's stages, whose ranks share the micro-batches among those of a stage.
TEST(Numerics, record_names_the_stages_of_layers) {
    Config config = config_of(DeviceKind::cpu, 1024, 1);
    config.batch.micro_batches = 6;
    config.parallel.pipeline = 4;
    const std::string staged =
        numerics_text(config, {.intermediate = 64, .vocab = 100}, "a machine", 8);
    EXPECT_NE(staged.find("micro-batch 1 x 3;"), std::string::npos) << staged;
    EXPECT_NE(staged.find("; ranks 8, layers over 4;"), std::string::npos) << staged;
    config.parallel = {.tensor = 2, .pipeline = 2};
    const std::string mixed =
        numerics_text(config, {.intermediate = 64, .vocab = 100}, "a machine", 8);
    EXPECT_NE(mixed.find("micro-batch 1 x 3;"), std::string::npos) << mixed;
    EXPECT_NE(mixed.find("; ranks 8, layers over 2, tensors, vocabulary and rows over 2;"),
              std::string::npos)
        << mixed;
}

}  // namespace
}  // namespace ferry::train
