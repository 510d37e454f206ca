#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "ferry/error.h"
#include "tests/support/temporary_directory.h"
#include "train/measuring/planning_measurements.h"
#include "train/run/outcome.h"
#include "train/setup/from_config.h"
#include "train/setup/loader_of.h"
#include "train/setup/model_of.h"
#include "train/setup/volume_options.h"
#include "train/stack/memory_left.h"
#include "train/stack/threads.h"

namespace ferry::train {
namespace {

Topology two_nodes() {
    return {.nodes = {{.os_index = 0, .cores = {0, 1}}, {.os_index = 1, .cores = {2, 3}}},
            .memory_limit_bytes = kGiB,
            .memory_left_bytes = 512 * kMiB};
}

class WithinMemory : public testing::Test {
protected:
    // The error's words; empty: it fits.
    std::string refusal(int64_t device_bytes, int64_t host_bytes, int64_t beside = 0) {
        planner::Plan plan;
        plan.device_bytes = device_bytes;
        plan.host_bytes = host_bytes;
        try {
            within_memory(plan, {}, two_nodes(), *device_, beside);
            return "";
        } catch (const Error& error) {
            EXPECT_EQ(error.trouble(), Trouble::does_not_fit);
            return error.what();
        }
    }
    const std::unique_ptr<Executor> executor_ = make_thread_executor();
    const std::unique_ptr<Device> device_ = Device::open(DeviceKind::cpu, *executor_);
};

// Each word of a key means what the module that it goes to calls so.
TEST(Words, MeanInTheirModulesWhatTheySay) {
    Config config;
    config.steps = 100;
    for (const std::string word : {"adamw", "adam", "sgd", "lion", "adagrad"}) {
        set_value(config, "optimizer.method=" + word);
        EXPECT_EQ(optim::name_of(hyper_of(config).method), word);
    }
    config.schedule.total_steps = 100;
    config.schedule.decay_steps = 10;
    for (const std::string word :
         {"constant", "linear", "cosine", "wsd", "one_cycle", "warmup_decay"}) {
        set_value(config, "schedule.kind=" + word);
        EXPECT_EQ(optim::name_of(schedule_of(config).kind), word);
    }
    for (const std::string word : {"fp32", "bf16", "fp16"}) {
        set_value(config, "precision=" + word);
        EXPECT_EQ(name_of(numerics_of(config, {}).compute), word);
        set_value(config, "numerics.wire=" + word);
        set_value(config, "numerics.residual=" + word);
        EXPECT_EQ(name_of(numerics_of(config, {}).wire), word);
        EXPECT_EQ(name_of(numerics_of(config, {}).residual), word);
    }
    const auto backend = [](const char* word) {
        Config of;
        set_value(of, std::string("io.backend=") + word);
        return volume_options(of.io, {}, {}, {}, {}, 0).backend;
    };
    EXPECT_EQ(backend("auto"), aio::BackendKind::automatic);
    EXPECT_EQ(backend("uring"), aio::BackendKind::uring);
    EXPECT_EQ(backend("posix"), aio::BackendKind::posix);
    using enum aio::Leftover;
    const auto leftover = [](const char* word) {
        Config of;
        set_value(of, std::string("io.leftovers=") + word);
        return volume_options(of.io, {}, {}, {}, {}, 0).leftover;
    };
    EXPECT_EQ(leftover("remove"), remove);
    EXPECT_EQ(leftover("reuse"), reuse);
    EXPECT_EQ(leftover("refuse"), refuse);
    EXPECT_EQ(leftover("remove_any"), remove_any);
    EXPECT_EQ(leftover("reuse_any"), reuse_any);
}

TEST(Threads, AreTheCoresButForThoseThatExchange) {
    Topology machine = two_nodes();
    machine.nodes[0].cores = {0, 1, 4, 5, 6, 7, 8, 9};  // ten with the other node's
    using enum DeviceKind;
    EXPECT_EQ(threads_for({}, cuda, machine, 1), 10);
    EXPECT_EQ(threads_for({}, cuda, machine, 2), 8);
    EXPECT_EQ(threads_for({}, cuda, two_nodes(), 2), 3);
    machine.reserved = {0};
    EXPECT_EQ(threads_for({}, cuda, machine, 2), 9);
    machine.reserved.clear();
    EXPECT_EQ(threads_for({}, cpu, machine, 2), 10);
    EXPECT_EQ(threads_for(5, cpu, machine, 2), 5);
}

TEST(PlanningMeasurements, OfAHostAreSharedByItsRanks) {
    const cost::Measurements host{.copy_bytes_per_s = 5e10,
                                  .nvme_bytes_per_s = 4e9,
                                  .dram_bytes_per_s = 1.6e11,
                                  .device_bytes_per_s = 4e12,
                                  .computes_on_host = false};
    const cost::Measurements one = planning_measurements({}, &host, 1),
                             two = planning_measurements({}, &host, 2);
    EXPECT_EQ(one.dram_bytes_per_s, 1.6e11);
    EXPECT_EQ(two.dram_bytes_per_s, 0.8e11);
    EXPECT_EQ(two.nvme_bytes_per_s, 2e9);
    EXPECT_EQ(two.copy_bytes_per_s, one.copy_bytes_per_s);
    EXPECT_EQ(two.device_bytes_per_s, one.device_bytes_per_s);
}

// Measurements on one rank are its own, beside however many.
TEST(PlanningMeasurements, OfARankAreNotSharedOnceMore) {
    const cost::Measurements rank{
        .nvme_bytes_per_s = 4e9, .dram_bytes_per_s = 1.6e11, .memory_of = cost::Of::rank};
    const cost::Measurements four = planning_measurements({}, &rank, 4);
    EXPECT_EQ(four.dram_bytes_per_s, 1.6e11);
    EXPECT_EQ(four.nvme_bytes_per_s, 1e9) << "drives are the host's";
    EXPECT_EQ(cost::of_rank(cost::of_rank(four, 4), 4).dram_bytes_per_s, 1.6e11);
}

TEST(PlanningMeasurements, GoByEachThatIsKnown) {
    const planner::PlanRequest request{.device = DeviceKind::cuda};
    const cost::Measurements some{
        .copy_bytes_per_s = 1e9, .computes_on_host = false, .product_flops_per_s = 3e13};
    const cost::Measurements found = planning_measurements(request, &some, 1);
    EXPECT_EQ(found.copy_bytes_per_s, 1e9) << "also where memory was not measured";
    EXPECT_EQ(found.dram_bytes_per_s, assumed_measurements(request.device, {}).dram_bytes_per_s);
    EXPECT_DOUBLE_EQ(found.assumed_flops_per_s, 0.77 * 3e13) << "by what a product reaches";
}

// The same drive under two names is one; one that is not there may be another.
TEST(PlanningMeasurements, AssumeOfEachDriveAndOfMemoryWhatOneGives) {
    const TemporaryDirectory one, another, in_memory("/dev/shm");
    const auto assumed = [](DeviceKind device, const std::vector<std::string>& paths) {
        std::vector<NvmePath> nvme;
        for (const std::string& path : paths) nvme.push_back({.path = path});
        return assumed_measurements(device, nvme);
    };
    const auto rate_of = [&](DeviceKind device, const std::vector<std::string>& paths) {
        return assumed(device, paths).nvme_bytes_per_s;
    };
    EXPECT_EQ(assumed(DeviceKind::cpu, {}).nvme_at_once, 1);
    EXPECT_EQ(assumed(DeviceKind::cpu, {one.path(), another.path()}).nvme_at_once, 1);
    EXPECT_EQ(assumed(DeviceKind::cuda, {one.path(), "/not/there", "/nor/there"}).nvme_at_once, 3);
    if (is_memory(one.path()) || !is_memory(in_memory.path()))
        GTEST_SKIP() << "/var/tmp is in memory, or /dev/shm is not";
    for (const auto& [device, drive, memory] :
         {std::tuple{DeviceKind::cpu, 1.5e9, 2e9}, std::tuple{DeviceKind::cuda, 4e9, 1.5e10}}) {
        SCOPED_TRACE(name_of(device));
        EXPECT_EQ(rate_of(device, {}), drive);
        EXPECT_EQ(rate_of(device, {one.path()}), drive);
        EXPECT_EQ(rate_of(device, {one.path(), another.path()}), drive);
        EXPECT_EQ(rate_of(device, {one.path(), "/not/there", "/nor/there"}), 3 * drive);
        EXPECT_EQ(rate_of(device, {in_memory.path(), "/dev/shm"}), memory);
        EXPECT_EQ(rate_of(device, {one.path(), in_memory.path()}), drive + memory);
    }
    EXPECT_EQ(assumed(DeviceKind::cpu, {in_memory.path()}).nvme_at_once, 1);
    EXPECT_EQ(assumed(DeviceKind::cuda, {in_memory.path(), "/dev/shm"}).nvme_at_once, 4);
    EXPECT_EQ(assumed(DeviceKind::cuda, {in_memory.path(), one.path()}).nvme_at_once, 5);
    const auto dram = [](const std::vector<std::string>& paths) {
        Config config;
        for (const std::string& path : paths) config.budgets.nvme.push_back({.path = path});
        return dram_per_stored_byte(config);
    };
    EXPECT_EQ(dram({}), 1);
    EXPECT_EQ(dram({one.path()}), 1);
    EXPECT_EQ(dram({in_memory.path()}), 2);
    EXPECT_DOUBLE_EQ(dram({one.path(), in_memory.path()}), (1.5 + 2 * 2) / (1.5 + 2));
}

TEST(PlanningMeasurements, NameTheLinksThatAreFarFromWhatWasAssumed) {
    const auto said = [](const cost::Measurements& measured) {
        return unlike_assumed({}, measured, 1);
    };
    constexpr double kCopies = 8e9, kStorage = 1.5e9, kUpdates = 2e10;  // of a small machine
    EXPECT_EQ(said({}), "");
    EXPECT_EQ(said({.copy_bytes_per_s = 1.9 * kCopies,
                    .nvme_bytes_per_s = 0.51 * kStorage,
                    .dram_bytes_per_s = kUpdates}),
              "");
    EXPECT_EQ(said({.nvme_bytes_per_s = 2 * kStorage}), "storage 3 GB/s instead of 1.5");
    EXPECT_EQ(said({.copy_bytes_per_s = 0.5 * kCopies, .dram_bytes_per_s = 1.3e11}),
              "copies 4 GB/s instead of 8, updates 130 GB/s instead of 20");
    const cost::Measurements quarter{.nvme_bytes_per_s = kStorage / 4,
                                     .storage_of = cost::Of::rank,
                                     .dram_bytes_per_s = kUpdates / 4,
                                     .memory_of = cost::Of::rank};
    EXPECT_EQ(unlike_assumed({}, quarter, 4), "") << "a rank's part of the host's";
    EXPECT_NE(unlike_assumed({}, quarter, 1), "");
}

// By default, too: drives are a host's however many ranks use them, and so is a small machine's
// memory. A GPU's part of a server comes with each GPU.
TEST(PlanningMeasurements, OfAHostAreSharedByDefault) {
    for (const DeviceKind device : {DeviceKind::cpu, DeviceKind::cuda}) {
        SCOPED_TRACE(name_of(device));
        const planner::PlanRequest request{
            .device = device,
            .budgets = {.nvme = {{.path = "/not/there"}, {.path = "/nor/there"}}}};
        const cost::Measurements one = planning_measurements(request, nullptr, 1),
                                 four = planning_measurements(request, nullptr, 4);
        EXPECT_EQ(four.nvme_bytes_per_s, one.nvme_bytes_per_s / 4);
        EXPECT_EQ(four.copy_bytes_per_s, one.copy_bytes_per_s);
        const double sharers = device == DeviceKind::cpu ? 4 : 1;
        EXPECT_EQ(four.dram_bytes_per_s, one.dram_bytes_per_s / sharers);
        EXPECT_EQ(four.device_bytes_per_s, one.device_bytes_per_s / sharers);
        EXPECT_EQ(four.assumed_flops_per_s, one.assumed_flops_per_s / sharers);
        const cost::Measurements known{.update_overhead_s = 1e-5,
                                       .computes_on_host = device == DeviceKind::cpu};
        EXPECT_EQ(planning_measurements(request, &known, 4).nvme_bytes_per_s, four.nvme_bytes_per_s)
            << "a file that knows no drive";
    }
}

// 32 of the 512 MiB left are for what the process is still to take beside its arenas.
TEST_F(WithinMemory, WhatIsLeftIsTheLimit) {
    constexpr int64_t kMost = 480 * kMiB;
    EXPECT_EQ(refusal(kMost / 2, kMost / 2), "");
    EXPECT_EQ(refusal(0, kMost), "");
    const std::string said = refusal(kMost / 2, kMost / 2 + 1);
    EXPECT_THAT(said, testing::HasSubstr(std::to_string(kMost) + " bytes"));
    EXPECT_THAT(said, testing::HasSubstr("of 1.00 GiB installed or allowed"));
}

TEST_F(WithinMemory, WhatIsTakenForAWhileIsCounted) {
    constexpr int64_t kMost = 480 * kMiB, kBeside = 64 * kMiB;
    EXPECT_EQ(refusal(0, kMost - kBeside, kBeside), "");
    EXPECT_THAT(refusal(0, kMost - kBeside + 1, kBeside),
                testing::HasSubstr("96.00 MiB for threads and libraries and to write checkpoints"));
    planner::Plan plan;
    plan.host_bytes = kMost - kBeside;
    EXPECT_EQ(memory_for_reading(plan, {}, two_nodes(), *device_), kBeside);
    plan.host_bytes = kMost + 1;
    EXPECT_EQ(memory_for_reading(plan, {}, two_nodes(), *device_), 0);
}

class Vocabulary : public testing::Test {
protected:
    // The error's words; empty: the tokens are taken.
    std::string refusal(int64_t model, uint64_t tokens) const {
        const model::Description made{.shape = {.vocab = model}};
        try {
            check_vocabulary(config_, made, {.vocabulary = tokens, .count = 1});
            return "";
        } catch (const Error& error) {
            EXPECT_EQ(error.trouble(), Trouble::usage);
            return error.what();
        }
    }
    Config config_ = [] {
        Config config;
        config.model.path = "a/model";
        config.data.tokens = "some.bin";
        return config;
    }();
};

TEST_F(Vocabulary, OfHalfTheLoadedModelsIsRefused) {
    for (const char* part : {"some.bin", "256", "512", "ferry data --ids", "data.small_vocabulary"})
        EXPECT_THAT(refusal(512, 256), testing::HasSubstr(part));
    EXPECT_NE(refusal(151'936, 256), "");
    EXPECT_EQ(refusal(511, 256), "");  // a table that is padded
    EXPECT_EQ(refusal(256, 256), "");
    EXPECT_EQ(refusal(100, 256), "");  // the token file looks at each
    EXPECT_EQ(refusal(int64_t{1} << 30, uint64_t{1} << 63), "");
}

TEST_F(Vocabulary, IsFreeWhereNothingIsLoadedOrTheUserInsists) {
    config_.data.small_vocabulary = OnDoubt::ignore;
    EXPECT_EQ(refusal(512, 256), "");
    config_.data.small_vocabulary = OnDoubt::refuse;
    config_.model.load = false;
    EXPECT_EQ(refusal(512, 256), "");
    config_.model = {};
    EXPECT_EQ(refusal(512, 256), "");
}

class RingCores : public testing::Test {
protected:
    std::vector<int> of_path(const Topology& machine) const {
        const std::vector<NvmePath> here{{.path = directory_.path()}};
        return volume_options({}, here, {}, machine, {}, 0).paths.at(0).cores;
    }
    // Every drive there is, at this node.
    Topology drives_at(int node) const {
        Topology machine = two_nodes();
        for (const auto& drive : std::filesystem::directory_iterator("/sys/block"))
            machine.attached.push_back({drive.path().filename(), false, node});
        return machine;
    }
    const TemporaryDirectory directory_;
};

TEST_F(RingCores, AreThoseOfTheDrivesNode) {
    Topology machine = drives_at(1);
    if (node_of_path(machine, directory_.path()) != 1) GTEST_SKIP() << "/var/tmp is on no drive";
    EXPECT_EQ(of_path(machine), (std::vector<int>{2, 3}));
    machine.reserved = {0, 3};
    EXPECT_EQ(of_path(machine), std::vector<int>{3});
    machine.reserved = {0};  // none is left to I/O there
    EXPECT_EQ(of_path(machine), (std::vector<int>{2, 3}));
}

TEST_F(RingCores, AreAnyWhereNoneIsNearer) {
    EXPECT_TRUE(of_path(two_nodes()).empty());    // of no known drive
    EXPECT_TRUE(of_path(drives_at(-1)).empty());  // at both nodes
    EXPECT_TRUE(of_path(drives_at(7)).empty());   // where this process has no core
    Topology one = drives_at(0);
    one.nodes.resize(1);
    EXPECT_TRUE(of_path(one).empty());
}

}  // namespace
}  // namespace ferry::train
