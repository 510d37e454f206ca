#include "read_ahead.h"

#include <algorithm>
#include <string>
#include <system_error>
#include <utility>

#include "base/process_limits.h"
#include "ferry/error.h"
#include "ferry/units.h"

namespace ferry::train {
namespace {

constexpr size_t kAhead = 4;  // parts

}  // namespace

ReadAhead::ReadAhead(std::vector<int64_t> counts, Read read)
    : counts_(std::move(counts)), read_(std::move(read)) {
    try {
        thread_ = std::thread([this] { read_all(); });
    } catch (const std::system_error& error) {
        refuse_thread("reading weights", error.what());
    }
}

ReadAhead::~ReadAhead() {
    {
        const std::lock_guard lock(mutex_);
        stopped_ = true;
    }
    changed_.notify_all();
    thread_.join();
}

void ReadAhead::read_all() {
    try {
        for (size_t i = 0; i < counts_.size(); ++i) {
            for (int64_t first = 0; first < counts_[i]; first += kPartMost) {
                Part part{.tensor = i};
                {
                    const std::lock_guard lock(mutex_);
                    if (!free_.empty()) {
                        part.values = std::move(free_.back());
                        free_.pop_back();
                    }
                }
                part.values.resize(static_cast<size_t>(std::min(kPartMost, counts_[i] - first)));
                read_(i, first, part.values);
                if (!put(std::move(part))) return;
            }
        }
    } catch (...) {
        const std::lock_guard lock(mutex_);
        failed_ = std::current_exception();
        changed_.notify_all();
    }
}

bool ReadAhead::put(Part part) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return stopped_ || ready_.size() < kAhead; });
    if (stopped_) return false;
    ready_.push_back(std::move(part));
    changed_.notify_all();
    return true;
}

ReadAhead::Part ReadAhead::take() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return failed_ || !ready_.empty(); });
    // What was read before the error may be of tensors that are whole; of this one it is not.
    if (ready_.empty()) std::rethrow_exception(failed_);
    Part part = std::move(ready_.front());
    ready_.pop_front();
    changed_.notify_all();
    return part;
}

void ReadAhead::give(size_t i, const std::function<void(std::span<const float>)>& sink) {
    for (int64_t given = 0; given < counts_[i];) {
        Part part = take();
        FERRY_CHECK(part.tensor == i, std::to_string(i));
        sink(part.values);
        given += std::ssize(part.values);
        const std::lock_guard lock(mutex_);
        free_.push_back(std::move(part.values));
    }
}

}  // namespace ferry::train
