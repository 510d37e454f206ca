#include "model/gradients.h"

#include <algorithm>
#include <initializer_list>

namespace ferry::model {
namespace {

bool trains(const Layer& layer, std::initializer_list<Role> roles) {
    return std::ranges::any_of(roles, [&layer](Role role) {
        const Tensor* tensor = layer.find(role);
        return tensor != nullptr && tensor->trainable;
    });
}

}  // namespace

InputGradients input_gradients_of(const Layer& block, bool needs_dx) {
    using enum Role;
    InputGradients found;
    found.qkv = needs_dx || trains(block, {attention_norm, attention_norm_bias});
    found.output =
        found.qkv || trains(block, {query, key, value, query_key_value, query_bias, key_bias,
                                    value_bias, query_key_value_bias, query_norm, key_norm});
    found.mid = found.output || trains(block, {output, output_bias});
    found.up = found.mid || trains(block, {mlp_norm, mlp_norm_bias});
    found.down = found.up || trains(block, {gate, up, gate_bias, up_bias});
    return found;
}

int64_t norm_elements(const Layer& block) {
    int64_t elements = 0;
    for (const Role role : kNormRoles) {
        const Tensor* tensor = block.find(role);
        if (tensor != nullptr && tensor->trainable) elements += room_of_norm(tensor->count);
    }
    return elements;
}

}  // namespace ferry::model
