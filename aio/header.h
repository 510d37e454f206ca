// The header of a path's files: whose they are, and how far their layout went. It is locked while
// the volume is in use, so whoever finds it unlocked knows that its writer has ended.
#pragma once

#include <cstdint>
#include <string>

#include "ferry/aio.h"

namespace ferry::aio {

constexpr bool reuses(Leftover leftover) {
    return leftover == Leftover::reuse || leftover == Leftover::reuse_any;
}

constexpr int64_t kHeaderBytes = 4096;
constexpr int kSegmentsMax = 256;  // a path

// On disk, at the start of the header's block.
struct Header {
    char magic[8];
    uint32_t version;
    int32_t pid;
    uint64_t run_id;
    int32_t segments;    // at most this many lie beside the header
    int32_t laid_out;    // 1: every byte of them was written
    int64_t device_end;  // of the slots on a raw device
};

class HeaderFile {
public:
    // Opens, creates (in a directory) and locks. Throws Error where another process holds it.
    HeaderFile(std::string name, bool raw_device);
    ~HeaderFile();  // unlocks
    HeaderFile(const HeaderFile&) = delete;
    HeaderFile& operator=(const HeaderFile&) = delete;

    int file() const noexcept { return file_; }
    // What a killed run left: true and its header, or false. Throws what may not be taken over: a
    // foreign file, a newer format, and what `leftover` does not allow.
    bool find_leftover(Leftover leftover, uint64_t run_id, Header& found) const;
    // With magic, version and process filled in; on stable storage at return. Throws Error.
    void write(Header header) const;
    void erase() noexcept;  // the path is free for anyone again

private:
    bool lock();
    void refuse_leftover(const Header& header, bool truncated, uint64_t run_id) const;

    const std::string name_;
    const bool raw_device_;
    int file_ = -1;
};

}  // namespace ferry::aio
