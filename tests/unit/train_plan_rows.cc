// Every row of a plan's table says why it is there, whatever the plan is of.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "swap/objects.h"
#include "tests/support/tiny_run.h"
#include "train/prediction/predictor.h"
#include "train/setup/from_config.h"

namespace ferry::train {
namespace {

using planner::Plan;
using planner::TierRow;
using swap::Tier;
using testing::HasSubstr;

// What a row begins with, and a word of what it is for. The longest that fits is the row's.
struct Kind {
    Tier tier;
    std::string_view row, word;
};
constexpr Kind kKinds[] = {
    {Tier::device, "the process on the device", "driver"},
    {Tier::device, "page tables of the host tier", "host memory"},
    {Tier::device, "weights in flight", "copied"},
    {Tier::device, "gradient accumulators", "fp32"},
    {Tier::device, "tokens, gradients, report on their way", "copies"},
    {Tier::device, "Newton-Schulz, of a matrix from the host", "matrix"},
    {Tier::device, "Newton-Schulz, of a matrix on the device", "matrix"},
    {Tier::device, "block inputs", "from its input"},
    {Tier::device, "attention's lists of blocks", "attention visits"},
    {Tier::device, "attention saved for backward", "less again"},
    {Tier::device, "attention's products saved for backward", "less again"},
    {Tier::device, "MLPs' products saved for backward", "less again"},
    {Tier::device, "kept for weights' gradients", "would wait"},
    {Tier::device, "scratch of the kernels", "largest"},
    {Tier::device, "resident weights", "no copies"},
    {Tier::device, "optimizer state", "device updates"},
    {Tier::device, "gradients", "norm"},
    {Tier::host, "norm leaves and report", "outcome"},
    {Tier::host, "workspace of Newton-Schulz", "matrix"},
    {Tier::host, "token batches", "next ones"},
    {Tier::host, "staging buffers", "overlap"},
    {Tier::host, "optimizer state", "speculative"},
    {Tier::host, "weights", "device has no room"},
    {Tier::host, "gradient accumulators", "groups"},
    {Tier::host, "gradients", "norm"},
    {Tier::host, "block inputs", "from its input"},
    {Tier::host, "momentum and its errors", "exchanges"},
    {Tier::host, "second shards of weights", "within its host"},
    {Tier::nvme, "state", ""},  // by whether steps are durable
    {Tier::nvme, "weights", ""},
    {Tier::nvme, "gradients", "norm"},
    {Tier::nvme, "gradients until the outcome", "norm"},
    {Tier::nvme, "accumulators", "groups"},
    {Tier::nvme, "block inputs", "from its input"},
    {Tier::nvme, "momentum and its errors", "exchanges"},
    {Tier::nvme, "second shards of weights", "within its host"},
    {Tier::nvme, "maps of the durable state", "version"},
    {Tier::nvme, "headers of the files", "files"},
};

const Kind* kind_of(const TierRow& row) {
    const Kind* found = nullptr;
    for (const Kind& kind : kKinds) {
        const bool fits = kind.tier == row.tier && row.what.starts_with(kind.row);
        if (fits && (!found || kind.row.size() > found->row.size())) found = &kind;
    }
    return found;
}

class PlanRows : public testing::Test {
protected:
    void expect_reasons(const std::string& of, const Config& config, const RankCount& count = {}) {
        SCOPED_TRACE(of);
        const auto predictor = config.device == DeviceKind::cuda
                                   ? Predictor::make(config, count, gpu())
                                   : Predictor::make(config, count);
        planner::PlanRequest request = request_of(config);
        request.trains = config.freeze.empty();
        for (const Plan& plan : predictor->plans(request)) {
            EXPECT_FALSE(plan.rows.empty());
            for (const TierRow& row : plan.rows) expect_reason(row, plan);
        }
    }

    // As a machine file describes one.
    static AbsentDevice gpu() {
        return {.architecture = "cuda sm_90",
                .memory_bytes = kGiB,
                .needs = {.scratch = kMiB, .overhead = 3 * kMiB}};
    }
    Config on_gpu(int64_t device_bytes) const {
        Config config = tiny_config(data_);
        config.device = DeviceKind::cuda;
        config.budgets.device_bytes = device_bytes;
        return config;
    }
    Config on_nvme() const { return tiny_config_on_nvme(data_); }
    Config in_memory() const { return tiny_config(data_); }

private:
    void expect_reason(const TierRow& row, const Plan& plan) {
        SCOPED_TRACE(row.what);
        const std::string why(reason_of(row, plan));
        const Kind* kind = kind_of(row);
        ASSERT_NE(kind, nullptr) << "a row that this test does not know";
        EXPECT_GE(row.bytes, 0);  // of gradients, where nothing trains
        EXPECT_FALSE(why.empty());
        std::string word(kind->word);
        if (row.what.ends_with("fresh slots"))
            word = "beside what it read";
        else if (word.empty())
            word = is_of_version(row, plan) ? "killed" : "no room";
        EXPECT_THAT(why, HasSubstr(word));
    }
    static bool is_of_version(const TierRow& row, const Plan& plan) {
        return plan.durable && (row.what.starts_with("state") || plan.state.split);
    }

    const TinyData data_{};
};

TEST_F(PlanRows, HaveAReasonEachOfItsKind) {
    const auto changed = [](Config config, const std::function<void(Config&)>& change) {
        change(config);
        return config;
    };
    const auto durable = [](Config& c) { c.checkpoint.durable_steps = true; };
    const auto split = [](Config& c) {
        c.precision = DType::bf16;
        c.optimizer.master = MasterFormat::split;
    };
    expect_reasons("in memory", in_memory());
    expect_reasons("on NVMe", on_nvme());
    expect_reasons("durable", changed(on_nvme(), durable));
    expect_reasons("durable, split master", changed(changed(on_nvme(), split), durable));
    expect_reasons("groups in memory", changed(in_memory(), [](Config& c) {
                       c.swap.groups = 2;
                       c.budgets.device_bytes = 280 * kKiB;
                   }));
    const auto frozen = [](Config& c) { c.freeze = {"*"}; };
    expect_reasons("evaluation", changed(in_memory(), frozen));
    expect_reasons("evaluation, from NVMe", changed(on_nvme(), frozen));
    expect_reasons("coded moments", with_coded_moments(in_memory()));
    expect_reasons("coded moments on NVMe", with_coded_moments(on_nvme()));
    for (const auto method : {optim::Method::sgd, optim::Method::lion, optim::Method::adagrad})
        expect_reasons("another optimizer",
                       changed(on_nvme(), [&](Config& c) { c.optimizer.method = method; }));
    const auto saving = [](Config& c) {
        c.swap.save_attention = c.swap.save_mlp = c.swap.save_projections = 1;
    };
    expect_reasons("saved activations", changed(in_memory(), saving));
}

TEST_F(PlanRows, OfMuonHaveAReason) {
    const auto muon = [](Config config) {
        config.optimizer.method = optim::Method::muon;
        config.budgets.host_bytes = config.budgets.device_bytes = kUnlimited;
        return config;
    };
    expect_reasons("in memory", muon(in_memory()));
    Config stored = muon(on_nvme());
    stored.swap.state_on_nvme = 1;
    expect_reasons("on NVMe", stored);
    for (const double share : {0.0, 1.0}) {
        Config config = muon(on_gpu(kUnlimited));
        config.swap.state_on_device = share;
        expect_reasons("on a GPU", config);
    }
}

TEST_F(PlanRows, OfAGpuHaveAReason) {
    for (const int64_t bytes : {8 * kMiB, 64 * kMiB, kUnlimited}) {
        expect_reasons("dense", on_gpu(bytes));
        Config nothing = on_gpu(bytes);
        nothing.swap.state_on_device = 0;
        expect_reasons("state beside it", nothing);
    }
}

TEST_F(PlanRows, OfRanksHaveAReason) {
    const auto of_ranks = [](Config config) {
        config.budgets.host_bytes = config.budgets.device_bytes = kUnlimited;
        config.batch.micro_batches = 8;
        if (!config.budgets.nvme.empty()) config.swap.state_on_nvme = 1;
        return config;
    };
    const std::vector<Config> everywhere{of_ranks(in_memory()), of_ranks(on_nvme())};
    for (const int64_t stage : {0, 1, 2, 3}) {
        for (Config config : everywhere) {
            config.zero.stage = stage;
            expect_reasons("ZeRO " + std::to_string(stage), config, {.ranks = 2, .on_a_host = 2});
        }
    }
    for (Config config : everywhere) {
        config.zero.ranks_per_host = 2;
        config.zero.second_shard = SecondShard::host;
        config.zero.compress.gradients = config.zero.compress.weights = CodecKind::int8;
        expect_reasons("ZeRO++", config, {.ranks = 4, .on_a_host = 2});
    }
    for (Config config : everywhere) {
        config.optimizer.method = optim::Method::onebit_adam;
        config.optimizer.freeze_step = 2;
        config.zero.stage = 1;
        config.swap.speculate = Speculate::off;
        expect_reasons("1-bit Adam", config, {.ranks = 2, .on_a_host = 2});
    }
    for (int ParallelConfig::*way :
         {&ParallelConfig::sequence, &ParallelConfig::tensor, &ParallelConfig::pipeline}) {
        for (Config config : everywhere) {
            config.model.kv_heads = 2;
            config.zero.stage = 1;
            config.parallel.*way = 2;
            expect_reasons("ranks together", config, {.ranks = 4, .on_a_host = 4});
        }
    }
}

}  // namespace
}  // namespace ferry::train
