// The model of a configuration.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/text.h"
#include "ferry/config.h"
#include "model/huggingface.h"
#include "model/model.h"
#include "rank_share.h"

namespace ferry::train {

constexpr TextFile kModelFile{.name = "the model's configuration",
                              .remedy = "name the directory of a Hugging Face model"};
// The model's shape and context, from the configuration's own keys or its Hugging Face directory.
model::Description model_of(const Config& config);
// The model's config.json, with weights of this type. What was read from a directory stays as it
// was, except the type.
std::string description_of(const Config& config, const std::string& read, DType type);
std::string description_of(const Config& config, DType type);  // reads it
// Its decoder on these operations, as a run of so many ranks has it. Reads the same file, once.
model::Decoder decoder_of(const Config& config, int ranks, ops::Ops& ops);
// Its layers' buffers, as a run of so many ranks has them; where they share tensors, with this
// slice of those. `shape` is the whole model's, here as below. `moments`: in place of the
// configuration's. Throws usage where they cannot.
std::vector<model::Layer> layers_of(const Config& config, const model::Shape& shape, int ranks,
                                    int slice = 0, std::optional<MomentType> moments = {});
// Which tensors keep fp32 moments beside coded ones. Refers to the configuration.
model::CodedMoments coded_moments_of(const Config& config, std::optional<MomentType> moments = {});
// Throws usage where the optimizer is one of several ranks, and there is one.
void require_ranks(const Config& config, int ranks);
struct TensorCount {
    int64_t tensors = 0, elements = 0;
    void add(const model::Tensor& tensor) { tensors += 1, elements += tensor.count; }
};
// Says which of the tensors that train have coded moments, and which have not, where
// `optimizer.moments` is int8.
struct CodedParts {
    TensorCount coded{}, fp32{};
};
CodedParts coded_parts(const std::vector<model::Layer>& layers);
// Which tensors Muon updates, and which AdamW, in a sentence; empty without Muon.
std::string muon_rule(const Config& config, const std::vector<model::Layer>& layers, int ranks);
// Tiles that the configuration leaves open follow from the model's shape, the batch and the kind of
// device. `world`: of the rank that has them.
model::Numerics numerics_of(const Config& config, const model::Shape& shape,
                            const World& world = {});
// The same, except for tiles that were asked for and cut nothing. They have what `auto` would make
// of them, which gives the same numbers. So a run is identified by that.
Config without_idle_tiles(Config config, const model::Shape& shape);
std::string layer_name(const std::vector<model::Layer>& layers, int64_t layer);

}  // namespace ferry::train
