#include "state_arrays.h"

#include <functional>
#include <numeric>

#include "checkpoint/checkpoint.h"
#include "zero/zero.h"

namespace ferry::train {

std::vector<int64_t> StateArray::shape(std::span<const int64_t> tensor) const {
    if (width.elements == 1) return {tensor.begin(), tensor.end()};
    const int64_t count =
        std::accumulate(tensor.begin(), tensor.end(), int64_t{1}, std::multiplies<>());
    return {ceil_div(count, width.elements)};
}

std::vector<StateArray> state_arrays(const StateFormat& format, DType compute, bool trainable) {
    using enum StateArray::What;
    std::vector<StateArray> arrays;
    if (!trainable || compute != DType::f32)
        arrays.push_back(
            {weight, "model", "", checkpoint::dtype_name(compute), {size_of(compute)}});
    if (!trainable) return arrays;
    if (compute == DType::f32)
        arrays.push_back({master, "model", ""});
    else
        arrays.push_back({master, "master", ".master"});
    const bool coded = format.moment_type == MomentType::int8;
    const std::string_view kept = coded                                    ? "U8"
                                  : format.moment_type == MomentType::bf16 ? "BF16"
                                                                           : "F32";
    const Width of_moment{size_of(format.moment_type)}, of_scale{4, kMomentBlock};
    if (format.moments > 0) {
        arrays.push_back({first_moment, "exp_avg", ".exp_avg", kept, of_moment});
        if (coded)
            arrays.push_back({first_scale, "exp_avg_scales", ".exp_avg_scales", "F32", of_scale});
    }
    if (format.moments > 1) {
        arrays.push_back({second_moment, "exp_avg_sq", ".exp_avg_sq", kept, of_moment});
        if (coded)
            arrays.push_back(
                {second_scale, "exp_avg_sq_scales", ".exp_avg_sq_scales", "F32", of_scale});
    }
    return arrays;
}

std::vector<StateArray> state_arrays_of(const planner::Plan& plan, const model::Layer& layer,
                                        const model::Tensor& tensor) {
    const StateFormat format =
        planner::format_of(plan.state, zero::segment_of(layer, tensor.offset));
    return state_arrays(format, plan.compute, tensor.trainable);
}

std::vector<StateArray> error_arrays(const zero::Partition& partition) {
    using enum StateArray::What;
    std::vector<StateArray> arrays;
    const auto of_ranks = [&](StateArray::What what, const char* file, const char* suffix) {
        for (int rank = 0; rank < partition.ranks; ++rank) {
            const std::string number = std::to_string(rank);
            arrays.push_back({what, file + number, suffix + number});
        }
    };
    of_ranks(error, "error_of_rank_", ".error.");
    arrays.push_back({owner_error, "owner_error", ".owner_error"});
    if (!partition.codecs.local_steps) return arrays;
    of_ranks(alone, "momentum_of_rank_", ".momentum.");
    of_ranks(moved, "moved_of_rank_", ".moved.");
    return arrays;
}

}  // namespace ferry::train
