#include "tests/contract/train_ranks_fixture.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "tests/support/borrowed_ranks.h"
#include "tests/support/quick.h"
#include "tests/support/simulated_ranks.h"
#include "tests/support/write_tokens.h"
#include "train/prediction/predictor.h"

namespace ferry::train::of_ranks {
namespace {

// A rank's smallest budget, as the error names it that refuses less.
int64_t smallest_device_budget(Config config, int ranks) {
    config.budgets.device_bytes = 1;
    try {
        Predictor::make(config, {.ranks = ranks, .on_a_host = ranks})->plan(request_of(config));
    } catch (const Error& error) {
        const std::string& needed = error.problem().measured;  // "1.00 MiB needed (1048576 bytes)"
        return std::stoll(needed.substr(needed.find('(') + 1));
    }
    return 0;
}

}  // namespace

Outcome train(Engine& engine, const Config& config) {
    Outcome outcome;
    const bool evaluates = config.evaluate.micro_batches > 0;
    if (evaluates) outcome.before = engine.evaluate();
    for (int64_t step = 0; step < config.steps; ++step) outcome.reports.push_back(engine.step());
    const auto bits_into = [](std::vector<uint32_t>& bits) {
        return [&bits](std::span<const float> piece) {
            for (const float value : piece) bits.push_back(std::bit_cast<uint32_t>(value));
        };
    };
    const auto for_tensors = [&](const auto& body) {
        for (size_t layer = 0; layer < Inside(engine).layers().size(); ++layer) {
            for (const model::Tensor& tensor : Inside(engine).layers()[layer].tensors)
                body(static_cast<int64_t>(layer), tensor);
        }
    };
    for_tensors([&](int64_t layer, const model::Tensor& tensor) {
        Inside(engine).read_gradient(layer, tensor, bits_into(outcome.gradients[tensor.name]));
    });
    for_tensors([&](int64_t layer, const model::Tensor& tensor) {
        Inside(engine).read_tensor(layer, tensor, bits_into(outcome.weights[tensor.name]));
    });
    if (evaluates) outcome.after = engine.evaluate();
    outcome.hash = engine.state_hash();
    return outcome;
}

std::unique_ptr<Engine> engine_alone(Config config, Executor& executor) {
    config.parallel = {};
    Runtime runtime{.executor = &executor};
    // Its own GPU, for the process's life: what comes first may be a run of several ranks.
    if (config.device == DeviceKind::cuda) runtime.gpu = comm::launched_rank();
    return Engine::make(config, std::move(runtime));
}

Outcome alone(const Config& config) {
    const auto executor = make_thread_executor();
    return train(*engine_alone(config, *executor), config);
}

void expect_equal(const Outcome& a, const Outcome& b) {
    EXPECT_EQ(a.hash, b.hash);
    EXPECT_EQ(a.losses(), b.losses());
    ASSERT_EQ(a.reports.size(), b.reports.size());
    for (size_t i = 0; i < a.reports.size(); ++i) {
        EXPECT_EQ(a.reports[i].skipped, b.reports[i].skipped);
        EXPECT_EQ(a.reports[i].clip_factor, b.reports[i].clip_factor);
        if (!a.reports[i].skipped) {
            EXPECT_EQ(a.reports[i].gradient_norm, b.reports[i].gradient_norm);
        }
    }
    EXPECT_EQ(a.gradients, b.gradients);
    EXPECT_EQ(a.weights, b.weights);
    EXPECT_EQ(a.before.targets, b.before.targets);
    if (a.before.targets > 0) {
        EXPECT_EQ(a.before.loss, b.before.loss);
        EXPECT_EQ(a.after.loss, b.after.loss);
    }
}

void expect_near(const Outcome& several, const Outcome& one, double rounding) {
    EXPECT_EQ(several.before.targets, one.before.targets);
    EXPECT_NEAR(several.before.loss, one.before.loss, rounding * one.before.loss);
    ASSERT_EQ(several.reports.size(), one.reports.size());
    for (size_t i = 0; i < one.reports.size(); ++i) {
        const StepReport &a = several.reports[i], &b = one.reports[i];
        EXPECT_EQ(a.targets, b.targets);
        EXPECT_EQ(a.tokens, b.tokens);
        EXPECT_NEAR(a.loss, b.loss, rounding * b.loss) << "step " << i + 1;
        EXPECT_NEAR(a.gradient_norm, b.gradient_norm, 5 * rounding * b.gradient_norm)
            << "step " << i + 1;
        EXPECT_EQ(a.clip_factor < 1, b.clip_factor < 1);
    }
    EXPECT_NEAR(several.after.loss, one.after.loss, rounding * one.after.loss);
}

namespace {

double apart(const std::vector<uint32_t>& some, const std::vector<uint32_t>& others) {
    double squares = 0, of_others = 0;
    for (size_t i = 0; i < some.size(); ++i) {
        const double a = std::bit_cast<float>(some[i]), b = std::bit_cast<float>(others[i]);
        squares += (a - b) * (a - b);
        of_others += b * b;
    }
    return of_others > 0 ? std::sqrt(squares / of_others) : std::sqrt(squares);
}

}  // namespace

void expect_near_each(const Outcome& several, const Outcome& one, double rounding) {
    expect_near(several, one, rounding);
    ASSERT_EQ(several.gradients.size(), one.gradients.size());
    for (const auto& [name, gradient] : one.gradients) {
        ASSERT_EQ(several.gradients.at(name).size(), gradient.size()) << name;
        EXPECT_LT(apart(several.gradients.at(name), gradient), 50 * rounding) << name;
        ASSERT_EQ(several.weights.at(name).size(), one.weights.at(name).size()) << name;
    }
}

void expect_some_overflow(Config config, int ranks) {
    config.model.norm_eps = 1e-30;
    config.precision = DType::f16;
    config.data.held_back = 0;
    config.evaluate.micro_batches = 0;
    config.clip_norm = 1e6;
    config.steps = 14;
    const Outcome found = run(config, ranks);
    const auto skipped = std::ranges::count(found.reports, true, &StepReport::skipped);
    EXPECT_GT(skipped, 0);
    EXPECT_LT(skipped, config.steps);
    EXPECT_LT(found.reports.back().loss_scale, found.reports.front().loss_scale);
}

Outcome run(const Config& config, int ranks, const Bring& bring) {
    std::vector<Outcome> outcomes(static_cast<size_t>(ranks));
    const std::vector<int> here = comm::on_run_ranks(
        ranks, [&](std::unique_ptr<comm::Communicator> others, Executor& executor) {
            const auto rank = static_cast<size_t>(others->rank());
            Runtime runtime{.executor = &executor};
            bring(runtime, std::move(others));
            const auto engine = Engine::make(config, std::move(runtime));
            outcomes[rank] = train(*engine, config);
        });
    const Outcome& first = outcomes[static_cast<size_t>(here.front())];
    for (const int rank : here) expect_equal(first, outcomes[static_cast<size_t>(rank)]);
    return first;
}

std::vector<Problem> problems(int ranks, const std::function<Config(int)>& config,
                              const std::function<void(int, Engine&)>& then) {
    std::vector<Problem> found;
    const auto body = [&](comm::Communicator& others, Executor& executor) {
        const int rank = others.rank();
        const auto engine = Engine::make(
            config(rank), with({.executor = &executor}, {.ranks = comm::borrow(others)}));
        if (then) then(rank, *engine);
    };
    for (const std::exception_ptr& error :
         comm::outcomes_of({.size = ranks, .threads = true}, body)) {
        found.emplace_back();
        if (!error) continue;
        try {
            std::rethrow_exception(error);
        } catch (const Error& why) {
            found.back() = why.problem();
        } catch (const std::exception& why) {
            found.back() = {.what = why.what()};
        }
    }
    return found;
}

OptimizerConfig muon() {
    return {.method = optim::Method::muon,
            .lr = 0.02,
            .weight_decay = 0.1,
            .momentum = 0.95,
            .nesterov = true,
            .adamw_lr = 3e-3};
}

Config Ranks::tight(Config config, int ranks) const {
    config.budgets.nvme = {
        {.path = comm::as_first_rank_says(directory_.path()), .size_bytes = 64 * kMiB}};
    const bool keeps = config.zero.second_shard != SecondShard::none;
    config.budgets.host_bytes = ranks * (keeps ? 700 : 500) * kKiB;
    if (optim::sends_momentum(config.optimizer.method)) {  // three turns' momentum pass
        config.budgets.host_bytes = ranks * 900 * kKiB;
        config.swap.state_on_nvme = 1;
    }
    if (config.device == DeviceKind::cuda) {
        config.budgets.host_bytes = ranks * 64 * kMiB;
        config.swap.state_on_nvme = 1;
    }
    config.swap.speculate = Speculate::all;
    const int64_t each = config.batch.micro_batches * config.parallel.tensor / ranks;
    config.swap.groups = each % 2 == 0 ? 2 : 1;
    config.io.direct = false;
    if (config.device == DeviceKind::cpu)
        config.budgets.device_bytes = smallest_device_budget(config, ranks);
    return config;
}

void Ranks::keep_on_nvme(Config& config) const {
    config.budgets.nvme = {
        {.path = comm::as_first_rank_says(directory_.path()), .size_bytes = 64 * kMiB}};
    config.swap.state_on_nvme = 1;
    config.swap.speculate = Speculate::all;
    config.io.direct = false;
}

void Ranks::read_documents(Config& config) const {
    std::vector<uint32_t> tokens(1500);
    std::vector<uint64_t> documents;
    for (size_t i = 0; i < tokens.size(); ++i) {
        tokens[i] = static_cast<uint32_t>((i * i / 7 + i) % 31);
        if (i * i % 37 == 0) documents.push_back(i);
    }
    config.data.tokens = comm::as_first_rank_says(directory_ / "documents.bin");
    if (comm::launched_rank().value_or(0) == 0)
        write_tokens(config.data.tokens, tokens, config.model.vocab, {}, documents);
    comm::await_all_ranks();
    config.data.isolate_documents = true;
}

void Ranks::expect_stages_equal(Config config, int ranks) const {
    config.zero.stage = 3;
    const Outcome first = run(config, ranks);
    Spread spread(4);  // the quick run has each stage once, and each tier
    for (const int64_t stage : {0, 1, 2, 3}) {
        SCOPED_TRACE("stage " + std::to_string(stage));
        config.zero.stage = stage;
        if (spread.takes()) expect_equal(run(config, ranks), first);
        if (spread.takes()) expect_equal(run(tight(config, ranks), ranks), first);
        Config on_device = config;
        on_device.swap.state_on_device = 0.6;
        if (spread.takes()) expect_equal(run(on_device, ranks), first);
        if (HasFailure()) return;
    }
}

}  // namespace ferry::train::of_ranks
