// `ferry eval DIR DATA`: loss and perplexity of a Hugging Face model on a file of tokens.
#include <spdlog/fmt/fmt.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>

#include "commands.h"
#include "ferry/config.h"
#include "ferry/tokens.h"
#include "ferry/train.h"
#include "ranks.h"

namespace ferry::tools {
namespace {

struct EvalOptions {
    std::string model{}, tokens{};
    std::vector<std::string> overrides{};
    bool json = false;
};

// Nothing trains, so there is no state but the weights. `overrides` are keys of a configuration.
Config config_of(const EvalOptions& options) {
    nlohmann::json given{{"model", {{"path", options.model}, {"dropout", "ignore"}}},
                         {"data", {{"tokens", options.tokens}}},
                         {"batch", {{"sequence", 512}}},
                         {"freeze", {"*"}},
                         {"steps", 1}};
    return parse_config(given.dump(), "ferry eval", options.overrides);
}

// `rank` is this one's, once it is known.
void run_eval(const EvalOptions& options, int& rank) {
    Config config = config_of(options);
    config.evaluate.only = true;
    const int64_t sequences = train::evaluation_sequences(config);
    const auto executor = make_thread_executor();
    auto ranks = join_ranks(config, *executor);
    rank = rank_of(ranks.get());
    // Several micro-batches pass a layer's weights while they are there.
    constexpr int64_t kTogether = 8;
    const int64_t batches = ceil_div(sequences, config.batch.micro_batch);
    const int64_t each = ceil_div(batches, ranks ? ranks->size() : 1);
    config.batch.micro_batches = std::min(kTogether, each) * (ranks ? ranks->size() : 1);
    config.evaluate.micro_batches = round_up(batches, config.batch.micro_batches);
    const auto engine =
        train::Engine::make(config, {.executor = executor.get(), .ranks = std::move(ranks)});
    const train::Evaluation found = engine->evaluate();
    if (rank != 0) return;
    if (options.json) {
        const nlohmann::json line{{"loss", found.loss},
                                  {"perplexity", found.perplexity()},
                                  {"targets", found.targets},
                                  {"sequences", sequences},
                                  {"sequence", config.batch.sequence}};
        fmt::print("{}\n", line.dump());
    } else {
        fmt::print("loss {:.6f}, perplexity {:.6g} over {} targets in {} sequences of {} tokens\n",
                   found.loss, found.perplexity(), found.targets, sequences, config.batch.sequence);
    }
}

}  // namespace
}  // namespace ferry::tools

void add_eval_command(CLI::App& app) {
    using namespace ferry::tools;
    const auto options = std::make_shared<EvalOptions>();
    CLI::App* command =
        app.add_subcommand("eval", "loss and perplexity of a Hugging Face model on tokens");
    command->add_option("model", options->model, "directory with config.json and weights")
        ->required();
    command->add_option("data", options->tokens, "token file (ferry data)")->required();
    command
        ->add_option("--set", options->overrides,
                     "a key of a configuration: --set batch.sequence=1024 (default 512), "
                     "--set precision=bf16, --set device=cuda, --set budgets.device=16GiB")
        ->allow_extra_args(false);
    command->add_flag("--json", options->json, "one JSON object");
    command->footer(
        "The whole file is cut into sequences; what is left of it, less than one, is not looked "
        "at.");
    command->callback([options] {
        int rank = 0;
        naming_rank(rank, [&] { run_eval(*options, rank); });
    });
}
