// Random runs as `ferry plan` is asked for them: settings of a configuration, ranks and a machine.
// The settings are printed as `ferry plan` takes them.
#pragma once

#include <spdlog/fmt/fmt.h>

#include <cstdint>
#include <optional>
#include <ostream>
#include <string>
#include <string_view>
#include <vector>

#include "cost/measurements.h"
#include "ferry/config.h"
#include "ferry/units.h"
#include "tests/support/random_machine.h"
#include "train/measuring/planned_device.h"

namespace ferry::train {

struct RandomRun {
    std::vector<std::string> settings{};  // "key=value", of every key that is not the default
    Config config{};
    RankCount count{};
    std::optional<AbsentDevice> absent{};  // where the device is a GPU
    cost::Measurements links{};            // the machine, but for its kernels
    friend void PrintTo(const RandomRun& run, std::ostream* out) {
        *out << run.count.ranks << " ranks, " << run.count.on_a_host << " a host";
        for (const std::string& setting : run.settings) *out << " --set '" << setting << '\'';
    }
};

class RandomRunDrawer {
public:
    explicit RandomRunDrawer(uint64_t seed) : random_(seed) {}

    RandomRun draw() {
        draw_ranks();
        draw_model();
        draw_optimizer();
        draw_exchanges();
        draw_budgets();
        draw_swap();
        run_.config = parse_config("{}", "drawn", run_.settings);
        run_.links = draw_links(random_, run_.config.device);
        draw_device();
        return run_;
    }
    Random& random() { return random_; }

private:
    template <class T>
    void set(std::string_view key, const T& value) {
        run_.settings.push_back(fmt::format("{}={}", key, value));
    }
    bool is_half() const { return precision_ != "fp32"; }
    bool is_alone() const { return run_.count.ranks == 1; }

    void draw_ranks() {
        stages_ = random_.once_in(2) ? random_.from(2, 4) : 1;
        tensor_ = random_.once_in(4) ? 2 : 1;
        sequence_ = random_.once_in(4) ? 2 : 1;
        replicas_ = random_.once_in(2) ? 2 : 1;
        const auto ranks = static_cast<int>(stages_ * tensor_ * sequence_ * replicas_);
        int of_a_host = ranks;
        for (int divisor = 1; divisor < ranks; ++divisor)
            if (ranks % divisor == 0 && random_.once_in(4)) of_a_host = divisor;
        run_.count = {.ranks = ranks, .on_a_host = of_a_host};
        set("parallel.pipeline", stages_);
        set("parallel.tensor", tensor_);
        set("parallel.sequence", sequence_);
        set("steps", 100);
        set("data.tokens", "none.bin");
        on_gpu_ = random_.once_in(2);
        set("device", on_gpu_ ? "cuda" : "cpu");
        precision_ = random_.one_of<std::string_view>({"fp32", "bf16", "bf16", "fp16"});
        set("precision", precision_);
    }

    // A long step is predicted by short ones.
    void draw_batch() {
        const bool is_long = stages_ > 1 && random_.once_in(16);
        const int64_t all =
            is_long ? 128 * random_.from(1, 2) : random_.one_of<int64_t>({1, 2, 4, 6, 9});
        micro_batches_ = all;
        set("batch.micro_batches", all * replicas_);
        set("batch.micro_batch", random_.from(1, 2));
        set("batch.sequence", 64 * sequence_ * random_.from(1, 4));
    }

    void draw_schedule() {
        virtual_stages_ = 1;
        if (stages_ == 1) return;
        const auto schedule = random_.one_of<std::string_view>(
            {"1f1b", "1f1b", "zero_bubble", "interleaved", "round_robin"});
        if (schedule == "interleaved") virtual_stages_ = random_.from(2, 3);
        if (schedule == "round_robin") virtual_stages_ = random_.from(1, 3);
        const bool chosen = micro_batches_ < 16 && random_.once_in(8);
        set("parallel.schedule", chosen ? "auto" : schedule);
        if (chosen)
            set("parallel.virtual_stages", "auto");
        else
            set("parallel.virtual_stages", virtual_stages_);
    }

    void draw_model() {
        draw_batch();
        draw_schedule();
        const int64_t hidden = 64 * random_.from(1, 4), key_heads = random_.from(1, 2),
                      intermediate = 128 * random_.from(1, 4), vocab = 64 * random_.from(2, 40);
        layers_ = stages_ * virtual_stages_ + random_.from(0, 3);
        const bool tied = random_.once_in(2);
        set("model.hidden", hidden);
        set("model.layers", layers_);
        set("model.heads", 4);
        set("model.kv_heads", 2 * key_heads);
        set("model.head_dim", 32);
        set("model.intermediate", intermediate);
        set("model.vocab", vocab);
        set("model.tie_embeddings", tied);
        if (random_.once_in(3)) {
            set("attention.pattern", "window");
            set("attention.num_sliding_window_blocks", random_.from(1, 3));
            if (random_.once_in(2))
                set("attention.layers", fmt::format("[{}]", random_.from(0, layers_ - 1)));
        }
        // Something is left to train in a block, as Muon asks for.
        const std::string_view frozen =
            layers_ > 1 && random_.once_in(3)
                ? R"(["*layers.0.*","*embed_tokens*"])"
                : random_.one_of<std::string_view>(
                      {R"(["*mlp*"])", R"(["*embed_tokens*"])", R"(["*self_attn*"])"});
        if (random_.once_in(4)) set("freeze", frozen);
        elements_ = (tied ? 1 : 2) * vocab * hidden +
                    layers_ * hidden * (2 * 4 * 32 + 2 * 2 * key_heads * 32 + 3 * intermediate);
    }

    void draw_optimizer() {
        const bool together = stages_ * tensor_ == 1;  // ranks that have all of a layer
        sends_momentum_ = together && !is_alone() && random_.once_in(3);
        if (sends_momentum_) {
            const bool zeroone = random_.once_in(2);
            set("optimizer.method", zeroone ? "zeroone_adam" : "onebit_adam");
            set(zeroone ? "optimizer.var_freeze_step" : "optimizer.freeze_step", 20);
            goes_alone_ = zeroone && sequence_ == 1 && random_.once_in(2);
            if (goes_alone_) set("optimizer.local_step_clipper", 4);
        } else if (together && is_alone() && random_.once_in(4)) {
            set("optimizer.method", "muon");
            if (random_.once_in(2)) set("optimizer.ns_products", "bf16");
            if (random_.once_in(3)) set("optimizer.moments", "int8");
        } else {
            set("optimizer.method",
                random_.one_of<std::string_view>({"adamw", "adamw", "lion", "adagrad", "sgd"}));
            if (random_.once_in(2)) {
                const bool coded = random_.once_in(2);
                set("optimizer.momentum", 0.9);
                set("optimizer.moments", coded ? "int8" : "bf16");
            }
        }
        if (is_half() && !goes_alone_ && random_.once_in(3)) set("optimizer.master", "split");
        if (is_half() && random_.once_in(3)) set("numerics.wire", "fp32");
        if (is_half() && random_.once_in(3)) set("numerics.residual", "fp32");
        clips_ = random_.once_in(2);
        set("clip_norm", clips_ ? 1 : 0);
    }

    void draw_exchanges() {
        if (is_alone()) return;
        const int64_t stage = goes_alone_ ? 0 : random_.from(0, 3);
        set("zero.stage", stage);
        const bool coded = !sends_momentum_ && random_.once_in(3);
        if (coded) set("zero.compress.gradients", random_.once_in(2) ? "int8" : "int4");
        if (stage == 3 && random_.once_in(3)) set("zero.compress.weights", "int8");
        if (stages_ * tensor_ > 1 || run_.count.ranks < 4 || random_.once_in(2)) return;
        const bool again = stage == 3 && random_.once_in(2);
        if (!coded && !again) return;
        set("zero.ranks_per_host", 2);
        if (again) set("zero.second_shard", "host");
    }

    // From nothing to more than everything.
    void draw_budgets() {
        const auto of_all = [&](int64_t ranks) {
            const double all = 16.0 * static_cast<double>(elements_ * ranks);
            return static_cast<int64_t>(random_.between(0.3, 3) * all) + ranks * 2 * kMiB;
        };
        if (!random_.once_in(5)) set("budgets.device", of_all(1));
        if (!random_.once_in(5)) set("budgets.host", of_all(run_.count.on_a_host));
        paths_ = random_.from(0, 2);
        std::string paths;
        for (int64_t p = 0; p < paths_; ++p)
            paths += fmt::format(R"({}{{"path":"/path{}","size":{}}})", p == 0 ? "" : ",", p,
                                 run_.count.on_a_host * (64 * elements_ + 16 * kMiB));
        if (paths_ > 0) set("budgets.nvme", "[" + paths + "]");
    }

    void draw_swap() {
        if (random_.once_in(2)) return;  // the planner chooses all
        if (!random_.once_in(4)) set("swap.chunk_elements", 4096 << random_.from(0, 4));
        const auto speculate = random_.one_of<std::string_view>({"auto", "off", "all", "all"});
        set("swap.speculate", speculate);
        if (clips_ && speculate != "off" && random_.once_in(3))
            set("swap.expect_clipped", random_.one_of({0.0, 0.2, 1.0}));
        if (random_.once_in(2)) {
            int64_t groups = random_.from(1, micro_batches_);
            while (micro_batches_ % groups != 0) --groups;
            set("swap.groups", groups);
        }
        const auto blocks = [&](std::string_view key) {
            if (random_.once_in(3)) set(key, random_.from(0, layers_));
        };
        blocks("swap.save_attention");
        blocks("swap.save_mlp");
        if (tensor_ * sequence_ == 1) blocks("swap.save_projections");
        blocks("swap.save_inputs");
        const bool durable =
            paths_ > 0 && stages_ * tensor_ == 1 && !sends_momentum_ && random_.once_in(3);
        if (paths_ > 0 && random_.once_in(2)) set("swap.chunks_at_once", random_.from(1, 4));
        if (durable) return set("checkpoint.durable_steps", true);
        if (paths_ > 0 && random_.once_in(2))
            set("swap.state_on_nvme", random_.one_of({0.0, 0.3, 1.0}));
        if (random_.once_in(3)) set("swap.state_on_device", random_.one_of({0.0, 0.5, 1.0}));
        if (random_.once_in(4)) set("swap.verify", false);
    }

    void draw_device() {
        cost::Measurements& m = run_.links;
        m.nvme_bytes_per_s = random_.between(1e7, 1e10);
        m.nvme_at_once = random_.from(1, 4);
        m.dram_per_nvme_byte = random_.from(1, 2);
        m.cores_per_nvme_byte = random_.once_in(2) ? random_.between(1e-11, 1e-9) : 0;
        if (stages_ > 1)
            m.between_stages = {random_.between(1e8, 1e11), random_.between(1e-7, 1e-4)};
        if (random_.once_in(3)) {  // peaks of kernels that reach a part of them
            m.product_flops_per_s = m.assumed_flops_per_s;
            m.device_copy_bytes_per_s = cost::kAssumedDeviceBytesPerS;
        }
        if (!on_gpu_) return;
        run_.absent = AbsentDevice{
            .architecture = "cuda sm_90",
            .needs = {.scratch = 4096 * random_.from(1, 64), .overhead = kMiB * random_.from(0, 1)},
            .threads = m.threads};
    }

    Random random_;
    RandomRun run_{};
    std::string_view precision_{};
    int64_t stages_ = 1, tensor_ = 1, sequence_ = 1, replicas_ = 1;
    int64_t virtual_stages_ = 1, layers_ = 1, micro_batches_ = 1, elements_ = 0, paths_ = 0;
    bool on_gpu_ = false, sends_momentum_ = false, goes_alone_ = false, clips_ = false;
};

}  // namespace ferry::train
