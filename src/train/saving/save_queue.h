// Holds what was read of the state and is not written yet. It stands between the thread that trains
// and the one that writes a checkpoint.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <span>
#include <vector>

#include "ferry/team.h"
#include "train/state/state_arrays.h"

namespace ferry::train {

// Parts of tensors in their order. They are copied into `room`, which must outlive the queue. A
// part that is larger than the room is handed over in place, and put() waits until it was taken.
// One thread puts and one takes.
class SaveQueue {
public:
    // The team copies.
    SaveQueue(std::span<std::byte> room, Team& team) : room_(room), team_(team) {}

    // A part of the tensor that is under way. Waits for room. Does nothing once the queue was
    // closed.
    void put(std::span<const std::span<const std::byte>> arrays);
    void end_tensor();
    // Gives the sink the parts of one tensor. Throws what the sink throws; false: the queue was
    // closed before its end.
    [[nodiscard]] bool take_tensor(const ArraySink& sink);
    // Either side may call it. Nothing more is put or taken afterwards. Wakes the other side.
    void close() noexcept;
    bool closed() const;

private:
    struct Part {
        std::vector<std::span<const std::byte>> arrays{};  // none: the tensor ends
        int64_t end = 0;                                   // where its bytes end, as `tail_` counts
    };
    // Where `bytes` may be copied to, counted as `tail_`. Below 0: there is no room by now.
    int64_t place_for(int64_t bytes);
    void copy(std::span<const std::span<const std::byte>> arrays, std::byte* to);
    void add(Part part);

    const std::span<std::byte> room_;
    Team& team_;
    mutable std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<Part> parts_{};
    // Bytes put and taken since the room was last empty, with what was left out at its end.
    int64_t tail_ = 0, head_ = 0;
    bool closed_ = false;
};

}  // namespace ferry::train
