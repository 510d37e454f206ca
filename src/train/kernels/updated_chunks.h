// Who hears of chunks as they are updated.
#pragma once

#include <cstddef>
#include <span>

#include "planner/planner.h"

namespace ferry::train {

class UpdatedChunks {
public:
    // Where a chunk's state and weights lie after its update.
    struct UpdatedBytes {
        std::span<std::byte> state{}, weight{};
    };
    virtual ~UpdatedChunks() = default;
    // The thread that updates calls this, in the order of the updates. The bytes stay as they are
    // until it returns.
    virtual void updated(const planner::Chunk& chunk, const UpdatedBytes& place) noexcept = 0;
};

}  // namespace ferry::train
