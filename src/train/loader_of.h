// What the loader draws, from the configuration.
#pragma once

#include "data/tokens.h"
#include "ferry/config.h"
#include "model/huggingface.h"
#include "model/model.h"
#include "zero/zero.h"

namespace ferry::train {

// `config` is the run's. The loader gives one rank's share of its micro-batches.
TokenLoader::Options loader_options(const Config& config, const model::Shape& shape,
                                    const zero::Partition& partition = {});
// Where sequences are longer than those that the model was made for, and where the tokens can
// hardly be those of its own tokenizer.
void warn_of_text(const Config& config, const model::Description& made,
                  const TokenFileInfo& tokens);

}  // namespace ferry::train
