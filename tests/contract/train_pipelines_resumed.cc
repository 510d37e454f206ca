// Pipelines of ranks: checkpoints that go on with other numbers of stages and ranks.
#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <filesystem>
#include <functional>
#include <map>

#include "checkpoint/saved.h"
#include "checkpoint/steps.h"
#include "tests/contract/train_pipelines_fixture.h"
#include "tests/support/quick.h"
#include "tests/support/run_ranks.h"
#include "tests/support/temporary_directory.h"
#include "tests/support/tiny_run.h"
#include "train/inside.h"
#include "train/state/saving.h"

namespace ferry::train {
namespace {

struct Kind {
    const char* name;
    std::function<void(Config&)> set;
};
const std::array kKinds{
    Kind{"TiedInFp32", [](Config& config) { config.model.tie_embeddings = true; }},
    Kind{"SplitMasterWithBf16Moments",
         [](Config& config) {
             config.precision = DType::bf16;
             config.optimizer.master = MasterFormat::split;
             config.optimizer.moments = MomentType::bf16;
         }},
    Kind{"TiedHalfWithFrozenLayers",
         [](Config& config) {
             config.precision = DType::f16;
             config.model.tie_embeddings = true;
             config.freeze = {"*layers.1.*", "*layers.2.*norm*"};
         }},
    Kind{"FrozenTable",
         [](Config& config) {
             config.precision = DType::bf16;
             config.model.tie_embeddings = true;
             config.freeze = {"*embed_tokens*"};
         }},
    Kind{"Int8Moments", [](Config& config) {
             config = with_coded_moments(config);
             config.precision = DType::bf16;
         }}};

class Resumed : public testing::TestWithParam<size_t> {
protected:
    void SetUp() override {
        if (comm::ranks_launched() > 0) GTEST_SKIP() << "for threads of one process";
    }

    Config config() const {
        Config config = tiny_config(data_);
        kKinds[GetParam()].set(config);
        config.model.layers = 4;
        config.batch = {.sequence = 8, .micro_batch = 1, .micro_batches = 4};
        config.clip_norm = 0;  // its norm would be added in another order
        config.zero.stage = 1;
        config.steps = 4;
        return config;
    }
    Config on_nvme() const {
        Config config = this->config();
        config.budgets.nvme = {{.path = storage_.path(), .size_bytes = 64 * kMiB}};
        config.swap.state_on_nvme = 1;
        config.io.direct = false;
        return config;
    }

    using Weights = std::map<std::string, std::vector<uint32_t>>;
    static Weights weights_of(Engine& engine) {
        Weights weights;
        const auto& layers = Inside(engine).layers();
        for (size_t l = 0; l < layers.size(); ++l)
            for (const model::Tensor& tensor : layers[l].tensors)
                Inside(engine).read_tensor(
                    static_cast<int64_t>(l), tensor, [&](std::span<const float> values) {
                        for (const float value : values)
                            weights[tensor.name].push_back(std::bit_cast<uint32_t>(value));
                    });
        return weights;
    }
    // Trains to the last step; saves behind each where there is a directory for it.
    static Weights train(const Config& config, const RankCut& cut, const std::string& from,
                         const std::string& directory) {
        Weights weights;
        on_ranks(config, cut, from, [&](Engine& engine, int rank) {
            std::optional<checkpoint::Steps> steps;
            if (rank == 0 && !directory.empty()) steps.emplace(directory);
            while (engine.last_step() < config.steps) {
                engine.step();
                if (directory.empty()) continue;
                const auto failed = Inside(engine).save({.directory = steps ? &*steps : nullptr});
                ASSERT_FALSE(failed) << failed->what();
            }
            Weights mine = weights_of(engine);
            if (rank == 0) weights = std::move(mine);
        });
        return weights;
    }
    static std::string at(const TemporaryDirectory& directory, int64_t step) {
        return std::filesystem::path(directory.path()) / checkpoint::name_of_step(step);
    }
    static void expect_same_arrays(const std::string& mine, const std::string& theirs) {
        const checkpoint::Saved a(mine), b(theirs);
        EXPECT_EQ(a.arrays().size(), b.arrays().size());
        for (const auto& [name, array] : b.arrays()) {
            ASSERT_NE(a.find(name), nullptr) << name;
            EXPECT_EQ(a.find(name)->checksum, array.checksum) << name;
        }
        EXPECT_EQ(a.manifest().training, b.manifest().training);
    }

    const TinyData data_;
    const TemporaryDirectory storage_{"/var/tmp"};
};

// The same number of ranks a stage: what is written has the bytes of a run with all layers on each
// rank, and every run that goes on from it has that one's bits.
TEST_P(Resumed, WithAnotherNumberOfStages) {
    for (const int each : {1, 2}) {
        const TemporaryDirectory of_whole;
        const RankCut whole{each, 1};
        const Weights expected = train(config(), whole, "", of_whole.path());
        for (const int stages : {2, 3}) {
            if (is_quick() && each + stages != 4) continue;
            SCOPED_TRACE(testing::Message() << stages << " stages of " << each);
            const RankCut cut{each * stages, stages};
            const TemporaryDirectory directory;
            ASSERT_EQ(train(on_nvme(), cut, "", directory.path()), expected);
            for (const int64_t step : {1, 4})
                expect_same_arrays(at(directory, step), at(of_whole, step));
            EXPECT_EQ(train(config(), whole, at(directory, 2), ""), expected);
            EXPECT_EQ(train(config(), cut, at(of_whole, 3), ""), expected);
            EXPECT_EQ(train(on_nvme(), {each * 4, 4}, at(directory, 1), ""), expected);
            EXPECT_EQ(train(config(), cut, at(directory, 4), ""), expected);  // ends at once
            if (HasFailure()) return;
        }
    }
}

// And in another order, with other numbers of virtual stages.
TEST_P(Resumed, WithOtherVirtualStages) {
    using enum PipelineSchedule;
    const TemporaryDirectory of_whole, directory;
    const RankCut whole{1, 1}, interleaved_twice{2, 2, 1, interleaved, 2},
        in_turn_twice{2, 2, 1, round_robin, 2};
    const Weights expected = train(config(), whole, "", of_whole.path());
    ASSERT_EQ(train(on_nvme(), interleaved_twice, "", directory.path()), expected);
    for (const int64_t step : {1, 4}) expect_same_arrays(at(directory, step), at(of_whole, step));
    EXPECT_EQ(train(config(), in_turn_twice, at(directory, 2), ""), expected);
    EXPECT_EQ(train(on_nvme(), {2, 2}, at(directory, 1), ""), expected);
    EXPECT_EQ(train(config(), {4, 4, 1, round_robin, 1}, at(directory, 3), ""), expected);
    EXPECT_EQ(train(on_nvme(), in_turn_twice, at(of_whole, 2), ""), expected);
}

// What ranks that share tensors have written; written again by others it has the same bytes.
TEST_P(Resumed, WithSlicesOfTensors) {
    Config config = this->config();
    if (config.optimizer.moments == MomentType::int8) GTEST_SKIP() << "slices keep none";
    config.steps = 1;
    config.model.kv_heads = 2;
    const TemporaryDirectory from_slices;
    const RankCut slices{2, 1, 2};
    const Weights expected = train(config, slices, "", from_slices.path());
    for (const RankCut& cut : {RankCut{1, 1}, RankCut{3, 3}, RankCut{4, 2, 2}, RankCut{8, 2, 2}}) {
        SCOPED_TRACE(testing::PrintToString(cut));
        const TemporaryDirectory again;
        Weights found;
        on_ranks(config, cut, at(from_slices, 1), [&](Engine& engine, int rank) {
            std::optional<checkpoint::Steps> steps;
            if (rank == 0) steps.emplace(again.path());
            ASSERT_FALSE(Inside(engine).save({.directory = steps ? &*steps : nullptr}));
            Weights mine = weights_of(engine);
            if (rank == 0) found = std::move(mine);
        });
        EXPECT_EQ(found, expected);
        expect_same_arrays(at(again, 1), at(from_slices, 1));
        if (HasFailure()) return;
    }
}

// The same ranks a stage, of which two share tensors: as with whole ones.
TEST_P(Resumed, WithAnotherNumberOfStagesThatShareTensors) {
    Config config = this->config(), stored = on_nvme();
    if (config.optimizer.moments == MomentType::int8) GTEST_SKIP() << "slices keep none";
    config.model.kv_heads = stored.model.kv_heads = 2;
    Spread spread(2, static_cast<int>(GetParam()));
    for (const int replicas : {1, 2}) {
        if (!spread.takes()) continue;
        SCOPED_TRACE(testing::Message() << replicas << " replicas");
        const TemporaryDirectory of_whole, directory;
        const RankCut whole{2 * replicas, 1, 2}, cut{4 * replicas, 2, 2};
        const Weights expected = train(config, whole, "", of_whole.path());
        ASSERT_EQ(train(stored, cut, "", directory.path()), expected);
        for (const int64_t step : {1, 4})
            expect_same_arrays(at(directory, step), at(of_whole, step));
        EXPECT_EQ(train(config, whole, at(directory, 2), ""), expected);
        config.zero.stage = 3;
        EXPECT_EQ(train(config, cut, at(of_whole, 3), ""), expected);
        config.zero.stage = 1;
        if (HasFailure()) return;
    }
}

INSTANTIATE_TEST_SUITE_P(kinds, Resumed, testing::Range<size_t>(0, kKinds.size()),
                         [](const auto& kind) { return kKinds[kind.param].name; });

}  // namespace
}  // namespace ferry::train
