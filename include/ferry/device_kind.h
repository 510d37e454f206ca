// Which kind of device computes, and with which attention. ferry/device.h opens a device; a
// configuration only names them.
#pragma once

#include <cstdint>
#include <string_view>

namespace ferry {

enum class DeviceKind : uint8_t { cpu, cuda };
constexpr std::string_view name_of(DeviceKind kind) {
    return kind == DeviceKind::cuda ? "cuda" : "cpu";
}

// Whose attention a GPU runs. `best`: cuDNN's where this build has it and it has a deterministic
// kernel for the shape; it rounds probabilities to the compute type. Else ferry's own.
enum class AttentionKernels : uint8_t { best, ferry };

}  // namespace ferry
