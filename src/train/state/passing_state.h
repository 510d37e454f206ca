// State on its way back to storage: the updates that finish a step have all of it in host memory,
// chunk by chunk, and a checkpoint is read from there.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <mutex>
#include <vector>

#include "planner/planner.h"
#include "train/kernels/updated_chunks.h"

namespace ferry::train {

// Between the thread of the updates and one that reads. The updates wait with a chunk that goes
// back to storage, or to the device, until it was read: memory for a second version is then where
// the reader puts it, and there is no other.
class PassingState final : public UpdatedChunks {
public:
    // The plan must outlive it.
    explicit PassingState(const planner::Plan& plan) : plan_(plan), places_(plan.chunks.size()) {}

    void updated(const planner::Chunk& chunk, const UpdatedBytes& place) noexcept override;
    // After the last of them.
    void end() noexcept;
    // That the updates have waited until now: for copies, and for room.
    double held_back_seconds() const;

    // Of the reader, which goes through the chunks in their order: where this one lies, once it is
    // as the step leaves it. Those before it are not needed any more. What was not updated has no
    // place.
    struct Closed {};
    UpdatedBytes take(const planner::Chunk& chunk);  // throws Closed
    // Of either side: nothing is read any more, and nobody waits.
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
