// Tensors that are read while what came before them is written.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "ferry/units.h"

namespace ferry::train {

// A thread reads tensor after tensor, a few parts ahead of who takes them.
class ReadAhead {
public:
    static constexpr int64_t kPartMost = 2 * kMiB;  // elements
    // Elements [first, first + values.size()) of tensor i, in order; called by that thread alone.
    using Read = std::function<void(size_t i, int64_t first, std::span<float> values)>;
    // `counts`: the elements of each tensor. Throws does_not_fit where no thread can be made.
    ReadAhead(std::vector<int64_t> counts, Read read);
    ~ReadAhead();  // what was not taken is not read
    ReadAhead(const ReadAhead&) = delete;
    ReadAhead& operator=(const ReadAhead&) = delete;

    // All of tensor i, in parts; each tensor once, in order. Throws what reading threw.
    void give(size_t i, const std::function<void(std::span<const float>)>& sink);

private:
    struct Part {
        size_t tensor = 0;
        std::vector<float> values{};
    };
    void read_all();
    // False: nobody wants more.
    bool put(Part part);
    Part take();

    const std::vector<int64_t> counts_;
    const Read read_;
    std::mutex mutex_{};
    std::condition_variable changed_{};
    std::deque<Part> ready_{};
    std::vector<std::vector<float>> free_{};  // of parts that were taken
    std::exception_ptr failed_{};
    bool stopped_ = false;
    std::thread thread_{};
};

}  // namespace ferry::train
