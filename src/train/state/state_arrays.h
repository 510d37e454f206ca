// The arrays that a checkpoint keeps of a tensor, in their order. It is written, read and shared
// among ranks by this one list.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ferry/dtype.h"
#include "ferry/units.h"
#include "planner/planner.h"

namespace ferry::train {

// How many bytes stand for how many elements.
struct Width {
    int64_t bytes = 4, elements = 1;
    // Bytes of `count` elements from the beginning of such a group.
    int64_t of(int64_t count) const { return ceil_div(count, elements) * bytes; }
};

struct StateArray {
    enum class What : uint8_t {
        weight,
        master,
        first_moment,
        first_scale,  // where moments are int8: one for each moment block
        second_moment,
        second_scale,
        error,        // of what one rank has sent, where momentum is exchanged (zero/feedback.h)
        owner_error,  // of what was returned
        alone,        // a rank's momentum since the last exchange, with local steps
        moved         // and what it has moved since
    };
    What what{};
    // How the names of this array's files begin. They hold no other arrays of the tensor: an array
    // is written part by part, one after the other.
    std::string file{};
    std::string suffix{};           // behind the tensor's name
    std::string_view dtype{"F32"};  // as safetensors calls it
    Width width{};
    // The array's shape for a tensor of this one: the same, or one number a moment block.
    std::vector<int64_t> shape(std::span<const int64_t> tensor) const;
};

// The arrays of a tensor whose state has this format. The master is in fp32, however the run keeps
// it; where it computes in fp32, that is the weight. A frozen tensor has its weight alone.
std::vector<StateArray> state_arrays(const StateFormat& format, DType compute, bool trainable);

// The same of a tensor of this layer.
std::vector<StateArray> state_arrays_of(const planner::Plan& plan, const model::Layer& layer,
                                        const model::Tensor& tensor);

// What else is kept of a tensor that trains where momentum is exchanged. These are every rank's
// errors of what it has sent, and the owners' errors. With local steps they are also what every
// rank did alone.
std::vector<StateArray> error_arrays(const zero::Partition& partition);

// Takes the same elements of each array, run after run.
using ArraySink = std::function<void(std::span<const std::span<const std::byte>> arrays)>;

}  // namespace ferry::train
