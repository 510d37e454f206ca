// A training run small enough to repeat thousands of times.
#pragma once

#include <string>
#include <vector>

#include "ferry/train.h"
#include "tests/support/temporary_directory.h"
#include "tests/support/write_tokens.h"

namespace ferry::train {

// A directory with a token file in it, removed at the end.
class TinyData {
public:
    TinyData() {
        std::vector<uint32_t> tokens(1500);
        for (size_t i = 0; i < tokens.size(); ++i)
            tokens[i] = static_cast<uint32_t>((i * i / 7 + i) % 31);
        write_tokens(tokens_path(), tokens, 32, {});
    }
    std::string tokens_path() const { return directory_ / "tokens.bin"; }

private:
    TemporaryDirectory directory_{"/tmp"};
};

// Two blocks of 16 hidden, everything unlimited: the reference. Clipping binds in some steps.
inline Config tiny_config(const TinyData& data) {
    Config config;
    config.model = {.hidden = 16,
                    .layers = 2,
                    .heads = 2,
                    .kv_heads = 1,
                    .head_dim = 8,
                    .intermediate = 32,
                    .vocab = 32};
    config.data = {.tokens = data.tokens_path(), .held_back = 0};
    config.batch = {.sequence = 8, .micro_batch = 2, .micro_batches = 2};
    config.optimizer.lr = 3e-3;
    config.optimizer.weight_decay = 0.1;
    config.clip_norm = 0.98;
    config.seed = 3;
    config.steps = 6;
    config.threads = 1;
    config.swap.chunk_elements = 4096;
    return config;
}

// The same with nothing in host memory that can be on NVMe, every speculative update made, two
// groups.
inline Config tiny_config_on_nvme(const TinyData& data) {
    Config config = tiny_config(data);
    config.budgets.nvme = {{.path = "simulated", .size_bytes = 64 * kMiB}};
    config.budgets.host_bytes = 112 * kKiB;
    config.budgets.device_bytes = 280 * kKiB;
    config.swap.speculate = Speculate::all;
    config.swap.groups = 2;
    return config;
}

// Wide enough that most matrices can have coded moments; others keep fp32 ones beside them.
inline Config with_coded_moments(Config config) {
    config.model = {.hidden = 64,
                    .layers = 2,
                    .heads = 2,
                    .kv_heads = 1,
                    .head_dim = 32,
                    .intermediate = 96,
                    .vocab = 64};
    config.optimizer.moments = MomentType::int8;
    if (config.budgets.host_bytes != kUnlimited) config.budgets.host_bytes = 400 * kKiB;
    if (config.budgets.device_bytes != kUnlimited) config.budgets.device_bytes = 600 * kKiB;
    if (config.clip_norm > 0) config.clip_norm = 2;
    return config;
}

struct TinyOutcome {
    uint64_t hash = 0;
    std::vector<double> losses{};
    RunReport report{};
};

inline TinyOutcome run_tiny(const Config& config, Runtime runtime) {
    const auto engine = Engine::make(config, std::move(runtime));
    TinyOutcome outcome;
    for (int64_t step = 0; step < config.steps; ++step)
        outcome.losses.push_back(engine->step().loss);
    outcome.hash = engine->state_hash();
    outcome.report = engine->report();
    return outcome;
}

}  // namespace ferry::train
