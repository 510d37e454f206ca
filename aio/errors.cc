#include "errors.h"

#include <sys/resource.h>

#include <cerrno>
#include <cstring>
#include <limits>

#include "base/process_limits.h"
#include "ferry/aio.h"

namespace ferry::aio {

ErrorClass classify(Verb verb, int error) noexcept {
    switch (error) {
        case EINTR:
        case EAGAIN:
            return ErrorClass::retry;
        case EINVAL:
            // A file system that cannot punch holes answers EINVAL or EOPNOTSUPP.
            return verb == Verb::discard ? ErrorClass::fail : ErrorClass::bug;
        case EBADF:
        case EFAULT:
            return ErrorClass::bug;
        case EIO:
        case ENOSPC:
        case EDQUOT:
        case EFBIG:
        case EROFS:
        case ENODEV:
        case ENXIO:
        case ENOMEM:
        case ETIMEDOUT:
        case EOPNOTSUPP:
        default:
            return ErrorClass::fail;
    }
}

int cause_of(Verb verb, int error, int64_t end) noexcept {
    const bool cut = verb == Verb::write && (error == EINVAL || error == EIO);
    return cut && end > file_size_limit() ? EFBIG : error;
}

int64_t file_size_limit() noexcept {
    rlimit limit{};
    if (getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY)
        return std::numeric_limits<int64_t>::max();
    return static_cast<int64_t>(limit.rlim_cur);
}

const char* name_of(Verb verb) noexcept {
    switch (verb) {
        case Verb::read:
            return "read";
        case Verb::write:
            return "write";
        case Verb::flush:
            return "flush";
        case Verb::discard:
            return "discard";
    }
    return "?";
}

const char* remedy_for(int error) noexcept {
    switch (error) {
        case ENOSPC:
            return "free space on this file system, or give the path a smaller size";
        case EDQUOT:
            return "raise the disk quota, or give the path a smaller size";
        case EFBIG:
            return "raise the file size limit (ulimit -f), or use a smaller size";
        case EROFS:
            return "the file system became read-only: see the kernel's log (dmesg)";
        case ENODEV:
        case ENXIO:
            return "the device has gone: see the kernel's log (dmesg)";
        case EIO:
            return "see the kernel's log (dmesg) and the drive's health (smartctl)";
        case EACCES:
        case EPERM:
            return "give a directory of your own, or change this one's owner or mode";
        case ENOENT:
        case ENOTDIR:
            return "give a directory of a disk's file system; /proc and its like hold no files";
        case EISDIR:
            return "a directory is in its place: remove it, or give another path";
        case ELOOP:
            return "a symbolic link is in its place: remove it, or give another path";
        case EBUSY:
            return "it is mounted or in use: unmount it, or give another path";
        case ENOLCK:
            return "this file system cannot lock files, or its lock service is down: give another "
                   "path";
        case EMFILE:
        case ENFILE:
            return "raise the limit of open files (ulimit -n)";
        case ENOMEM:
            return "free some memory, or raise the limit (ulimit -v, ulimit -l, cgroup)";
        case ECANCELED:
            return "raise that limit: the kernel works on what would block with threads of its own";
        case EINTR:
        case EAGAIN:
            return "the kernel kept asking to be retried: the device is overloaded";
        default:
            return "see the kernel's log (dmesg)";
    }
}

// The rings' threads are the kernel's, and count as the user's: a transfer that they cannot be had
// for is cancelled. What is too busy to take one is no limit.
std::string limit_of(int error) {
    return error == EAGAIN ? "" : limit_behind(error == ECANCELED ? EAGAIN : error);
}

Trouble trouble_of(int error) {
    return limit_of(error).empty() ? Trouble::io : Trouble::does_not_fit;
}

Problem problem_of(std::string what, std::string where, int error) {
    return {.what = std::move(what) + ": " + strerror(error),
            .where = std::move(where),
            .limit = limit_of(error),
            .remedy = remedy_for(error)};
}

Error transfer_error(std::string what, std::string where, int error, int64_t done_bytes,
                     int64_t size_bytes) {
    const std::string limit = limit_of(error);
    return Error(error == ECANCELED ? Trouble::does_not_fit : Trouble::io,
                 {.what = std::move(what) + ": " + strerror(error),
                  .where = std::move(where),
                  .measured = std::to_string(done_bytes) + " bytes moved",
                  .limit = std::to_string(size_bytes) + " bytes asked for" +
                           (limit.empty() ? "" : "; " + limit),
                  .remedy = remedy_for(error)});
}

Error to_error(const Volume& volume, const Operation& operation) {
    const char* kind = operation.kind == Kind::read ? "read" : "write";
    const std::string size = std::to_string(operation.buffer.size());
    if (operation.state == State::cancelled)
        return Error(Trouble::io, {.what = std::string(kind) + " was cancelled",
                                   .where = volume.describe(operation.slot),
                                   .measured = std::to_string(operation.done_bytes) + " bytes",
                                   .limit = size + " bytes",
                                   .remedy = "submit it again: it was taken back before it "
                                             "began, by cancel_queued() or the volume's end"});
    return transfer_error(
        std::string(kind) + " failed",
        volume.describe(operation.slot) + " + " + std::to_string(operation.offset), operation.error,
        operation.done_bytes, std::ssize(operation.buffer));
}

}  // namespace ferry::aio
