// A run's trace: slices of time on rows, written as a Chrome trace (chrome://tracing,
// ui.perfetto.dev), and NVTX ranges for NVIDIA's profilers.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "ferry/executor.h"

namespace ferry::trace {

using RowId = uint32_t;

struct Slice {
    RowId row = 0;
    std::string_view name{};  // must outlive the recording
    Nanos begin_ns = 0, end_ns = 0;
    int64_t bytes = 0;                         // moved or touched; 0: not said
    int64_t step = -1, layer = -1, item = -1;  // -1: not said
};

// A bounded recording. What does not fit any more is dropped and counted, so that a long run can be
// traced from its beginning without growing.
class Recording {
public:
    explicit Recording(size_t slices_max);
    // Before anything is recorded. Rows of one group, such as "planned", are drawn together.
    RowId add_row(std::string group, std::string name);
    // Any thread; never blocks, never allocates.
    void add(const Slice& slice) noexcept;
    // While it lives nothing is recorded, or counted as dropped: for work that is no part of what
    // is traced. One at a time; of no recording it does nothing.
    class Pause {
    public:
        explicit Pause(Recording* recording) noexcept : recording_(recording) { set(true); }
        ~Pause() { set(false); }
        Pause(const Pause&) = delete;
        Pause& operator=(const Pause&) = delete;

    private:
        void set(bool paused) noexcept {
            if (recording_) recording_->paused_.store(paused, std::memory_order_relaxed);
        }
        Recording* recording_;
    };

    // Below: while nobody adds.
    size_t size() const noexcept;
    size_t dropped() const noexcept;
    const Slice& operator[](size_t i) const { return slices_[i]; }
    // Replaces the file whole, or leaves what was there. Throws Trouble::io.
    void write(const std::string& path) const;

private:
    struct Row {
        std::string group, name;
    };
    std::vector<Row> rows_{};
    std::vector<Slice> slices_;
    std::atomic<size_t> next_ = 0;
    std::atomic<bool> paused_ = false;
};

// An NVTX range on the calling thread for as long as it lives; nothing in builds without CUDA, and
// next to nothing without a profiler. `name` ends with a zero.
class Range {
public:
    explicit Range(const char* name) noexcept;
    ~Range();
    Range(const Range&) = delete;
    Range& operator=(const Range&) = delete;
};

}  // namespace ferry::trace
