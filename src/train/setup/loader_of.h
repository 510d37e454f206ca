// The loader of a configuration.
#pragma once

#include <memory>

#include "data/tokens.h"
#include "ferry/config.h"
#include "ferry/train.h"
#include "model/huggingface.h"
#include "model/model.h"
#include "rank_share.h"

namespace ferry::train {

// `config` is the run's. The loader gives one rank's share of its micro-batches. `trains` false: it
// evaluates on the whole file.
TokenLoader::Options loader_options(const Config& config, const model::Shape& shape, bool trains,
                                    const World& world = {});
// The batches that a run sees: those of its token file, or what the runtime's program feeds.
std::unique_ptr<Batches> batches_of(const Config& config, const model::Shape& shape,
                                    const Runtime& runtime, const World& world);
// Warns where sequences are longer than those that the model was made for.
void warn_of_text(const Config& config, const model::Description& made);
// Refuses tokens that can hardly be of the tokenizer that the loaded weights were trained with,
// unless the configuration insists.
void check_vocabulary(const Config& config, const model::Description& made,
                      const TokenFileInfo& tokens);
// Sequences of the whole token file, for a configuration that only evaluates. Throws usage where
// there is none.
int64_t evaluation_sequences(const Config& config);

}  // namespace ferry::train
