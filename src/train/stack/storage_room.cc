#include "storage_room.h"

#include <sys/stat.h>
#include <sys/statvfs.h>

#include <algorithm>
#include <filesystem>
#include <limits>
#include <map>
#include <string>

#include "ferry/error.h"
#include "ferry/units.h"

namespace ferry::train {
namespace {

// Files of a killed run go, or are used again.
int64_t leftover_bytes(const std::string& path) {
    int64_t bytes = 0;
    std::error_code reason;
    for (const auto& file : std::filesystem::directory_iterator(path, reason)) {
        struct stat status {};
        const bool ours = file.path().filename().string().starts_with("ferry.slots");
        if (ours && ::lstat(file.path().c_str(), &status) == 0 && S_ISREG(status.st_mode))
            bytes += int64_t{status.st_blocks} * 512;
    }
    return bytes;
}

struct Room {
    dev_t file_system = 0;
    int64_t bytes = 0;
};

// Not known, as on ramfs or of a path that opening will refuse: as much as anybody asks for.
Room room_at(const std::string& path) {
    constexpr int64_t kUnknown = std::numeric_limits<int64_t>::max() / 1024;  // sums fit
    struct stat status {};
    struct statvfs room {};
    if (::stat(path.c_str(), &status) != 0 || ::statvfs(path.c_str(), &room) != 0)
        return {.bytes = kUnknown};
    if (room.f_blocks == 0) return {status.st_dev, kUnknown};
    return {status.st_dev,
            static_cast<int64_t>(room.f_bavail * room.f_frsize) + leftover_bytes(path)};
}

[[noreturn]] void refuse(std::string what, int64_t missing, std::string where, std::string measured,
                         std::string limit) {
    throw Error(Trouble::does_not_fit,
                {.what = std::move(what) + std::to_string(missing) + " bytes (" +
                         format_bytes(missing) + ") are missing",
                 .where = std::move(where),
                 .measured = std::move(measured),
                 .limit = std::move(limit),
                 .remedy = "free some space, or give the path a smaller size"});
}

}  // namespace

void require_room(const planner::Plan& plan, const std::vector<NvmePath>& paths) {
    if (plan.slot_classes.empty()) return;
    struct FileSystem {
        int64_t room = 0, asked = 0;
    };
    std::map<dev_t, FileSystem> all;
    std::string names;
    for (const NvmePath& path : paths) {
        const Room room = room_at(path.path);
        const bool limited = path.size_bytes != kUnlimited;
        if (limited && path.size_bytes > room.bytes)
            refuse("the path has too little free space: ", path.size_bytes - room.bytes, path.path,
                   std::to_string(room.bytes) + " bytes free",
                   std::to_string(path.size_bytes) + " bytes asked for");
        // Paths on one file system share what it has.
        FileSystem& there = all[room.file_system];
        there.room = std::max(there.room, room.bytes);
        there.asked = std::min(there.asked + std::min(path.size_bytes, room.bytes), there.room);
        names += (names.empty() ? "" : ", ") + path.path;
    }
    int64_t room = 0;
    for (const auto& [device, there] : all) room += there.asked;
    if (plan.nvme_bytes > room)
        refuse("the storage paths have too little free space: ", plan.nvme_bytes - room, names,
               std::to_string(room) + " bytes free",
               std::to_string(plan.nvme_bytes) + " bytes needed");
}

}  // namespace ferry::train
