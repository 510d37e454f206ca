// A rehearsal goes the run's own way: the same bits on every tier, the bytes that its plan says.
#include <gtest/gtest.h>

#include "tests/support/simulated_machine.h"
#include "train/prediction/rehearsal.h"

namespace ferry::train {
namespace {

constexpr int64_t kBlocks = 3, kElements = 5 * 8192;
constexpr int64_t kStateBytes = (kBlocks * kElements + 2 * 4096) * 12;  // edge layers included

Config on_host() {
    Config config;
    config.precision = DType::bf16;
    config.swap.chunk_elements = 8192;
    config.swap.speculate = Speculate::off;
    return config;
}
Config on_nvme(double fraction) {
    Config config = on_host();
    config.swap.state_on_nvme = fraction;
    config.budgets.nvme = {{.path = "simulated", .size_bytes = 64 * kMiB}};
    return config;
}

class OnSimulatedDisk {
public:
    OnSimulatedDisk(const Config& config, uint64_t seed)
        : executor_(make_simulated_executor(seed)),
          disk_({.seed = seed}, *executor_),
          rehearsal_(Rehearsal::make(
              config,  // Hours of pauses, which pass in virtual time.
              {.parameters = kBlocks * kElements, .layers = kBlocks, .compute_seconds = 1e4},
              {.executor = executor_.get(), .open_volume = volumes_on(disk_)})) {}
    Rehearsal* operator->() { return rehearsal_.get(); }

private:
    std::unique_ptr<Executor> executor_;
    aio::SimulatedDisk disk_;
    std::unique_ptr<Rehearsal> rehearsal_;
};

int64_t bytes(const PassReport& report, swap::Lane lane) {
    return report.lanes[static_cast<size_t>(lane)].bytes;
}

TEST(Rehearsal, UpdatesTheSameOnEveryTier) {
    const auto updated = [](const Config& config) {
        OnSimulatedDisk rehearsal(config, 1);
        const uint64_t first = rehearsal->state_hash();
        for (const Pass pass : {Pass::swap_in, Pass::optimizer, Pass::step, Pass::optimizer})
            rehearsal->run(pass);
        EXPECT_NE(rehearsal->state_hash(), first);
        return std::pair(first, rehearsal->state_hash());
    };
    const auto reference = updated(on_host());
    for (const double fraction : {0.3, 1.0}) EXPECT_EQ(updated(on_nvme(fraction)), reference);
}

TEST(Rehearsal, MovesWhatLivesOnNvme) {
    OnSimulatedDisk rehearsal(on_nvme(1), 5);
    using swap::Lane;
    const PassReport out = rehearsal->run(Pass::swap_out), in = rehearsal->run(Pass::swap_in);
    EXPECT_EQ(bytes(out, Lane::read), 0);
    EXPECT_EQ(bytes(out, Lane::write), kStateBytes);
    EXPECT_EQ(bytes(in, Lane::read), kStateBytes);
    EXPECT_EQ(bytes(in, Lane::write), 0);
    for (const Pass pass : {Pass::optimizer, Pass::step}) {
        const PassReport report = rehearsal->run(pass);
        EXPECT_EQ(bytes(report, Lane::read), kStateBytes);
        EXPECT_EQ(bytes(report, Lane::write), kStateBytes);
        // p, m, v read and written, the gradient read, the weight written.
        EXPECT_EQ(rehearsal->bytes_of_pass(pass, Lane::team),
                  static_cast<double>(kStateBytes) / 12 * 28);
        EXPECT_EQ(bytes(report, Lane::h2d) > 0, pass == Pass::step);
    }
}

TEST(Rehearsal, SwappingOutGivesBackTheFirstContents) {
    OnSimulatedDisk rehearsal(on_nvme(1), 9);
    const uint64_t first = rehearsal->state_hash();
    rehearsal->run(Pass::swap_out);
    EXPECT_EQ(rehearsal->state_hash(), first);
}

}  // namespace
}  // namespace ferry::train
