// The arrays that a checkpoint keeps of a tensor, in their order: one list, by which it is written,
// read and shared among ranks.
#pragma once

#include <functional>
#include <span>
#include <string_view>
#include <vector>

#include "ferry/dtype.h"

namespace ferry::train {

struct StateArray {
    enum class What : uint8_t { weight, master, first_moment, second_moment };
    What what{};
    std::string_view file{};    // the files of all such arrays begin with it
    std::string_view suffix{};  // behind the tensor's name
    DType type = DType::f32;
};

// The master in fp32, however the run keeps it; where it computes in fp32, that is the weight. A
// frozen tensor has its weight alone.
std::vector<StateArray> state_arrays(const StateFormat& format, DType compute, bool trainable);

// Takes the same elements of each array, run after run.
using ArraySink = std::function<void(std::span<const std::span<const std::byte>> arrays)>;

}  // namespace ferry::train
