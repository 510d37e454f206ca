#include "save_queue.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "ferry/units.h"

namespace ferry::train {

int64_t SaveQueue::place_for(int64_t bytes) {
    const int64_t size = std::ssize(room_);
    if (parts_.empty()) head_ = tail_ = 0;
    const int64_t at = tail_ % size;
    const int64_t first = at + bytes > size ? tail_ + size - at : tail_;  // never around the end
    return first + bytes - head_ <= size ? first : -1;
}

void SaveQueue::copy(std::span<const std::span<const std::byte>> arrays, std::byte* to) {
    constexpr int64_t kPart = 1 * kMiB;
    struct Copy {
        std::span<const std::byte> from{};
        std::byte* to = nullptr;
    };
    std::vector<Copy> copies;
    for (std::span<const std::byte> array : arrays) {
        while (!array.empty()) {
            const auto part = array.first(static_cast<size_t>(std::min(kPart, std::ssize(array))));
            copies.push_back({part, to});
            array = array.subspan(part.size());
            to += part.size();
        }
    }
    team_.parallel(std::ssize(copies), [&](int64_t i) {
        const Copy& one = copies[static_cast<size_t>(i)];
        std::memcpy(one.to, one.from.data(), one.from.size());
    });
}

void SaveQueue::add(Part part) {
    parts_.push_back(std::move(part));
    changed_.notify_all();
}

void SaveQueue::put(std::span<const std::span<const std::byte>> arrays) {
    int64_t bytes = 0;
    for (const std::span<const std::byte> array : arrays) bytes += std::ssize(array);
    if (bytes == 0) return;
    std::unique_lock lock(mutex_);
    if (bytes > std::ssize(room_)) {
        if (closed_) return;
        add({.arrays = {arrays.begin(), arrays.end()}, .end = tail_});
        changed_.wait(lock, [&] { return closed_ || parts_.empty(); });
        return;
    }
    int64_t first = -1;
    changed_.wait(lock, [&] { return closed_ || (first = place_for(bytes)) >= 0; });
    if (closed_) return;
    tail_ = first + bytes;
    lock.unlock();
    std::byte* to = room_.data() + first % std::ssize(room_);
    copy(arrays, to);
    Part part{.end = first + bytes};
    for (const std::span<const std::byte> array : arrays) {
        part.arrays.emplace_back(to, array.size());
        to += array.size();
    }
    lock.lock();
    add(std::move(part));
}

void SaveQueue::end_tensor() {
    const std::lock_guard lock(mutex_);
    if (!closed_) add({.end = tail_});
}

bool SaveQueue::take_tensor(const ArraySink& sink) {
    for (;;) {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return closed_ || !parts_.empty(); });
        if (closed_) return false;
        const std::vector<std::span<const std::byte>> arrays = parts_.front().arrays;
        lock.unlock();
        if (!arrays.empty()) sink(arrays);
        lock.lock();
        if (closed_) return false;
        head_ = std::max(head_, parts_.front().end);
        parts_.pop_front();
        changed_.notify_all();
        if (arrays.empty()) return true;
    }
}

void SaveQueue::close() noexcept {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    changed_.notify_all();
}

bool SaveQueue::closed() const {
    const std::lock_guard lock(mutex_);
    return closed_;
}

}  // namespace ferry::train
