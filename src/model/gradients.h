// Which gradients of inputs a block's backward pass computes: those on the way to something that
// trains, or to the layer below. The kernels go by it, and so does whoever counts their operations.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "ferry/units.h"
#include "model/model.h"

namespace ferry::model {

// In the order in which backward computes them: each asks for those before it.
struct InputGradients {
    bool down = false;    // of its last product's input
    bool up = false;      // of the MLP's first products' input, after the norm
    bool mid = false;     // of the residual between attention and the MLP
    bool output = false;  // of attention's output, and then of queries, keys and values
    bool qkv = false;     // of the input of their products, after the norm
};
// `needs_dx`: the layer below asks for the gradient of its output.
InputGradients input_gradients_of(const Layer& block, bool needs_dx);

// The tensors of a block's norms. Those that train, one after the other: the elements of each, and
// of all of them.
inline constexpr std::array kNormRoles{Role::attention_norm, Role::attention_norm_bias,
                                       Role::mlp_norm,       Role::mlp_norm_bias,
                                       Role::query_norm,     Role::key_norm};
inline bool is_norm(Role role) { return std::ranges::find(kNormRoles, role) != kNormRoles.end(); }
constexpr int64_t room_of_norm(int64_t elements) { return round_up(elements, int64_t{64}); }
int64_t norm_elements(const Layer& block);

}  // namespace ferry::model
