#include "loader_of.h"

#include <spdlog/fmt/fmt.h>

#include "base/log.h"
#include "ferry/error.h"
#include "ferry/train.h"

namespace ferry::train {

TokenLoader::Options loader_options(const Config& config, const model::Shape& shape, bool trains,
                                    const World& world) {
    return {.path = config.data.tokens,
            .sequence = config.batch.sequence,
            .micro_batch = config.batch.micro_batch,
            .micro_batches = config.batch.micro_batches / world.replicas(),
            .model_vocab = shape.vocab,
            .held_back = config.data.held_back,
            .trains = trains,
            .evaluation_micro_batches = config.evaluate.micro_batches,
            .isolates_documents = config.data.isolate_documents,
            .seed = config.seed,
            .rank = world.replica(),
            .ranks = world.replicas(),
            .part = world.part(),
            .parts = world.sequence};
}

int64_t evaluation_sequences(const Config& config) {
    const model::Shape any_vocabulary;
    return TokenLoader(loader_options(config, any_vocabulary, false)).evaluation_sequences();
}

void warn_of_text(const Config& config, const model::Description& made) {
    if (config.batch.sequence <= made.context) return;
    log_warn(fmt::format("batch.sequence is {}, but the model was made for {} tokens",
                         config.batch.sequence, made.context));
}

void check_vocabulary(const Config& config, const model::Description& made,
                      const TokenFileInfo& tokens) {
    // Tables are often padded by some rows, never to twice as many.
    const auto known = static_cast<uint64_t>(made.shape.vocab);
    if (config.model.path.empty() || !config.model.load || known / 2 < tokens.vocabulary) return;
    const std::string text =
        fmt::format("a vocabulary of {}, where the model's has {}", tokens.vocabulary, known);
    if (config.data.small_vocabulary == OnDoubt::ignore)
        return log_warn(config.data.tokens + " has " + text);
    throw Error(Trouble::usage,
                {.what = "the tokens can hardly be those of the model's own tokenizer",
                 .where = "data.tokens: " + config.data.tokens,
                 .measured = text,
                 .limit = "more than half of the model's",
                 .remedy = "write the ids of its tokenizer (ferry data --ids, docs/models.md), or "
                           "insist with data.small_vocabulary \"ignore\""});
}

}  // namespace ferry::train
