// Which kind of device computes. ferry/device.h opens one; a configuration only names it.
#pragma once

#include <cstdint>
#include <string_view>

namespace ferry {

enum class DeviceKind : uint8_t { cpu, cuda };
constexpr std::string_view name_of(DeviceKind kind) {
    return kind == DeviceKind::cuda ? "cuda" : "cpu";
}

}  // namespace ferry
