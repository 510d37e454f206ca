// Whole runs of several ranks, and what is the same of two of them.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tests/support/run_ranks.h"
#include "tests/support/tiny_run.h"
#include "train/inside.h"
#include "train/setup/from_config.h"

namespace ferry::train::of_ranks {

struct Outcome {
    uint64_t hash = 0;
    std::vector<StepReport> reports{};
    Evaluation before{}, after{};
    // In bits: a gradient that overflowed equals itself. `gradients`: of the last step.
    std::map<std::string, std::vector<uint32_t>> weights{}, gradients{};

    std::vector<double> losses() const {
        std::vector<double> losses;
        for (const StepReport& report : reports) losses.push_back(report.loss);
        return losses;
    }
};

Outcome train(Engine& engine, const Config& config);
// A run of one rank, which shares nothing.
std::unique_ptr<Engine> engine_alone(Config config, Executor& executor);
Outcome alone(const Config& config);

void expect_equal(const Outcome& a, const Outcome& b);
// Steps and evaluations, to so much of them: ranks add their parts in another order.
void expect_near(const Outcome& several, const Outcome& one, double rounding);
// And each tensor's gradient is there once, whoever has which slice of it.
void expect_near_each(const Outcome& several, const Outcome& one, double rounding);

// The same on every rank; how each of them gets to know the others, `bring` puts into the Runtime.
using Bring = std::function<void(Runtime&, std::unique_ptr<comm::Communicator>)>;
Outcome run(
    const Config& config, int ranks,
    const Bring& bring = [](Runtime& runtime, std::unique_ptr<comm::Communicator> others) {
        runtime = with(std::move(runtime), {.ranks = std::move(others)});
    });

// In fp16 with a small norm: some gradients overflow, and all ranks skip those steps alike.
void expect_some_overflow(Config config, int ranks);

OptimizerConfig muon();

// Each rank's error where one of them fails, or where they do not belong together.
std::vector<Problem> problems(int ranks, const std::function<Config(int)>& config,
                              const std::function<void(int, Engine&)>& then = {});

class Ranks : public testing::Test {
protected:
    void SetUp() override {
        if (comm::ranks_launched() > 0 && comm::ranks_launched() != ranks())
            GTEST_SKIP() << "for " << ranks() << " ranks";
    }
    void TearDown() override { comm::await_all_ranks(); }
    virtual int ranks() const { return 2; }

    // Micro-batches for 1, 2, 3 and 4 ranks; several segments, and tensors of sizes that no number
    // of ranks divides.
    Config config() const {
        Config config = tiny_config(data_);
        config.data.tokens = comm::as_first_rank_says(config.data.tokens);
        config.device = comm::device_of_ranks();
        config.batch = {.sequence = 8, .micro_batch = 1, .micro_batches = 12};
        config.data.held_back = 0.2;
        config.evaluate.micro_batches = 5;
        config.steps = 4;
        config.clip_norm = 0.5;
        return config;
    }
    // Several chunks a shard, the last one smaller.
    static void cut_into_chunks(Config& config) {
        config.swap.chunk_elements = 8192;
        config.model.hidden = 64;
        config.model.intermediate = 160;
        config.model.head_dim = 32;
    }
    // As little as possible in memory, every speculative update made, two groups.
    Config tight(Config config, int ranks) const;
    // All of the state on NVMe, every speculative update made.
    void keep_on_nvme(Config& config) const;
    // Tokens of documents that do not see each other.
    void read_documents(Config& config) const;
    void expect_stages_equal(Config config, int ranks) const;

    const TinyData data_;
    const TemporaryDirectory directory_{};
};

}  // namespace ferry::train::of_ranks
