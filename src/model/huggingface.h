// The config.json of a Hugging Face model, in and out. docs/models.md lists what is supported.
#pragma once

#include <string>
#include <string_view>

#include "model/model.h"

namespace ferry::model {

// The contents of a config.json.
struct Description {
    Shape shape{};
    int64_t context = 0;  // tokens of the longest text the model was made for
    bool drops = false;   // it asks for dropout, which ferry does not do
};

// Both spellings of RoPE's settings: rope_parameters (transformers 5), rope_theta and rope_scaling
// (4). Throws Trouble::usage naming `where`, the key and what is supported: for a model_type or an
// option that is not, and for sizes that do not fit each other.
Description read_description(std::string_view json, const std::string& where);

// The same for weights of another type: as it was read, but for the type. Throws usage, naming
// `where`, for what is no JSON object.
std::string with_type(std::string_view json, const std::string& where, DType type);
// The config.json of a model that ferry's own keys describe, which is a Llama.
std::string describe_llama(const Shape& shape, int64_t context, DType type);

// The beginning of names that files of a base model, saved without its head, leave out.
std::string_view optional_prefix(Family family);

}  // namespace ferry::model
