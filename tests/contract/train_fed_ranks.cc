// Ranks whose program makes their batches.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>

#include "tests/contract/train_ranks_fixture.h"
#include "tests/support/run_ranks.h"
#include "tests/support/tiny_run.h"

namespace ferry::train::of_ranks {
namespace {

LoadBatch from_file(const TokenLoader& loader, int64_t sequence) {
    return [&loader, sequence](const FedBatch& batch) {
        const auto length = static_cast<size_t>(sequence);
        for (size_t i = 0; i * length < batch.tokens.size(); ++i) {
            const MicroBatch out{.tokens = batch.tokens.subspan(i * length, length),
                                 .targets = batch.targets.subspan(i * length, length)};
            const auto number = static_cast<int64_t>(i);
            batch.step > 0 ? loader.fill(batch.step, number, out)
                           : loader.fill_evaluation(number, out);
        }
    };
}

TEST_F(Ranks, FedByTheirProgramGiveTheBitsOfTheFile) {
    Config config = this->config();
    TokenLoader::Options options{{.sequence = config.batch.sequence,
                                  .micro_batch = config.batch.micro_batch,
                                  .micro_batches = config.batch.micro_batches,
                                  .evaluation_micro_batches = config.evaluate.micro_batches,
                                  .vocab = config.model.vocab}};
    options.path = config.data.tokens;
    options.held_back = config.data.held_back;
    options.seed = config.seed;
    const TokenLoader loader(options);
    const auto fed = [&](Runtime& runtime, std::unique_ptr<comm::Communicator> others) {
        runtime = with(std::move(runtime), {.ranks = std::move(others)});
        runtime.load_batch = from_file(loader, config.batch.sequence);
    };
    for (const int64_t parts : {1, 2}) {
        config.parallel.sequence = parts;
        config.zero.stage = parts == 1 ? 3 : 1;
        Config unnamed = config;
        unnamed.data.tokens = "";
        expect_equal(run(unnamed, 2, fed), run(config, 2));
    }
}

TEST_F(Ranks, AreFedTheSameOrEnd) {
    const Config config = this->config();
    const auto said_by = [&](const std::function<void(int, const FedBatch&)>& load) {
        std::vector<std::string> said(2);
        comm::on_run_ranks(2, [&](std::unique_ptr<comm::Communicator> others, Executor& executor) {
            const int rank = others->rank();
            Runtime runtime = with({.executor = &executor}, {.ranks = std::move(others)});
            runtime.load_batch = [&load, rank](const FedBatch& batch) {
                std::ranges::fill(batch.tokens, 1);
                std::ranges::fill(batch.targets, 2);
                load(rank, batch);
            };
            const auto engine = Engine::make(config, std::move(runtime));
            try {
                engine->step();
            } catch (const Error& error) {
                said[static_cast<size_t>(rank)] = error.what();
            }
        });
        return said;
    };
    if (comm::ranks_launched() > 0) GTEST_SKIP() << "threads of one process alone tell all";
    for (const std::string& each :
         said_by([](int rank, const FedBatch&batch) { batch.tokens[3] = rank; }))
        EXPECT_THAT(each, testing::HasSubstr("the fed batch of step 1"));
    const std::vector<std::string> said = said_by([](int rank, const FedBatch&) {
        if (rank == 1) throw Error(Trouble::usage, {.what = "no more text"});
    });
    EXPECT_THAT(said[1], testing::HasSubstr("no more text"));
    EXPECT_THAT(said[0], testing::HasSubstr("rank 1"));
}

}  // namespace
}  // namespace ferry::train::of_ranks
