// The objects of a store as data: what a plan says of them. Ids are those of ferry/lease.h.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "ferry/error.h"
#include "ferry/lease.h"

namespace ferry::swap {

enum class Tier : uint8_t { device, host, nvme };
std::string_view name_of(Tier tier);

// State with a home, the tier it lives on: a chunk's p, m, v; its weights; its gradient; a block
// input.
struct Object {
    Tier home = Tier::host;
    int64_t bytes = 0;
    int layer = -1;       // that it belongs to, for errors; -1: of none
    int64_t offset = 0;   // where a fixed home begins in the device or host arena
    int slot_class = -1;  // NVMe: the volume's; versioned in the host arena: of host_slots
    // Written copy-on-write: a version becomes current when its step is committed.
    bool versioned = false;
};

// A family of equally large host slots for versioned objects: a run of the host arena.
struct HostSlots {
    int64_t offset = 0, slot_bytes = 0, slots = 0;
};

// Bytes of the map of what outlives the process (Store::publish), where these are the objects.
int64_t map_bytes(std::span<const Object> objects);

// The parts of a table of objects; `parallel` may be empty.
struct Objects {
    std::vector<Object> objects{};
    std::vector<HostSlots> host_slots{};
    std::span<std::byte> host_arena{};
    Parallel parallel{};
};

// A transfer that failed. Unlike wrong bytes, it says nothing against what is stored.
class TransferFailed : public Error {
public:
    explicit TransferFailed(const Error& error) : Error(error) {}
};

}  // namespace ferry::swap
