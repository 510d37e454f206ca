// What a path is like: its room, alignment and speed, and how its file system treats transfers.
#include <fcntl.h>
#include <linux/fs.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <limits>

#include "base/files.h"
#include "base/log.h"
#include "buffer.h"
#include "errors.h"
#include "files.h"
#include "probe.h"

namespace ferry::aio {
namespace {

constexpr int64_t kAlignmentMin = 4096;  // smaller writes make most drives read, modify, write

}  // namespace

void PathFiles::measure_room() {
    if (options_.raw_device) {
        uint64_t bytes = 0;
        if (ioctl(header_->file(), BLKGETSIZE64, &bytes) != 0)
            refuse(Trouble::io,
                   problem_of("the device's size cannot be read", options_.path, errno));
        capacity_bytes_ = static_cast<int64_t>(bytes) - data_offset_;
    } else {
        struct statvfs room {};
        if (statvfs(options_.path.c_str(), &room) != 0)
            refuse(Trouble::io, problem_of("free space cannot be read", options_.path, errno));
        // A file system without blocks, such as ramfs, does not know how much it has left.
        capacity_bytes_ = room.f_blocks == 0
                              ? std::numeric_limits<int64_t>::max() / 2
                              : static_cast<int64_t>(room.f_bavail * room.f_frsize) + kept_bytes_;
    }
    if (options_.size_bytes == 0) return;
    if (options_.size_bytes > capacity_bytes_) {
        const int64_t missing = options_.size_bytes - capacity_bytes_;
        refuse(Trouble::does_not_fit,
               {.what = "the path has too little free space: " + std::to_string(missing) +
                        " bytes (" + format_bytes(missing) + ") are missing",
                .measured = std::to_string(capacity_bytes_) + " bytes free",
                .limit = std::to_string(options_.size_bytes) + " bytes asked for",
                .remedy = "free some space, or give the path a smaller size"});
    }
    // A raw device has its header's block before the slots in any case.
    const int64_t header = options_.raw_device ? 0 : kHeaderBytes;
    capacity_bytes_ = std::max<int64_t>(0, options_.size_bytes - header);
}

void PathFiles::find_alignment() {
    if (descriptors_.empty()) descriptors_.push_back(open_slot_file(0));
    alignment_ = kAlignmentMin;
#ifdef STATX_DIOALIGN
    struct statx status {};
    if (!direct_ || statx(descriptors_[0], "", AT_EMPTY_PATH, STATX_DIOALIGN, &status) != 0) return;
    if (!(status.stx_mask & STATX_DIOALIGN)) return;  // says nothing (tmpfs)
    if (status.stx_dio_offset_align == 0) {
        log_warn("aio: " + options_.path + " does no direct I/O: buffered, and slower for it");
        fcntl(descriptors_[0], F_SETFL, fcntl(descriptors_[0], F_GETFL) & ~O_DIRECT);
        direct_ = false;
        return;
    }
    alignment_ = std::max({alignment_, static_cast<int64_t>(status.stx_dio_offset_align),
                           static_cast<int64_t>(status.stx_dio_mem_align)});
#endif
}

// Small enough for any path, large enough to measure.
int64_t PathFiles::probe_bytes() const {
    constexpr int64_t kMost = 8 * kMiB, kLeast = 64 * kKiB;
    const int64_t room = std::min(capacity_bytes_ / 2, file_size_limit() - data_offset_);
    return room < kLeast ? 0 : round_down(std::min(room, kMost), kLeast);
}

void PathFiles::probe() {
    const int64_t room = probe_bytes();
    const int file = descriptors_[0];
    const bool fixed = options_.raw_device || options_.files > 0 || kept_ > 0;
    probe_.alignment = alignment_;
    if (options_.raw_device || !fixed) file_count_ = 1;
    if (room == 0) return;
    // A growing file would be a case of its own; where this fails the probe says so.
    if (!options_.raw_device && fallocate(file, 0, 0, room) != 0) return;
    Findings& known = findings_of(file, direct_);
    const std::lock_guard measuring(known.measuring);
    constexpr int64_t kRead = 256 * kKiB;
    if (!known.only_copies)
        known.only_copies = reads_only_copy(probe_, file, data_offset_, std::min(room, kRead));
    only_copies_ = *known.only_copies;
    if (!fixed && !known.writers_take_turns) known.writers_take_turns = several_files_pay(room);
    if (!fixed && known.writers_take_turns.value_or(false)) file_count_ = kFilesMany;
    if (only_copies_ || file_count_ > 1)
        log_debug("aio: " + options_.path + ": " + std::to_string(file_count_) + " slot file(s)" +
                  (only_copies_ ? ", no device behind it" : ""));
}

bool PathFiles::several_files_pay(int64_t room) {
    // Long enough to write something else meanwhile, and on a drive, which it wears, no longer.
    constexpr int64_t kOnADrive = 2 * kMiB;
    const int64_t bytes = only_copies_ ? room : std::min(room, kOnADrive);
    const std::string name = slot_file_name(1);
    // Goes however this ends: what stays of a refused start would refuse the next one.
    struct Passing {
        ~Passing() {
            close(file);
            if (named) remove_plain_file(name);
        }
        const std::string& name;
        const bool named;
        const int file;
    };
    const Passing other{name, !replaces_,
                        replaces_ ? open_slot_file(1) : open_file(name, O_CREAT | O_EXCL)};
    return fallocate(other.file, 0, 0, bytes) == 0 &&
           writers_take_turns(probe_, descriptors_[0], other.file, bytes);
}

std::string PathFiles::why_no_polling(unsigned flags) {
    return aio::why_no_polling(probe_, descriptors_[0], data_offset_, flags);
}

double PathFiles::measure_speed() {
    constexpr int64_t kBlockMost = 4 * kMiB, kProbe = 16 * kMiB;
    Findings& known = findings_of(descriptors_[0], direct_);
    const std::lock_guard measuring(known.measuring);
    if (known.bytes_per_s) return *known.bytes_per_s;
    const int64_t room = std::min({kProbe, capacity_bytes_, file_size_limit()});
    const int64_t block = std::min(kBlockMost, round_down(room, alignment_));
    if (block == 0) return 1;
    const int64_t bytes = round_down(room, block);
    const AlignedBuffer memory = aligned_buffer(alignment_, block);
    std::byte* const buffer = memory.get();
    const auto size = static_cast<size_t>(block);
    memset(buffer, 0x5a, size);
    using Clock = std::chrono::steady_clock;
    const auto begin = Clock::now();
    int64_t moved = 0;
    for (int64_t at = 0; at < bytes; at += block) {
        const ssize_t wrote = pwrite(descriptors_[0], buffer, size, data_offset_ + at);
        const ssize_t read = pread(descriptors_[0], buffer, size, data_offset_ + at);
        if (wrote > 0) probe_.bytes_written += wrote;
        if (wrote != block || read != block) break;  // the layout will find and name what failed
        moved += wrote + read;
    }
    const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
    if (moved == 0) return 1;
    return *(known.bytes_per_s = static_cast<double>(moved) / seconds);
}

}  // namespace ferry::aio
