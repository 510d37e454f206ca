#include "io_site.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <spdlog/fmt/fmt.h>
#include <sys/file.h>
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
#include <map>
#include <thread>

#include "base/files.h"
#include "ferry/aio.h"
#include "topology/topology.h"

namespace ferry::tools {
namespace {

constexpr int64_t kMarginMax = kGiB;
// Between attempts to get what a killed process still holds: 2 s long for the next benchmark, 10 s
// for its caretaker, whom nobody watches.
constexpr auto kPause = std::chrono::milliseconds(20);
constexpr int kAttempts = 100, kAttemptsOfCaretaker = 500;
constexpr const char* kCheckThePath =
    "see that the path is still there and its file system mounted, or give another path";
constexpr uint32_t kXfsMagic = 0x58465342;  // linux/magic.h has no XFS

// A file system, of which several paths may be directories.
struct Room {
    int64_t free_bytes = 0, margin_bytes = 0;
    int paths = 0;
    int64_t usable_bytes_a_path() const { return (free_bytes - margin_bytes) / paths; }
};
using FileId = std::pair<dev_t, ino_t>;

struct stat status_of(const std::string& path) {
    struct stat status {};
    if (stat(path.c_str(), &status) != 0)
        throw Error(Trouble::io, {.what = std::string("nothing can be learnt of the path: ") +
                                          std::strerror(errno),
                                  .where = path,
                                  .remedy = kCheckThePath});
    return status;
}

Room room_at(const std::string& directory) {
    struct statvfs room {};
    if (statvfs(directory.c_str(), &room) != 0)
        throw Error(Trouble::io,
                    {.what = std::string("free space cannot be read: ") + std::strerror(errno),
                     .where = directory,
                     .remedy = kCheckThePath});
    // One without blocks, such as ramfs, does not know how much it has: it is memory.
    const int64_t memory = discover_topology().memory_limit_bytes / 4;
    if (room.f_blocks == 0) return {.free_bytes = memory};
    const auto bytes = [&](auto blocks) { return static_cast<int64_t>(blocks * room.f_frsize); };
    Room found{.free_bytes = bytes(room.f_bavail),
               .margin_bytes = std::min(kMarginMax, bytes(room.f_blocks) / 20)};
    // Files on tmpfs are memory, of which a container may have less than the file system says.
    if (is_memory(directory)) found.free_bytes = std::min(found.free_bytes, memory);
    return found;
}

bool same_file(const struct stat& one, const struct stat& other) {
    return one.st_dev == other.st_dev && one.st_ino == other.st_ino;
}

// One under two names would be measured beside itself.
void check_paths_differ(const std::vector<std::string>& paths) {
    std::map<FileId, std::string> seen;
    for (const std::string& path : paths) {
        if (path.empty())
            throw Error(Trouble::usage, {.what = "a path is empty",
                                         .where = "the command line",
                                         .remedy = "give a directory on the drive in question"});
        struct stat status {};
        if (stat(path.c_str(), &status) != 0) continue;  // refused where it is opened
        const auto [other, fresh] = seen.emplace(FileId{status.st_dev, status.st_ino}, path);
        if (!fresh)
            throw Error(Trouble::usage, {.what = "the same path is given twice",
                                         .where = path,
                                         .measured = other->second + " is the same",
                                         .remedy = "name each path once"});
    }
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
            return kTmpfs;
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
    check_paths_differ(paths);
    try {
        for (const std::string& path : paths) open_directory(path, name);
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

void IoSites::open_directory(const std::string& path, const std::string& name) {
    const std::string directory = path + "/" + name;
    bool made = false;
    // The caretaker of a killed benchmark is done soon, and may have removed the directory by then.
    for (int attempts = kAttempts; !lock_directory(path, directory, made);) {
        if (--attempts == 0)
            throw Error(Trouble::usage, {.what = "the path is in use by another ferry",
                                         .where = directory,
                                         .remedy = "wait for it, stop it, or give another path"});
        std::this_thread::sleep_for(kPause);
    }
    directories_.push_back(directory);
    const bool left = access((directory + "/ferry.volume").c_str(), F_OK) == 0;
    if (made || left) ours_.push_back(directory);
    if (!made) remove_leftovers(directory);
}

// False: another process holds it. A volume's own lock is not held from one volume to the next.
bool IoSites::lock_directory(const std::string& path, const std::string& directory, bool& made) {
    made = mkdir(directory.c_str(), 0700) == 0;
    struct stat named {
    }, locked{};
    if (!made && errno != EEXIST) cannot_use(path, errno);
    if (lstat(directory.c_str(), &named) != 0) return false;  // just removed
    if (!S_ISDIR(named.st_mode)) cannot_use(directory, ENOTDIR);
    const int lock = open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (lock < 0 && errno == ENOENT) return false;
    if (lock < 0) cannot_use(directory, errno);
    const bool taken = flock(lock, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK;
    if (taken && fstat(lock, &locked) == 0 && stat(directory.c_str(), &named) == 0 &&
        same_file(locked, named)) {
        locks_.push_back(lock);
        return true;
    }
    close(lock);
    return false;
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

// In the child. Neither a terminal's Ctrl-C nor a signal to the benchmark's group reaches it. It
// holds the benchmark's locks too, so that the next one does not begin before it is done.
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
    for (const std::string& directory : directories_) {
        bool removed = false;
        for (int i = 0; i < kAttemptsOfCaretaker && !removed; ++i) {
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
    for (const std::string& directory : ours_) rmdir(directory.c_str());
    for (const int lock : locks_) close(lock);
    ours_.clear();
    locks_.clear();
}

// A volume knows what a killed one left, and refuses what is in use or not ferry's.
void IoSites::remove_leftovers(const std::string& directory) {
    const auto executor = make_thread_executor();
    aio::Volume::open({.paths = {{.path = directory, .size_bytes = kMiB, .files = 1}},
                       .classes = {{.name = "none", .slot_bytes = 4096, .slots = 1}},
                       .backend = aio::BackendKind::posix,
                       .queue_depth = 1,
                       .leftover = aio::Leftover::remove,
                       .run_id = kBenchRun,
                       .write_once = false},
                      *executor);
}

int64_t IoSites::bytes_per_path(const FileBytes& wanted, int64_t step) const {
    std::map<dev_t, Room> rooms;
    int in_memory = 0;
    for (const std::string& directory : directories_) {
        Room& room =
            rooms.try_emplace(status_of(directory).st_dev, room_at(directory)).first->second;
        ++room.paths;
        in_memory += is_memory(directory);
    }
    const int64_t least = round_up(wanted.least, step);
    int64_t bytes = std::max(least, round_down(wanted.most, step));
    for (const std::string& directory : directories_) {
        const Room& room = rooms.at(status_of(directory).st_dev);
        int64_t usable = room.usable_bytes_a_path();
        if (is_memory(directory))
            usable = std::min(usable, discover_topology().memory_limit_bytes / 4 / in_memory);
        if (usable < least)
            throw Error(
                Trouble::does_not_fit,
                {.what = fmt::format("too little free space: {} bytes ({}) are missing",
                                     least - usable, format_bytes(least - usable)),
                 .where = directory,
                 .measured = format_bytes(room.free_bytes) + " free" +
                             (room.paths > 1 ? fmt::format(" for {} paths", room.paths) : ""),
                 .limit =
                     fmt::format("{} for the files and {} left free",
                                 format_bytes(least * room.paths), format_bytes(room.margin_bytes)),
                 .remedy = wanted.remedy});
        bytes = std::min(bytes, round_down(usable, step));
    }
    return bytes;
}

}  // namespace ferry::tools
