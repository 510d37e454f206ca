#include "io_site.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <spdlog/fmt/fmt.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <thread>

#include "ferry/aio.h"
#include "ferry/topology.h"

namespace ferry::tools {
namespace {

constexpr int64_t kMarginMax = kGiB;
constexpr uint32_t kXfsMagic = 0x58465342;  // linux/magic.h has no XFS

struct Room {
    int64_t free_bytes = 0, margin_bytes = 0;
};

Room room_at(const std::string& directory) {
    struct statvfs room {};
    if (statvfs(directory.c_str(), &room) != 0)
        throw Error(Trouble::io,
                    {.what = std::string("free space cannot be read: ") + std::strerror(errno),
                     .where = directory});
    const auto bytes = [&](auto blocks) { return static_cast<int64_t>(blocks * room.f_frsize); };
    Room found{.free_bytes = bytes(room.f_bavail),
               .margin_bytes = std::min(kMarginMax, bytes(room.f_blocks) / 20)};
    // Files on tmpfs are memory, of which a container may have less than the file system says.
    if (file_system_of(directory) == "tmpfs")
        found.free_bytes = std::min(found.free_bytes, discover_topology().memory_limit_bytes / 4);
    return found;
}

[[noreturn]] void cannot_use(const std::string& directory, int error) {
    throw Error(Trouble::usage,
                {.what = std::string("nothing can be measured there: ") + std::strerror(error),
                 .where = directory,
                 .remedy = "give an existing directory that you may write to, on "
                           "the drive in question"});
}

}  // namespace

std::string absolute_path(const std::string& path) {
    std::string absolute = std::filesystem::absolute(path).lexically_normal().string();
    if (absolute.size() > 1 && absolute.back() == '/') absolute.pop_back();
    return absolute;
}

std::string file_system_of(const std::string& path) {
    struct statfs system {};
    if (statfs(path.c_str(), &system) != 0) return "unknown";
    switch (static_cast<uint32_t>(system.f_type)) {
        case TMPFS_MAGIC:
            return "tmpfs";
        case EXT4_SUPER_MAGIC:
            return "ext4";
        case kXfsMagic:
            return "xfs";
        case BTRFS_SUPER_MAGIC:
            return "btrfs";
        case NFS_SUPER_MAGIC:
            return "nfs";
        case OVERLAYFS_SUPER_MAGIC:
            return "overlay";
        default:
            return fmt::format("{:#x}", static_cast<uint32_t>(system.f_type));
    }
}

IoSites::IoSites(const std::vector<std::string>& paths, const std::string& name) {
    try {
        for (const std::string& path : paths) {
            const std::string directory = path + "/" + name;
            const bool made = mkdir(directory.c_str(), 0700) == 0;
            struct stat status {};
            if (!made && errno != EEXIST) cannot_use(path, errno);
            if (lstat(directory.c_str(), &status) != 0) cannot_use(path, errno);
            if (!S_ISDIR(status.st_mode)) cannot_use(directory, ENOTDIR);
            directories_.push_back(directory);
            if (!made) remove_leftovers(directory);
        }
        start_caretaker();
    } catch (...) {
        remove_directories();
        throw;
    }
}

IoSites::~IoSites() {
    remove_directories();
    dismiss_caretaker();
}

// Without one, a killed benchmark's files stay until the next run; that is no reason not to
// measure.
void IoSites::start_caretaker() {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) return;
    caretaker_ = fork();
    if (caretaker_ == 0) {
        close(ends[1]);
        take_care(ends[0]);
    }
    close(ends[0]);
    lifeline_ = ends[1];
}

// In the child. Neither a terminal's Ctrl-C nor a signal to the benchmark's group reaches it.
void IoSites::take_care(int lifeline) noexcept {
    setsid();
    const int nowhere = open("/dev/null", O_RDWR);
    for (const int standard : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) dup2(nowhere, standard);
    char dismissed = 0;
    ssize_t got = -1;
    while ((got = read(lifeline, &dismissed, 1)) < 0 && errno == EINTR) {
    }
    if (got > 0) _exit(0);
    // The kernel lets go of a killed process's lock a little later than of its pipe.
    constexpr int kAttempts = 500;
    constexpr auto kPause = std::chrono::milliseconds(20);
    for (const std::string& directory : directories_) {
        bool removed = false;
        for (int i = 0; i < kAttempts && !removed; ++i) {
            try {
                remove_leftovers(directory);
                removed = true;
            } catch (...) {
                std::this_thread::sleep_for(kPause);
            }
        }
    }
    remove_directories();
    _exit(0);
}

void IoSites::dismiss_caretaker() noexcept {
    if (lifeline_ >= 0) {
        [[maybe_unused]] const ssize_t written = write(lifeline_, "", 1);
        close(lifeline_);
    }
    if (caretaker_ > 0) waitpid(caretaker_, nullptr, 0);
}

// Left in place where somebody else still has files there.
void IoSites::remove_directories() noexcept {
    for (const std::string& directory : directories_) rmdir(directory.c_str());
}

// A volume knows what a killed one left, and refuses what is in use or not ferry's.
void IoSites::remove_leftovers(const std::string& directory) {
    const auto executor = make_thread_executor();
    aio::Volume::open({.paths = {{.path = directory, .size_bytes = kMiB}},
                       .classes = {{.name = "none", .slot_bytes = 4096, .slots = 1}},
                       .backend = aio::BackendKind::posix,
                       .queue_depth = 1,
                       .leftover = aio::Leftover::remove_any,
                       .write_once = false},
                      *executor);
}

int64_t IoSites::bytes_per_path(int64_t wanted, int64_t most, int64_t step) const {
    int64_t bytes = wanted > 0 ? round_up(wanted, step) : most;
    for (const std::string& directory : directories_) {
        const Room room = room_at(directory);
        const int64_t usable = room.free_bytes - room.margin_bytes;
        const int64_t least = wanted > 0 ? bytes : 4 * step;
        if (usable < least)
            throw Error(
                Trouble::does_not_fit,
                {.what = fmt::format("too little free space: {} bytes ({}) are missing",
                                     least - usable, format_bytes(least - usable)),
                 .where = directory,
                 .measured = format_bytes(room.free_bytes) + " free",
                 .limit = fmt::format("{} for the files and {} left free", format_bytes(least),
                                      format_bytes(room.margin_bytes)),
                 .remedy = wanted > 0 ? "free some space, or lower --size" : "free some space"});
        bytes = std::min(bytes, round_down(usable, step));
    }
    return bytes;
}

}  // namespace ferry::tools
