#include "loader_of.h"

#include <spdlog/fmt/fmt.h>

#include "base/log.h"
#include "data/fed_batches.h"
#include "ferry/error.h"
#include "ferry/train.h"

namespace ferry::train {

TokenLoader::Options loader_options(const Config& config, const model::Shape& shape, bool trains,
                                    const World& world) {
    TokenLoader::Options options{{.sequence = config.batch.sequence,
                                  .micro_batch = config.batch.micro_batch,
                                  .micro_batches = config.batch.micro_batches / world.replicas(),
                                  .evaluation_micro_batches = config.evaluate.micro_batches,
                                  .vocab = shape.vocab,
                                  .rank = world.replica(),
                                  .ranks = world.replicas(),
                                  .part = world.part(),
                                  .parts = world.sequence}};
    options.path = config.data.tokens;
    options.held_back = config.data.held_back;
    options.trains = trains;
    options.isolates_documents = config.data.isolate_documents;
    options.seed = config.seed;
    return options;
}

namespace {

void check_feeding(const Config& config, bool only_evaluates) {
    const auto refuse = [](const char* where, const char* measured, const char* remedy) {
        throw Error(Trouble::usage, {.what = "batches that a program feeds cannot do this",
                                     .where = where,
                                     .measured = measured,
                                     .remedy = remedy});
    };
    if (config.data.isolate_documents)
        refuse("data.isolate_documents", "true",
               "set it to false, or write a token file that knows its documents (ferry data)");
    if (only_evaluates)
        refuse("Runtime::only_evaluates", "true", "evaluate on a token file, data.tokens");
}

}  // namespace

std::unique_ptr<Batches> batches_of(const Config& config, const model::Shape& shape,
                                    const Runtime& runtime, const World& world) {
    const TokenLoader::Options options =
        loader_options(config, shape, !runtime.only_evaluates, world);
    if (!runtime.load_batch) return std::make_unique<TokenLoader>(options);
    check_feeding(config, runtime.only_evaluates);
    const FedBatches::Load load = [load = runtime.load_batch](int64_t step,
                                                              std::span<int32_t> tokens,
                                                              std::span<int32_t> targets) {
        load({step, tokens, targets});
    };
    const BatchShape& batches = options;
    return std::make_unique<FedBatches>(FedBatches::Options{batches, load});
}

int64_t evaluation_sequences(const Config& config) {
    const model::Shape any_vocabulary;
    return TokenLoader(loader_options(config, any_vocabulary, false)).evaluation_sequences();
}

void warn_of_text(const Config& config, const model::Description& made) {
    if (config.batch.sequence <= made.context) return;
    log_warn(fmt::format("batch.sequence is {}, but the model was made for {} tokens{}",
                         config.batch.sequence, made.context,
                         config.data.isolate_documents
                             ? ": a longer document would reach positions that it does not know"
                             : ""));
}

void check_vocabulary(const Config& config, const model::Description& made,
                      const TokenFileInfo& tokens) {
    // Tables are often padded by some rows, never to twice as many.
    const auto known = static_cast<uint64_t>(made.shape.vocab);
    if (config.model.path.empty() || !config.model.load || known / 2 < tokens.vocabulary) return;
    const std::string text =
        fmt::format("a vocabulary of {}, where the model's has {}", tokens.vocabulary, known);
    if (config.data.small_vocabulary == OnDoubt::ignore)
        return log_warn_of_run(config.data.tokens + " has " + text);
    throw Error(Trouble::usage,
                {.what = "the tokens can hardly be those of the model's own tokenizer",
                 .where = "data.tokens: " + config.data.tokens,
                 .measured = text,
                 .limit = "more than half of the model's",
                 .remedy = "write the ids of its tokenizer (ferry data --ids, docs/models.md), or "
                           "insist with data.small_vocabulary \"ignore\""});
}

}  // namespace ferry::train
