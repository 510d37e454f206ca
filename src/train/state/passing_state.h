// Hands state to a checkpoint on its way back to storage. The updates that finish a step have all
// of it in host memory, chunk by chunk, and the checkpoint is read from there.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <mutex>
#include <vector>

#include "planner/planner.h"
#include "train/kernels/updated_chunks.h"

namespace ferry::train {

// It stands between the thread of the updates and one that reads. A chunk that goes back to
// storage, or to the device, is held until it was read. There is no memory for a second version but
// where the reader puts it.
class PassingState final : public UpdatedChunks {
public:
    // The plan must outlive it.
    explicit PassingState(const planner::Plan& plan) : plan_(plan), places_(plan.chunks.size()) {}

    void updated(const planner::Chunk& chunk, const UpdatedBytes& place) noexcept override;
    // After the last of them.
    void end() noexcept;
    // Seconds that the updates have waited until now, for copies and for room.
    double held_back_seconds() const;

    // The reader calls this, chunk after chunk in their order. It returns where the chunk lies once
    // the step has updated it. The chunks before it may then go. Spans are empty for what was not
    // updated.
    struct Closed {};
    UpdatedBytes take(const planner::Chunk& chunk);  // throws Closed
    // Either side may call it. Afterwards nothing is read, and nobody waits.
    void close() noexcept;

private:
    size_t index_of(const planner::Chunk& chunk) const;
    bool stays(const planner::Chunk& chunk) const;

    const planner::Plan& plan_;
    mutable std::mutex mutex_;
    std::condition_variable changed_;
    std::vector<UpdatedBytes> places_;  // of the chunks
    size_t ready_ = 0, taken_ = 0;      // ready_: chunks before it are as the step leaves them
    double held_back_ = 0;              // seconds
    bool closed_ = false;
};

}  // namespace ferry::train
