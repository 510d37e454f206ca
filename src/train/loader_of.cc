#include "loader_of.h"

#include <spdlog/fmt/fmt.h>

#include "base/log.h"
#include "ferry/train.h"

namespace ferry::train {

TokenLoader::Options loader_options(const Config& config, const model::Shape& shape,
                                    const zero::Partition& partition) {
    return {.path = config.data.tokens,
            .sequence = config.batch.sequence,
            .micro_batch = config.batch.micro_batch,
            .micro_batches = config.batch.micro_batches / partition.ranks,
            .model_vocab = shape.vocab,
            .held_back = config.data.held_back,
            .trains = !config.evaluate.only,
            .evaluation_micro_batches = config.evaluate.micro_batches,
            .seed = config.seed,
            .rank = partition.rank,
            .ranks = partition.ranks};
}

int64_t evaluation_sequences(const Config& config) {
    TokenLoader::Options options = loader_options(config, {});  // any vocabulary
    options.trains = false;
    return TokenLoader(options).evaluation_sequences();
}

void warn_of_text(const Config& config, const model::Description& made,
                  const TokenFileInfo& tokens) {
    if (config.batch.sequence > made.context) {
        log_warn(fmt::format("batch.sequence is {}, but the model was made for {} tokens",
                             config.batch.sequence, made.context));
    }
    // Tables are often padded by some rows, never to twice as many.
    if (config.model.path.empty() || !config.model.load ||
        tokens.vocabulary * 2 > static_cast<uint64_t>(made.shape.vocab))
        return;
    log_warn(
        fmt::format("{} holds tokens of a vocabulary of {}, the model knows {}: they may not be "
                    "its tokenizer's "
                    "(ferry data --ids makes a file of those)",
                    config.data.tokens, tokens.vocabulary, made.shape.vocab));
}

}  // namespace ferry::train
