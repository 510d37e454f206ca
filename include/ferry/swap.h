// The objects of the tiered store, each at home on one tier. An embedder leases them (lease.h). A
// training run's store replays the schedules that move them.
#pragma once

#include <cstdint>
#include <functional>
#include <string_view>

namespace ferry::swap {

// An object is state with a home: a chunk's p, m, v; its weights; its gradient; a block input.
using ObjectId = uint32_t;
constexpr ObjectId kNoObject = ~ObjectId{0};

enum class Tier : uint8_t { device, host, nvme };
std::string_view name_of(Tier tier);

// Tasks of a lane start in order: kernels, copies to the device and back, updates by the team,
// checks, storage, exchanges of ranks.
enum class Lane : uint8_t { compute, h2d, d2h, team, check, read, write, comm };
std::string_view name_of(Lane lane);

// The tier that an object lives on.
struct Object {
    Tier home = Tier::host;
    int64_t bytes = 0;
    int layer = -1;       // that it belongs to, for errors; -1: of none
    int64_t offset = 0;   // where a fixed home begins in the device or host arena
    int slot_class = -1;  // NVMe: the volume's; versioned in the host arena: of host_slots
    bool versioned =
        false;  // written copy-on-write; a version becomes current when its step is committed
};

// Calls body(0) to body(count - 1) on several threads; may itself be called by several.
using Parallel = std::function<void(int64_t count, const std::function<void(int64_t)>& body)>;

}  // namespace ferry::swap
