// Who hears of chunks as they are updated.
#pragma once

#include <cstddef>
#include <span>

#include "planner/planner.h"

namespace ferry::train {

class UpdatedChunks {
public:
    // Where a chunk's state and weights lie behind its update.
    struct UpdatedBytes {
        std::span<std::byte> state{}, weight{};
    };
    virtual ~UpdatedChunks() = default;
    // Of the updates' thread, in the order in which they are made. Until it returns the bytes stay.
    virtual void updated(const planner::Chunk& chunk, const UpdatedBytes& place) noexcept = 0;
};

}  // namespace ferry::train
