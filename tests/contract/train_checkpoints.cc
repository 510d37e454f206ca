// A run that goes on from a checkpoint has the bits of one that was never stopped: every optimizer
// and format of the state, by one rank and by several, after the first steps and before the last,
// wherever the state lay and wherever it lies then.
#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <future>
#include <string>
#include <vector>

#include "checkpoint/saved.h"
#include "checkpoint/steps.h"
#include "ferry/device.h"
#include "ferry/export.h"
#include "tests/support/quick.h"
#include "tests/support/run_ranks.h"
#include "tests/support/temporary_directory.h"
#include "tests/support/tiny_run.h"
#include "train/inside.h"
#include "train/state/saving.h"

namespace {

int64_t g_free_bytes = -1;  // that every file system says it has; below 0: what it has

}  // namespace

// In place of the system's, of this program alone.
extern "C" int statvfs(const char* path, struct statvfs* found) noexcept {
    using Call = int (*)(const char*, struct statvfs*);
    static const auto next = reinterpret_cast<Call>(dlsym(RTLD_NEXT, "statvfs"));
    const int done = next(path, found);
    if (done == 0 && g_free_bytes >= 0)
        found->f_bavail = static_cast<fsblkcnt_t>(g_free_bytes) / found->f_frsize;
    return done;
}

namespace ferry::train {
namespace {

struct Kind {
    const char* name;
    std::function<void(Config&)> set;
};

const std::array kKinds{
    Kind{"AdamW", [](Config&) {}},
    Kind{"AdamInHalfWithItsLossScale",
         [](Config& config) {
             config.optimizer.method = optim::Method::adam;
             config.precision = DType::f16;
         }},
    Kind{"SplitMasterWithBf16Moments",
         [](Config& config) {
             config.precision = DType::bf16;
             config.optimizer.master = MasterFormat::split;
             config.optimizer.moments = MomentType::bf16;
         }},
    Kind{"Int8Moments",
         [](Config& config) {
             config = with_coded_moments(config);
             config.precision = DType::bf16;
         }},
    Kind{"SgdWithMomentum",
         [](Config& config) {
             config.optimizer.method = optim::Method::sgd;
             config.optimizer.momentum = 0.9;
             config.precision = DType::bf16;
         }},
    Kind{"Lion",
         [](Config& config) {
             config.optimizer.method = optim::Method::lion;
             config.freeze = {"*layers.1.*"};
         }},
    Kind{"AdagradWithBf16Moments",
         [](Config& config) {
             config.optimizer.method = optim::Method::adagrad;
             config.optimizer.initial_accumulator = 0.1;
             config.optimizer.moments = MomentType::bf16;
             config.model.tie_embeddings = true;
         }},
};

enum class Placement { memory, both, storage };
constexpr std::array kPlacements{Placement::memory, Placement::both, Placement::storage};

std::string memory_directory() { return access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/var/tmp"; }

class Resumes : public testing::TestWithParam<std::tuple<size_t, int>> {
protected:
    int ranks() const { return std::get<1>(GetParam()); }

    Config config(Placement placement) const {
        Config config = tiny_config(data_);
        config.batch = {.sequence = 8, .micro_batch = 1, .micro_batches = 4};
        config.clip_norm = 0.5;
        config.zero.stage = placement == Placement::memory ? 1 : 3;
        kKinds[std::get<0>(GetParam())].set(config);
        if (placement == Placement::memory) return config;
        config.budgets.nvme = {{.path = storage_.path(), .size_bytes = 64 * kMiB}};
        config.swap.state_on_nvme = placement == Placement::both ? 0.5 : 1;
        config.swap.speculate = Speculate::all;
        config.io.direct = false;
        return config;
    }

    // Of the state at the end. `with` is done with each rank's engine, after its start.
    uint64_t run(const Config& config, const std::string& from,
                 const std::function<void(Engine&, bool first)>& with) const {
        uint64_t hash = 0;
        const auto go = [&](Runtime runtime, bool first) {
            runtime.checkpoint = from;
            const auto engine = Engine::make(config, std::move(runtime));
            with(*engine, first);
            const uint64_t mine = engine->state_hash();
            if (first) hash = mine;
        };
        if (ranks() == 1) {
            const auto executor = make_thread_executor();
            go({.executor = executor.get()}, true);
            return hash;
        }
        comm::on_run_ranks(
            ranks(), [&](std::unique_ptr<comm::Communicator> others, Executor& executor) {
                const bool first = others->rank() == 0;
                go(train::with({.executor = &executor}, {.ranks = std::move(others)}), first);
            });
        return hash;
    }

    // Saves after each of its steps.
    uint64_t run_and_save(const Config& config, const std::string& directory) const {
        return run(config, "", [&](Engine& engine, bool first) {
            std::optional<checkpoint::Steps> steps;
            if (first) steps.emplace(directory);
            while (engine.last_step() < config.steps) {
                engine.step();
                const auto failed = Inside(engine).save({.directory = first ? &*steps : nullptr});
                ASSERT_FALSE(failed) << failed->what();
            }
        });
    }

    uint64_t resume(const Config& config, const std::string& directory, int64_t step) const {
        const std::string from = std::filesystem::path(directory) / checkpoint::name_of_step(step);
        return run(config, from, [&](Engine& engine, bool) {
            EXPECT_EQ(engine.last_step(), step);
            while (engine.last_step() < config.steps) engine.step();
        });
    }

    const TinyData data_;
    const TemporaryDirectory storage_{memory_directory()};
};

TEST_P(Resumes, FromEveryPlacementToEveryOther) {
    if (comm::ranks_launched() > 0) GTEST_SKIP() << "for threads of one process";
    const uint64_t whole = run(config(Placement::memory), "", [&](Engine& engine, bool) {
        while (engine.last_step() < 6) engine.step();
    });
    Spread spread(5);
    for (const Placement written : kPlacements) {
        const TemporaryDirectory directory(memory_directory());
        ASSERT_EQ(run_and_save(config(written), directory.path()), whole);
        for (const Placement read : kPlacements) {
            for (const int64_t step : {1, 3, 5, 6}) {
                if (!spread.takes()) continue;
                SCOPED_TRACE(testing::Message() << "from " << static_cast<int>(written) << " to "
                                                << static_cast<int>(read) << " after " << step);
                ASSERT_EQ(resume(config(read), directory.path(), step), whole);
            }
        }
    }
}

// Also where chunks hold several tensors.
TEST_P(Resumes, EachChunkOnStorageIsReadOnceForACheckpoint) {
    if (ranks() > 1 || comm::ranks_launched() > 0) GTEST_SKIP() << "of one rank";
    const TemporaryDirectory directory(memory_directory());
    run(config(Placement::storage), "", [&](Engine& engine, bool) {
        engine.step();
        const auto read_bytes = [&] {
            int64_t bytes = 0;
            for (const aio::PathCounters& path : engine.report().paths) bytes += path.bytes_read;
            return bytes;
        };
        const int64_t before = read_bytes();
        checkpoint::Steps steps(directory.path());
        ASSERT_FALSE(Inside(engine).save({.directory = &steps}));
        const int64_t stored = stored_checkpoint_bytes(Inside(engine).plan());
        EXPECT_GT(stored, 0);
        EXPECT_GE(read_bytes() - before, stored);
        EXPECT_LT(read_bytes() - before, stored + stored / 2);  // whole blocks
    });
}

// A checkpoint behind a step whose updates are still to come reads nothing: they hand the state
// over, whether there is room for it or not; several ranks' do where there is. What it has are the
// bits of one that was read.
TEST_P(Resumes, UpdatesHandOverWhatLiesOnStorage) {
    if (comm::ranks_launched() > 0) GTEST_SKIP() << "for threads of one process";
    Spread spread(3, static_cast<int>(std::get<0>(GetParam())) + ranks());
    for (const Placement placement : {Placement::both, Placement::storage}) {
        for (const int64_t room : {int64_t{0}, 20 * kKiB, 4 * kMiB}) {
            if (!spread.takes()) continue;
            SCOPED_TRACE(testing::Message() << static_cast<int>(placement) << ", room " << room);
            const TemporaryDirectory directory(memory_directory()), other(memory_directory());
            Config config = this->config(placement);
            config.swap.speculate = Speculate::off;
            config.checkpoint = {
                .dir = directory.path(), .every = {.steps = 100}, .memory_bytes = room};
            std::array<std::array<int64_t, 2>, 2> read_bytes{};  // by rank
            std::atomic<int64_t> step = 0;
            for (const bool handed : {true, false}) {
                checkpoint::Steps steps((handed ? directory : other).path());
                run(config, "", [&](Engine& engine, bool first) {
                    const planner::Plan& plan = Inside(engine).plan();
                    const bool passes = passes_by(plan);
                    EXPECT_TRUE(passes || !config.freeze.empty());  // no update brings those
                    while (engine.step().skipped || engine.last_step() < 2) {
                    }
                    step = engine.last_step();
                    if (!handed) engine.report();  // finishes the step
                    ASSERT_FALSE(Inside(engine).save({.directory = first ? &steps : nullptr}));
                    std::array<int64_t, 2>& bytes = read_bytes[first ? 0 : 1];
                    for (const aio::PathCounters& path : engine.report().paths)
                        bytes[handed ? 0 : 1] += path.bytes_read;
                    EXPECT_GT(bytes[0], 0);
                    const bool waits = room / ranks() < own_checkpoint_bytes(plan);
                    if (handed || !passes || (ranks() > 1 && waits)) return;
                    EXPECT_GE(bytes[1] - bytes[0], stored_checkpoint_bytes(plan));
                });
            }
            const std::string name = checkpoint::name_of_step(step);
            const checkpoint::Saved mine(std::filesystem::path(directory.path()) / name),
                theirs(std::filesystem::path(other.path()) / name);
            for (size_t i = 0; i < theirs.manifest().shards.size(); ++i)
                EXPECT_EQ(mine.manifest().shards[i].checksum, theirs.manifest().shards[i].checksum);
            for (const auto& [array, of] : theirs.arrays())
                EXPECT_EQ(mine.find(array)->checksum, of.checksum) << array;
        }
    }
}

// A step that a checkpoint follows makes no speculative updates, so all of them hand the state
// over: several ranks' too.
TEST_P(Resumes, UpdatesHandOverWhereStepsSpeculate) {
    if (comm::ranks_launched() > 0) GTEST_SKIP() << "for threads of one process";
    const TemporaryDirectory directory(memory_directory());
    Config config = this->config(Placement::storage);
    config.checkpoint = {.dir = directory.path(), .every = {.steps = 2}, .memory_bytes = 4 * kMiB};
    run(config, "", [&](Engine& engine, bool first) {
        std::optional<checkpoint::Steps> steps;
        if (first) steps.emplace(directory.path());
        const planner::Plan& plan = Inside(engine).plan();
        while (engine.last_step() < config.steps) {
            const StepReport report = engine.step();
            const bool saves = report.step % 2 == 0;
            EXPECT_EQ(report.speculative, plan.speculative && !(saves && passes_by(plan)));
            if (!saves) continue;
            const auto failed = Inside(engine).save({.directory = first ? &*steps : nullptr});
            EXPECT_FALSE(failed);
        }
    });
}

// The disk fills while updates wait with what they hand over: they go on, and training does.
TEST(ADiskThatFills, WhileUpdatesHandOverTheStateHoldsNobodyUp) {
    const TinyData data;
    const TemporaryDirectory directory(memory_directory()), storage(memory_directory());
    const auto executor = make_thread_executor();
    Config config = tiny_config(data);
    config.budgets.nvme = {{.path = storage.path(), .size_bytes = 64 * kMiB}};
    config.swap.state_on_nvme = 1;
    config.swap.speculate = Speculate::off;
    config.io.direct = false;
    const auto whole = [&](bool saves) {
        const auto engine = Engine::make(config, {.executor = executor.get()});
        checkpoint::Steps steps(directory.path());
        const auto fail = [](int64_t, int64_t) {
            throw Error(Trouble::io, {.what = "the file cannot be written"});
        };
        while (engine->last_step() < config.steps) {
            engine->step();
            if (!saves || engine->last_step() != 2) continue;
            EXPECT_TRUE(passes_by(Inside(*engine).plan()));
            const auto failed = Inside(*engine).save({.directory = &steps, .progress = fail});
            EXPECT_TRUE(failed.has_value());
        }
        return engine->state_hash();
    };
    EXPECT_EQ(whole(true), whole(false));
    EXPECT_TRUE(std::filesystem::is_empty(directory.path()));
}

// The first rank's disk fills, now and then: the others send their parts all the same, and all go
// on.
TEST(ADiskThatFills, WhileRanksSendTheirPartsHoldsNobodyUp) {
    if (comm::ranks_launched() > 0) GTEST_SKIP() << "for threads of one process";
    const TinyData data;
    for (const bool stored : {false, true}) {
        const TemporaryDirectory directory(memory_directory()), storage(memory_directory());
        Config config = tiny_config(data);
        config.batch = {.sequence = 8, .micro_batch = 1, .micro_batches = 4};
        config.zero.stage = stored ? 3 : 1;
        config.checkpoint = {.dir = directory.path(), .every = {.steps = 1}};
        config.io.direct = false;
        if (stored) {
            config.budgets.nvme = {{.path = storage.path(), .size_bytes = 64 * kMiB}};
            config.swap.state_on_nvme = 1;
        }
        const auto fail = [](int64_t, int64_t) {
            throw Error(Trouble::io, {.what = "the file cannot be written"});
        };
        const auto hash_of = [&](bool saves) {
            std::array<uint64_t, 2> hashes{};
            comm::on_run_ranks(
                2, [&](std::unique_ptr<comm::Communicator> others, Executor& executor) {
                    const int rank = others->rank();
                    std::optional<checkpoint::Steps> steps;
                    if (rank == 0) steps.emplace(directory.path());
                    const auto engine = Engine::make(
                        config, with({.executor = &executor}, {.ranks = std::move(others)}));
                    while (engine->last_step() < config.steps) {
                        engine->step();
                        if (!saves) continue;
                        const bool fills = engine->last_step() % 2 == 1;
                        Saving saving{.directory = steps ? &*steps : nullptr};
                        if (fills) saving.progress = fail;
                        EXPECT_EQ(Inside(*engine).save(saving).has_value(), rank == 0 && fills);
                    }
                    hashes[static_cast<size_t>(rank)] = engine->state_hash();
                });
            EXPECT_EQ(hashes[0], hashes[1]);
            return hashes[0];
        };
        EXPECT_EQ(hash_of(true), hash_of(false));
        const auto steps = checkpoint::steps_in(directory.path());
        EXPECT_EQ(std::ssize(steps), config.steps / 2);
        for (const checkpoint::Step& step : steps) EXPECT_EQ(step.step % 2, 0);
    }
}

// Each rank copies its part aside by a thread, or while updates bring it. What is written then has
// the bits of what all ranks gather while training waits, and so has the run.
TEST_P(Resumes, EachRankCopiesItsPartAside) {
    if (ranks() == 1 || comm::ranks_launched() > 0) GTEST_SKIP() << "for threads of one process";
    for (const Placement placement : kPlacements) {
        const TemporaryDirectory gathered(memory_directory());
        const uint64_t whole = run_and_save(config(placement), gathered.path());
        for (const int64_t room : {int64_t{0}, 20 * kKiB, 8 * kMiB}) {
            SCOPED_TRACE(testing::Message() << static_cast<int>(placement) << ", room " << room);
            const TemporaryDirectory directory(memory_directory());
            Config config = this->config(placement);
            config.checkpoint = {
                .dir = directory.path(), .every = {.steps = 1}, .memory_bytes = room};
            const uint64_t hash = run(config, "", [&](Engine& engine, bool first) {
                std::optional<checkpoint::Steps> steps;
                if (first) steps.emplace(directory.path());
                EXPECT_TRUE(reads_own_part(Inside(engine).plan()));
                while (engine.last_step() < config.steps) {
                    engine.step();
                    EXPECT_FALSE(Inside(engine).end_save());
                    Inside(engine).begin_save({.directory = first ? &*steps : nullptr});
                }
                EXPECT_FALSE(Inside(engine).end_save());
            });
            EXPECT_EQ(hash, whole);
            for (const checkpoint::Step& step : checkpoint::steps_in(gathered.path())) {
                const std::string name = checkpoint::name_of_step(step.step);
                const checkpoint::Saved mine(std::filesystem::path(directory.path()) / name),
                    theirs(step.path);
                for (const auto& [array, of] : theirs.arrays())
                    EXPECT_EQ(mine.find(array)->checksum, of.checksum) << array;
            }
        }
    }
}

bool has_gpu() {
    try {
        const auto executor = make_thread_executor();
        return Device::open(DeviceKind::cuda, *executor, 0) != nullptr;
    } catch (const Error&) {
        return false;
    }
}

// What it saves again before a step of its own is what it was given, bit for bit. Then it trains.
TEST(AnotherDevice, GoesOnFromTheSameBits) {
    if (comm::ranks_launched() > 0) GTEST_SKIP() << "of one rank";
    if (!has_gpu()) GTEST_SKIP() << "no GPU, or built without CUDA";
    const TinyData data;
    const auto executor = make_thread_executor();
    for (const bool coded : {false, true}) {
        for (const DeviceKind from : {DeviceKind::cpu, DeviceKind::cuda}) {
            SCOPED_TRACE(testing::Message()
                         << "coded " << coded << ", from " << static_cast<int>(from));
            const TemporaryDirectory directory(memory_directory()), again(memory_directory());
            Config config = tiny_config(data);
            if (coded) config = with_coded_moments(config);
            config.precision = DType::bf16;
            config.device = from;
            checkpoint::Steps steps(directory.path()), copies(again.path());
            int64_t step = 0;
            {
                const auto engine = Engine::make(config, {.executor = executor.get()});
                while (engine->last_step() < 3) engine->step();
                step = engine->last_step();
                ASSERT_FALSE(Inside(*engine).save({.directory = &steps}));
            }
            config.device = from == DeviceKind::cpu ? DeviceKind::cuda : DeviceKind::cpu;
            const std::string name = checkpoint::name_of_step(step);
            const std::string path = std::filesystem::path(directory.path()) / name;
            const auto engine =
                Engine::make(config, {.executor = executor.get(), .checkpoint = path});
            ASSERT_EQ(engine->last_step(), step);
            ASSERT_FALSE(Inside(*engine).save({.directory = &copies}));
            const checkpoint::Saved mine(std::filesystem::path(again.path()) / name), theirs(path);
            EXPECT_EQ(mine.arrays().size(), theirs.arrays().size());
            for (const auto& [array, of] : theirs.arrays())
                EXPECT_EQ(mine.find(array)->checksum, of.checksum) << array;
            EXPECT_FALSE(engine->step().skipped);
        }
    }
}

// The thread that writes stands still after its first piece, and there is room for a few: neither
// the call nor the next step waits for it. What it writes then is of the step that was asked for.
TEST(ACheckpointOfStateInMemory, IsReadWhileTheNextStepIsTaken) {
    const TinyData data;
    const TemporaryDirectory directory(memory_directory());
    const auto executor = make_thread_executor();
    Config config = with_coded_moments(tiny_config(data));
    config.optimizer.moments = MomentType::f32;
    config.checkpoint = {
        .dir = directory.path(), .every = {.steps = 100}, .memory_bytes = 256 * kKiB};
    checkpoint::Steps steps(directory.path());
    std::promise<void> stepped;
    const std::shared_future<void> told = stepped.get_future().share();
    double waited = 0;
    uint64_t whole = 0;
    {
        const auto engine = Engine::make(config, {.executor = executor.get()});
        ASSERT_TRUE(reads_meanwhile(Inside(*engine).plan()));
        engine->step();
        std::atomic<bool> stood = true;
        const auto stand = [&](int64_t, int64_t) {
            if (told.wait_for(std::chrono::minutes(1)) != std::future_status::ready) stood = false;
        };
        Inside(*engine).begin_save({.directory = &steps,
                                    .progress = stand,
                                    .waited = [&](double seconds) { waited += seconds; }});
        engine->step();
        EXPECT_FALSE(Inside(*engine).save_ended());
        EXPECT_EQ(waited, 0);
        stepped.set_value();
        engine->step();  // with the updates of the second
        EXPECT_TRUE(stood);
        EXPECT_FALSE(Inside(*engine).end_save());
        while (engine->last_step() < config.steps) engine->step();
        whole = engine->state_hash();
    }
    const std::string path = std::filesystem::path(directory.path()) / checkpoint::name_of_step(1);
    const auto resumed = Engine::make(config, {.executor = executor.get(), .checkpoint = path});
    ASSERT_EQ(resumed->last_step(), 1);
    while (resumed->last_step() < config.steps) resumed->step();
    EXPECT_EQ(resumed->state_hash(), whole);
}

// By another program, once there was room. What was written by then is gone again, and the
// checkpoint before it stays.
TEST(ADiskThatFills, WhileACheckpointIsWrittenIsSaidWithTheBytesMissing) {
    const TinyData data;
    const TemporaryDirectory directory(memory_directory());
    const auto executor = make_thread_executor();
    const auto engine = Engine::make(tiny_config(data), {.executor = executor.get()});
    checkpoint::Steps steps(directory.path());
    engine->step();
    ASSERT_FALSE(Inside(*engine).save({.directory = &steps}));
    engine->step();
    int64_t missing = 0;
    const auto fill = [&](int64_t written, int64_t of) {
        if (written < of / 2) return;
        g_free_bytes = of / 2;
        missing = of - g_free_bytes;
        throw Error(Trouble::io, {.what = "the file cannot be written"});
    };
    const auto failed = Inside(*engine).save({.directory = &steps, .progress = fill});
    g_free_bytes = -1;
    ASSERT_TRUE(failed);
    EXPECT_THAT(failed->what(), testing::HasSubstr("no room for the checkpoint of step 2"));
    const std::string measured = failed->problem().measured;  // "1 KiB free, 1048576 bytes missing"
    const int64_t said = std::stoll(measured.substr(measured.find(", ") + 2));
    EXPECT_GE(said, missing);
    EXPECT_LE(said, missing + 2 * kMiB);
    ASSERT_EQ(checkpoint::steps_in(directory.path()).size(), 1);
    EXPECT_FALSE(Inside(*engine).save({.directory = &steps}));
    EXPECT_EQ(checkpoint::steps_in(directory.path()).size(), 2);
}

// The others hear at once why the first rank cannot write, and all go on. A rank that waited would
// be missed after its timeout, and the run would be over.
TEST(RefusedDirectories, AreTheErrorOfEveryRank) {
    if (comm::ranks_launched() > 0) GTEST_SKIP() << "for threads of one process";
    const TinyData data;
    const TemporaryDirectory directory(memory_directory());
    const std::string file = directory.path() + "/file", taken = directory.path() + "/taken";
    std::ofstream(file) << "no directory";
    std::filesystem::create_directory(taken);
    std::ofstream(taken + "/file") << "of another model";
    Config config = tiny_config(data);
    config.batch = {.sequence = 8, .micro_batch = 1, .micro_batches = 4};
    std::array<std::vector<std::string>, 2> said;
    comm::on_run_ranks(2, [&](std::unique_ptr<comm::Communicator> others, Executor& executor) {
        const auto rank = static_cast<size_t>(others->rank());
        const auto engine =
            Engine::make(config, with({.executor = &executor}, {.ranks = std::move(others)}));
        const auto hear = [&](const std::optional<Error>& error) {
            if (error) {
                EXPECT_EQ(error->trouble(), Trouble::usage);
            }
            said[rank].emplace_back(error ? error->what() : "");
        };
        // Only the first rank's directory counts.
        const auto of_first = [&](const std::string& path) { return rank == 0 ? path : ""; };
        engine->step();
        hear(save_checkpoint(*engine, of_first(file), "test"));
        hear(export_to(*engine, config, {.directory = of_first(taken)}));
        hear(Inside(*engine).error_of_any(
            rank == 0 ? std::nullopt
                      : std::optional(Error(Trouble::usage, {.what = "what",
                                                             .where = std::string(3000, 'x'),
                                                             .remedy = "rank 1's"}))));
        hear(save_checkpoint(*engine, of_first(directory / "saved"), "test"));
        hear(export_to(*engine, config, {.directory = of_first(directory / "model")}));
        EXPECT_EQ(engine->step().step, 2);
    });
    EXPECT_EQ(said[0], said[1]);
    ASSERT_EQ(said[0].size(), 5u);
    EXPECT_THAT(said[0][0], testing::HasSubstr(file));
    EXPECT_THAT(said[0][1], testing::HasSubstr(taken));
    EXPECT_THAT(said[0][2], testing::HasSubstr("do:       rank 1's"));
    EXPECT_EQ(said[0][3] + said[0][4], "");
    EXPECT_EQ(checkpoint::steps_in(directory / "saved").size(), 1u);
    EXPECT_TRUE(std::filesystem::exists(directory / "model/config.json"));
}

INSTANTIATE_TEST_SUITE_P(kinds, Resumes,
                         testing::Combine(testing::Range<size_t>(0, kKinds.size()),
                                          testing::Values(1, 2)),
                         [](const auto& kind) {
                             return std::string(kKinds[std::get<0>(kind.param)].name) + "By" +
                                    std::to_string(std::get<1>(kind.param));
                         });

}  // namespace
}  // namespace ferry::train
