// A bounded queue from one thread to one other thread; never allocates after construction.
#pragma once

#include <atomic>
#include <bit>
#include <cstddef>
#include <vector>

namespace ferry::aio {

template <class T>
class Spsc {
public:
    explicit Spsc(size_t capacity) : items_(std::bit_ceil(capacity)) {}

    // Producer. False: full.
    bool push(const T& item) noexcept {
        const size_t tail = tail_.load(std::memory_order_relaxed);
        if (tail - head_.load(std::memory_order_acquire) == items_.size()) return false;
        items_[tail & (items_.size() - 1)] = item;
        // Sequentially consistent, so that "push, then look whether the consumer sleeps" and "say
        // that I sleep, then look whether something was pushed" cannot both miss each other.
        tail_.store(tail + 1, std::memory_order_seq_cst);
        return true;
    }

    // Consumer. False: empty.
    bool pop(T& item) noexcept {
        const size_t head = head_.load(std::memory_order_relaxed);
        if (head == tail_.load(std::memory_order_acquire)) return false;
        item = items_[head & (items_.size() - 1)];
        head_.store(head + 1, std::memory_order_release);
        return true;
    }

    size_t size() const noexcept {
        const size_t tail = tail_.load(std::memory_order_seq_cst);
        return tail - head_.load(std::memory_order_acquire);
    }
    bool empty() const noexcept { return size() == 0; }

private:
    std::vector<T> items_;
    alignas(64) std::atomic<size_t> head_ = 0;
    alignas(64) std::atomic<size_t> tail_ = 0;
};

}  // namespace ferry::aio
