// `ferry eval DIR DATA`: loss and perplexity of a Hugging Face model on a file of tokens.
#include <spdlog/fmt/fmt.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>

#include "checkpoint/checkpoint.h"
#include "data/tokens.h"
#include "ferry/config.h"
#include "ferry/train.h"
#include "model/model.h"
#include "ranks.h"
#include "tools/commands.h"
#include "tools/options/override_options.h"
#include "tools/output/json_line.h"
#include "tools/output/output.h"
#include "tools/output/writable.h"
#include "tools/process/rank_error.h"
#include "train/inside.h"
#include "train/prediction/predictor.h"
#include "train/setup/from_config.h"
#include "train/setup/loader_of.h"

namespace ferry::tools {
namespace {

struct EvalOptions {
    std::string model{}, tokens{};
    Overrides overrides{};
    std::string logits{};
    int64_t logits_sequences = 1;
    bool json = false;
};

// Nothing trains, so there is no state but the weights. `overrides` are keys of a configuration.
Config config_of(const EvalOptions& options) {
    constexpr const char* kGiven = R"({"model": {"dropout": "ignore"}, "batch": {"sequence": 512},
                                       "freeze": ["*"], "steps": 1})";
    // Not within JSON, which has no room for a path that is no UTF-8.
    std::vector<std::string> keys{"model.path=" + options.model, "data.tokens=" + options.tokens};
    const std::vector<std::string>& more = options.overrides.keys;
    keys.insert(keys.end(), more.begin(), more.end());
    return options.overrides.checked(parse_config(kGiven, "ferry eval", keys));
}

// Room for the logits of the first sequences: [sequences, sequence, vocab]. Refused where the text
// has fewer, or where they are more than a file to look at: 10 GiB of them say no more than one.
class Logits {
public:
    Logits(const EvalOptions& options, const Config& config, int64_t sequences, int ranks)
        : file_(options.logits) {
        if (file_.empty()) return;
        if (ranks > 1) {
            throw Error(Trouble::usage, {.what = "logits are written by one rank",
                                         .where = "--logits " + file_,
                                         .measured = std::to_string(ranks) + " ranks",
                                         .remedy = "run ferry eval without mpirun or srun"});
        }
        check_writable("--logits", file_, checkpoint::kSafetensors);
        check_outside("--logits", file_, "the model", options.model);
        check_no_volume("--logits", file_, config.budgets.nvme);
        planner::PlanRequest request = train::request_of(config);
        request.trains = false;
        const auto plan = train::Predictor::make(config)->plan(request);
        const int64_t vocab = plan.layers.front().find(model::Role::token_table)->shape.front();
        shape_ = {options.logits_sequences, config.batch.sequence, vocab};
        const int64_t each = config.batch.sequence * vocab * size_of(DType::f32);
        const int64_t most = std::min(sequences, kMostBytes / each);
        if (shape_[0] > most) {
            throw Error(
                Trouble::usage,
                {.what = "these are too many logits",
                 .where = "--logits-sequences " + std::to_string(shape_[0]),
                 .measured = format_bytes(shape_[0] * each) + " in " + std::to_string(shape_[0]) +
                             " sequences",
                 .limit = format_bytes(kMostBytes) + ", and the text's " +
                          std::to_string(sequences) + " sequences",
                 .remedy = most > 0 ? "ask for " + std::to_string(most) + " or fewer"
                                    : "set batch.sequence to " +
                                          std::to_string(kMostBytes / (vocab * 4)) + " or less"});
        }
        values_.resize(static_cast<size_t>(shape_[0] * config.batch.sequence * vocab));
    }
    std::span<float> room() { return values_; }
    void write() const {
        if (file_.empty()) return;
        const std::vector<checkpoint::TensorInfo> tensor{{"logits", shape_}};
        checkpoint::write_safetensors(file_, tensor, DType::f32,
                                      [&](size_t, const checkpoint::Sink& sink) { sink(values_); });
    }

private:
    static constexpr int64_t kMostBytes = kGiB;
    std::string file_;
    std::vector<int64_t> shape_{};
    std::vector<float> values_{};
};

// The whole text in steps of several micro-batches, which pass a layer's weights while they are
// there.
Config batched(Config config, int64_t sequences, int ranks) {
    constexpr int64_t kTogether = 8;
    const int64_t batches = ceil_div(sequences, config.batch.micro_batch);
    const int64_t each = ceil_div(batches, ranks);
    config.batch.micro_batches = std::min(kTogether, each) * ranks;
    config.evaluate.micro_batches = round_up(batches, config.batch.micro_batches);
    return config;
}

// `rank` is this one's, once it is known.
void run_eval(const EvalOptions& options, int& rank) {
    const Config config = config_of(options);
    const int64_t sequences = train::evaluation_sequences(config);
    const auto executor = make_thread_executor();
    auto ranks = join_ranks(config, *executor, "eval", {{"--logits", !options.logits.empty()}});
    rank = rank_of(ranks.get());
    const int count = ranks ? ranks->size() : 1;
    Logits logits(options, config, sequences, count);
    const auto engine =
        train::Engine::make(batched(config, sequences, count),
                            train::with({.executor = executor.get(), .only_evaluates = true},
                                        {.ranks = std::move(ranks)}));
    const train::Evaluation found = engine->evaluate(logits.room());
    if (rank != 0) return;
    logits.write();
    if (options.json) {
        const nlohmann::json line{{"loss", found.loss},
                                  {"perplexity", found.perplexity()},
                                  {"targets", found.targets},
                                  {"sequences", sequences},
                                  {"sequence", config.batch.sequence},
                                  {"device_bytes", train::Inside(*engine).plan().device_bytes},
                                  {"host_bytes", train::Inside(*engine).plan().host_bytes}};
        print("{}", json_line(line));
    } else {
        print("loss {:.6f}, perplexity {:.6g} over {} targets in {} sequences of {} tokens\n",
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
    add_overrides(*command, options->overrides,
                  "a key of a configuration: --set batch.sequence=1024 (default 512), --set "
                  "precision=bf16, --set device=cuda");
    command->add_option("--logits", options->logits,
                        "write the logits of the first sequences (safetensors, fp32: \"logits\", "
                        "[sequences, tokens, vocabulary])");
    command
        ->add_option("--logits-sequences", options->logits_sequences,
                     "how many sequences --logits is about (default 1)")
        ->check(CLI::PositiveNumber)
        ->needs("--logits");
    command->add_flag("--json", options->json, "one JSON object");
    command->footer(
        "The whole file is cut into sequences; what is left of it, less than one, is not looked "
        "at.\n"
        "Example: ferry eval TUNED tokens.bin --set batch.sequence=1024");
    command->callback([options] {
        int rank = 0;
        naming_rank(rank, [&] { run_eval(*options, rank); });
    });
}
