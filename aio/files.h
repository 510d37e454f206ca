// The files of one path: a locked header, and preallocated segments that hold the slots.
//
//   <path>/ferry.volume   4 KiB: magic, format version, run id, process id; flocked while in use
//   <path>/ferry.seg<N>   slots, nothing else
//
// The header is written before the first segment and removed after the last one, so that a segment
// without a header is never ours. On a raw block device the header is its first block.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ferry/aio.h"

namespace ferry::aio {

class PathFiles {
public:
    // Checks the path, locks it, deals with what is there. Throws Error.
    PathFiles(const PathOptions& path, const VolumeOptions& volume);
    ~PathFiles();
    PathFiles(const PathFiles&) = delete;
    PathFiles& operator=(const PathFiles&) = delete;

    int64_t alignment() const noexcept { return alignment_; }
    int segments() const noexcept { return segments_; }
    int64_t data_offset() const noexcept { return data_offset_; }
    int64_t capacity_bytes() const noexcept { return capacity_bytes_; }
    bool punts() const noexcept { return memory_backed_; }
    // Writes and reads a little in the first segment. bytes/s, for weighing paths.
    double measure_speed();
    // Preallocates segment `index`; they are created in order.
    void create_segment(int index, int64_t bytes);
    const std::vector<int>& descriptors() const noexcept { return descriptors_; }
    std::string segment_name(int index) const;

private:
    void release() noexcept;
    void check_directory();
    void open_directory();
    void open_device();
    bool lock_header(int flags);
    void judge_leftover();
    void write_header();
    void remove_segments() noexcept;
    void measure_room();
    void find_alignment();
    int open_segment(int index, int flags);
    [[noreturn]] void refuse(Trouble trouble, Problem problem) const;

    const PathOptions options_;
    const Leftover leftover_;
    const uint64_t run_id_;
    bool direct_;
    int header_ = -1;
    bool owned_ = false;  // the header is ours: we remove what lies here
    bool memory_backed_ = false;
    int segments_ = 1;
    int64_t alignment_ = 4096, data_offset_ = 0, capacity_bytes_ = 0;
    std::vector<int> descriptors_;
};

}  // namespace ferry::aio
