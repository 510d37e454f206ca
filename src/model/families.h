// How each family calls its tensors, as data.
#pragma once

#include <string>

#include "model/model.h"

namespace ferry::model {

struct TensorName {
    Role role;
    std::string_view name;  // below the block's prefix, or whole
};

struct FamilyNames {
    Family family;
    std::string_view model_type;    // of config.json
    std::string_view architecture;  // the class of transformers
    std::string_view prefix;        // of the base model, which files may leave out
    std::string_view block;         // after the prefix; the block's index and a point follow
    bool input_major;               // matrices of blocks are [inputs, outputs], as GPT-2's Conv1D
    std::span<const TensorName> names;
};

const FamilyNames& names_of(Family family);
std::span<const FamilyNames> families();

// `tensor` is one of the family's. `block` -1: outside blocks.
std::string full_name(const FamilyNames& family, const TensorName& tensor, int64_t block);

}  // namespace ferry::model
