#include "files.h"

#include <fcntl.h>
#include <linux/fs.h>
#include <linux/magic.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <limits>

#include "errors.h"

namespace ferry::aio {
namespace {

constexpr int64_t kHeaderBytes = 4096;
constexpr int64_t kRawDataOffset = kMiB;  // keeps slots aligned to any erase block that matters
constexpr int64_t kAlignmentMin = 4096;   // smaller writes make most drives read, modify, write
constexpr uint32_t kFormatVersion = 1;
constexpr char kMagic[8] = {'f', 'e', 'r', 'r', 'y', 'v', 'o', 'l'};
constexpr int kMemorySegments = 8;

struct Header {
    char magic[8];
    uint32_t version;
    int32_t pid;
    uint64_t run_id;
    int32_t segments;
    int32_t reserved;
};

Problem problem_of(std::string what, std::string where, int error) {
    return {.what = std::move(what) + ": " + strerror(error),
            .where = std::move(where),
            .remedy = remedy_for(error)};
}

std::string hex(uint64_t value) {
    char text[20];
    snprintf(text, sizeof text, "%016lx", static_cast<unsigned long>(value));
    return text;
}

}  // namespace

PathFiles::PathFiles(const PathOptions& path, const VolumeOptions& volume)
    : options_(path), leftover_(volume.leftover), run_id_(volume.run_id), direct_(volume.direct) {
    try {
        options_.raw_device ? open_device() : open_directory();
        write_header();
        measure_room();
        if (options_.raw_device) descriptors_.push_back(open_segment(0, 0));
        find_alignment();
    } catch (...) {
        release();
        throw;
    }
}

PathFiles::~PathFiles() { release(); }

void PathFiles::release() noexcept {
    for (const int file : descriptors_) {
        // A ring lets go of its files some time after it was closed; the space must be free now,
        // for the next volume.
        if (owned_ && !options_.raw_device && ftruncate(file, 0) != 0)
            log_warn("aio: a segment in " + options_.path + " could not be emptied");
        close(file);
    }
    descriptors_.clear();
    if (owned_ && options_.raw_device) {
        // Without the magic the device is free for anyone again.
        alignas(4096) static const char kZero[kHeaderBytes] = {};
        if (pwrite(header_, kZero, kHeaderBytes, 0) != kHeaderBytes)
            log_warn("aio: the header on " + options_.path + " could not be erased");
    } else if (owned_) {
        remove_segments();
        unlink((options_.path + "/ferry.volume").c_str());
    }
    owned_ = false;
    if (header_ >= 0) close(header_);  // unlocks
    header_ = -1;
}

void PathFiles::refuse(Trouble trouble, Problem problem) const {
    if (problem.where.empty()) problem.where = options_.path;
    throw Error(trouble, std::move(problem));
}

// ---------------------------------------------------------------- lock and header

void PathFiles::check_directory() {
    struct stat status {};
    if (stat(options_.path.c_str(), &status) != 0)
        refuse(Trouble::usage,
               {.what = std::string("the storage path cannot be used: ") + strerror(errno),
                .remedy = "create the directory, or correct the path"});
    if (S_ISBLK(status.st_mode))
        refuse(Trouble::usage, {.what = "the storage path is a block device",
                                .remedy = "give a directory on it; or set raw_device, which "
                                          "destroys everything on the device"});
    if (!S_ISDIR(status.st_mode))
        refuse(Trouble::usage, {.what = "the storage path is not a directory",
                                .remedy = "give a directory on the drive"});
    if (access(options_.path.c_str(), W_OK | X_OK) != 0)
        refuse(Trouble::usage,
               {.what = std::string("the storage path is not writable: ") + strerror(errno),
                .remedy = "change its owner or mode, or give another path"});
}

void PathFiles::open_directory() {
    check_directory();
    struct statfs system {};
    statfs(options_.path.c_str(), &system);
    memory_backed_ = system.f_type == TMPFS_MAGIC;
    // tmpfs takes one lock an inode for writing, a disk's file system does not.
    segments_ = options_.segments ? options_.segments : memory_backed_ ? kMemorySegments : 1;
    // Between opening and locking the owner may remove the file: then the lock is on nothing.
    while (!lock_header(O_CREAT)) {
    }
    judge_leftover();
    for (int i = 0; i < segments_; ++i) {
        if (access(segment_name(i).c_str(), F_OK) == 0)
            refuse(Trouble::usage, {.what = "a file of this name exists and is not ferry's",
                                    .where = segment_name(i),
                                    .remedy = "move or delete it, or give another path"});
    }
}

// False: another process removed the header before the lock was taken.
bool PathFiles::lock_header(int flags) {
    const std::string name = options_.raw_device ? options_.path : options_.path + "/ferry.volume";
    header_ = open(name.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW | flags, 0600);
    if (header_ < 0)
        refuse(errno == EROFS || errno == EACCES ? Trouble::usage : Trouble::io,
               problem_of("the volume's header cannot be opened", name, errno));
    if (flock(header_, LOCK_EX | LOCK_NB) != 0) {
        Header header{};
        const bool known = pread(header_, &header, sizeof header, 0) == sizeof header &&
                           memcmp(header.magic, kMagic, sizeof kMagic) == 0;
        refuse(Trouble::usage, {.what = "the storage path is in use by another ferry",
                                .measured = known ? "process " + std::to_string(header.pid) : "",
                                .remedy = "wait for it, stop it, or give another path"});
    }
    struct stat opened {
    }, named{};
    if (options_.raw_device) return true;
    if (fstat(header_, &opened) == 0 && stat(name.c_str(), &named) == 0 &&
        opened.st_ino == named.st_ino)
        return true;
    close(header_);
    header_ = -1;
    return false;
}

// We hold the lock, so whoever wrote this header has ended.
void PathFiles::judge_leftover() {
    Header header{};
    const ssize_t got = pread(header_, &header, sizeof header, 0);
    if (got == 0) return;  // new, or killed before the header was written
    const std::string name = options_.path + "/ferry.volume";
    constexpr auto kHeaderSize = static_cast<ssize_t>(sizeof header);
    if (got < 0) refuse(Trouble::io, problem_of("the volume's header cannot be read", name, errno));
    const bool truncated = got < kHeaderSize;
    if (got < static_cast<ssize_t>(sizeof kMagic) ||
        memcmp(header.magic, kMagic, sizeof kMagic) != 0)
        refuse(Trouble::usage, {.what = "a file of this name exists and is not ferry's",
                                .where = name,
                                .remedy = "move or delete it, or give another path"});
    if (!truncated && header.version > kFormatVersion)
        refuse(Trouble::usage, {.what = "the volume was written by a newer ferry",
                                .where = name,
                                .measured = "format " + std::to_string(header.version),
                                .limit = "format " + std::to_string(kFormatVersion),
                                .remedy = "update ferry, or delete the ferry.* files there"});
    const std::string whose = truncated ? "a truncated header"
                                        : "process " + std::to_string(header.pid) + ", run " +
                                              hex(header.run_id) +
                                              (header.run_id == run_id_ ? "" : " (another run)");
    if (leftover_ == Leftover::refuse)
        refuse(Trouble::usage,
               {.what = "files of a killed run are left here",
                .where = name,
                .measured = whose,
                .remedy = "delete the ferry.* files there, or allow their removal"});
    log_info("aio: removing what a killed run left in " + options_.path + ": " + whose);
    owned_ = true;
    segments_ = std::max({segments_, header.segments, 1});
    remove_segments();
    segments_ = options_.segments ? options_.segments : memory_backed_ ? kMemorySegments : 1;
}

void PathFiles::write_header() {
    alignas(4096) char block[kHeaderBytes] = {};
    Header header{.magic = {},
                  .version = kFormatVersion,
                  .pid = getpid(),
                  .run_id = run_id_,
                  .segments = segments_,
                  .reserved = 0};
    memcpy(header.magic, kMagic, sizeof kMagic);
    memcpy(block, &header, sizeof header);
    owned_ = true;
    if (pwrite(header_, block, kHeaderBytes, 0) == kHeaderBytes && fdatasync(header_) == 0) return;
    const int error = errno;
    refuse(error == ENOSPC ? Trouble::does_not_fit : Trouble::io,
           problem_of("the volume's header cannot be written", options_.path, error));
}

void PathFiles::remove_segments() noexcept {
    for (int i = 0; i < segments_; ++i) unlink(segment_name(i).c_str());
}

// ---------------------------------------------------------------- segments

std::string PathFiles::segment_name(int index) const {
    return options_.raw_device ? options_.path
                               : options_.path + "/ferry.seg" + std::to_string(index);
}

void PathFiles::open_device() {
    struct stat status {};
    if (stat(options_.path.c_str(), &status) != 0 || !S_ISBLK(status.st_mode))
        refuse(Trouble::usage, {.what = "raw_device is set, but the path is no block device",
                                .remedy = "clear raw_device to use a directory"});
    data_offset_ = kRawDataOffset;
    // O_EXCL on a device: refused while it is mounted or otherwise claimed.
    lock_header(O_EXCL);
    Header header{};
    const bool ours = pread(header_, &header, sizeof header, 0) == sizeof header &&
                      memcmp(header.magic, kMagic, sizeof kMagic) == 0;
    if (ours && header.version > kFormatVersion)
        refuse(Trouble::usage, {.what = "the volume was written by a newer ferry",
                                .measured = "format " + std::to_string(header.version),
                                .limit = "format " + std::to_string(kFormatVersion),
                                .remedy = "update ferry, or erase the device's first block"});
    if (ours && leftover_ == Leftover::refuse)
        refuse(Trouble::usage, {.what = "the device holds the volume of a killed run",
                                .measured = "run " + hex(header.run_id),
                                .remedy = "allow its removal, or erase the first block"});
}

void PathFiles::measure_room() {
    if (options_.raw_device) {
        uint64_t bytes = 0;
        if (ioctl(header_, BLKGETSIZE64, &bytes) != 0)
            refuse(Trouble::io,
                   problem_of("the device's size cannot be read", options_.path, errno));
        capacity_bytes_ = static_cast<int64_t>(bytes) - data_offset_;
    } else {
        struct statvfs room {};
        if (statvfs(options_.path.c_str(), &room) != 0)
            refuse(Trouble::io, problem_of("free space cannot be read", options_.path, errno));
        // A file system without blocks, such as ramfs, does not know how much it has left.
        capacity_bytes_ = room.f_blocks == 0 ? std::numeric_limits<int64_t>::max() / 2
                                             : static_cast<int64_t>(room.f_bavail * room.f_frsize);
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
    capacity_bytes_ = options_.size_bytes;
}

int PathFiles::open_segment(int index, int flags) {
    const std::string name = segment_name(index);
    const int mode = O_RDWR | O_CLOEXEC | O_NOFOLLOW | flags;
    if (direct_) {
        const int file = open(name.c_str(), mode | O_DIRECT, 0600);
        if (file >= 0) return file;
        if (errno != EINVAL) refuse(Trouble::io, problem_of("cannot be opened", name, errno));
        if (flags & O_CREAT) unlink(name.c_str());  // O_DIRECT is refused after the creation
        log_warn("aio: O_DIRECT is refused on " + options_.path +
                 ": buffered, and slower for it; its pages count as the kernel's memory");
        direct_ = false;
    }
    const int file = open(name.c_str(), mode, 0600);
    if (file < 0) refuse(Trouble::io, problem_of("cannot be opened", name, errno));
    return file;
}

void PathFiles::find_alignment() {
    if (descriptors_.empty()) descriptors_.push_back(open_segment(0, O_CREAT | O_EXCL));
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

void PathFiles::create_segment(int index, int64_t bytes) {
    if (options_.raw_device) return;
    if (static_cast<size_t>(index) >= descriptors_.size())
        descriptors_.push_back(open_segment(index, O_CREAT | O_EXCL));
    // Growing past the limit would not only fail, it would send SIGXFSZ.
    rlimit limit{};
    if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY &&
        static_cast<uint64_t>(bytes) > limit.rlim_cur)
        refuse(Trouble::does_not_fit,
               {.what = "the process may not write files this large",
                .where = segment_name(index),
                .measured = std::to_string(bytes) + " bytes needed",
                .limit = std::to_string(limit.rlim_cur) + " bytes (RLIMIT_FSIZE)",
                .remedy = remedy_for(EFBIG)});
    if (bytes == 0) return;
    const int file = descriptors_[static_cast<size_t>(index)];
    int failed = 0;
    while ((failed = fallocate(file, 0, 0, bytes)) != 0 && errno == EINTR) {
    }
    if (failed && errno == EOPNOTSUPP) {
        log_warn("aio: " + options_.path + " cannot preallocate: space may run out later");
        failed = ftruncate(file, bytes);
    }
    if (!failed) return;
    const int error = errno;
    Problem problem = problem_of("space cannot be reserved", segment_name(index), error);
    problem.measured = std::to_string(bytes) + " bytes needed";
    const bool space = error == ENOSPC || error == EDQUOT || error == EFBIG;
    refuse(space ? Trouble::does_not_fit : Trouble::io, std::move(problem));
}

double PathFiles::measure_speed() {
    constexpr int64_t kBlock = 4 * kMiB, kProbe = 32 * kMiB;
    const int64_t bytes = std::min(kProbe, round_down(capacity_bytes_, kBlock));
    void* const buffer = std::aligned_alloc(static_cast<size_t>(alignment_), kBlock);
    memset(buffer, 0x5a, kBlock);
    using Clock = std::chrono::steady_clock;
    const auto begin = Clock::now();
    int64_t moved = 0;
    for (int64_t at = 0; at < bytes; at += kBlock) {
        const ssize_t wrote = pwrite(descriptors_[0], buffer, kBlock, data_offset_ + at);
        const ssize_t read = pread(descriptors_[0], buffer, kBlock, data_offset_ + at);
        if (wrote != kBlock || read != kBlock) break;  // the layout will find and name what failed
        moved += wrote + read;
    }
    std::free(buffer);
    const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
    return moved == 0 ? 1 : static_cast<double>(moved) / seconds;
}

}  // namespace ferry::aio
