#include "state_arrays.h"

namespace ferry::train {

std::vector<StateArray> state_arrays(const StateFormat& format, DType compute, bool trainable) {
    using enum StateArray::What;
    std::vector<StateArray> arrays;
    if (!trainable || compute != DType::f32) arrays.push_back({weight, "model", "", compute});
    if (!trainable) return arrays;
    if (compute == DType::f32)
        arrays.push_back({master, "model", "", DType::f32});
    else
        arrays.push_back({master, "master", ".master", DType::f32});
    if (format.moments > 0)
        arrays.push_back({first_moment, "exp_avg", ".exp_avg", format.moment_type});
    if (format.moments > 1)
        arrays.push_back({second_moment, "exp_avg_sq", ".exp_avg_sq", format.moment_type});
    return arrays;
}

}  // namespace ferry::train
