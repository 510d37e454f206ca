// The objects of a store as data: what a plan says of them.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "ferry/error.h"
#include "ferry/swap.h"

namespace ferry::swap {

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

// Unlike bytes that are wrong, a transfer that failed says nothing against what is stored.
class TransferFailed : public Error {
public:
    explicit TransferFailed(const Error& error) : Error(error) {}
};

}  // namespace ferry::swap
