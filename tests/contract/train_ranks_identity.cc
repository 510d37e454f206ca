// Ranks that a runtime without MPI brings together, by the identity that NCCL gives.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>

#include "tests/contract/train_ranks_fixture.h"
#include "tests/support/nccl_unique_id.h"
#include "tests/support/run_ranks.h"

namespace ferry::train::of_ranks {
namespace {

#ifdef FERRY_NCCL
// As a runtime that has no MPI brings them.
TEST_F(Ranks, MetByAnIdentityGiveTheSameBits) {
    const Config config = this->config();
    if (config.device != DeviceKind::cuda) GTEST_SKIP() << "NCCL moves a GPU's memory";
    const auto by_identity = [](Runtime& runtime, std::unique_ptr<comm::Communicator> others) {
        runtime.gpu = comm::gpu_of_rank(*others, *runtime.executor);
        const auto met = comm::with_unique_id(*others, *runtime.executor);
        runtime.nccl = {met.unique_id, met.rank, met.size};
    };
    expect_equal(run(config, 2, by_identity), run(config, 2));
    expect_equal(run(tight(config, 2), 2, by_identity), run(config, 2));
}
#endif

TEST_F(Ranks, MetByAnIdentityNeedAGpu) {
    const auto executor = make_thread_executor();
    const auto refusal = [&](const Config& config, Runtime runtime,
                             NcclRanks ranks = {.size = 2}) -> std::string {
        runtime.executor = executor.get();
        runtime.nccl = ranks;
        try {
            Engine::make(config, std::move(runtime));
        } catch (const Error& error) {
            EXPECT_EQ(error.trouble(), Trouble::usage);
            return error.what();
        }
        return "";
    };
    Config config = this->config();
    config.device = DeviceKind::cpu;
    EXPECT_THAT(refusal(config, {.gpu = 0}), testing::HasSubstr("device is \"cpu\""));
    config.device = DeviceKind::cuda;
    EXPECT_THAT(refusal(config, {}), testing::HasSubstr("Runtime::gpu is not given"));
    EXPECT_THAT(refusal(config, {.gpu = 0}, {.rank = 2, .size = 2}),
                testing::HasSubstr("contradict"));
}

}  // namespace
}  // namespace ferry::train::of_ranks
