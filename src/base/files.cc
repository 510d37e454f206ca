#include "base/files.h"

#include <fcntl.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <optional>
#include <utility>

#include "ferry/error.h"
#include "ferry/streams.h"

namespace ferry {
namespace {

constexpr int kLastStandard = STDERR_FILENO;

std::string random_suffix() {
    uint64_t drawn = 0;
    if (getrandom(&drawn, sizeof drawn, 0) != sizeof drawn) return {};
    char text[32];
    std::snprintf(text, sizeof text, ".%016llx.part", static_cast<unsigned long long>(drawn));
    return text;
}

// Why a file cannot give its name to another one, and what to do.
struct Hold {
    std::string why{}, remedy{};
};

uint64_t attributes_of(const std::string& path) {
    struct statx found {};
    if (statx(AT_FDCWD, path.c_str(), AT_SYMLINK_NOFOLLOW | AT_NO_AUTOMOUNT, 0, &found) != 0)
        return 0;
    return found.stx_attributes & found.stx_attributes_mask;
}

// "" where chattr forbids nothing.
std::string forbidden_by(uint64_t attributes) {
    if ((attributes & STATX_ATTR_IMMUTABLE) != 0) return "immutable (chattr +i)";
    return (attributes & STATX_ATTR_APPEND) != 0 ? "append-only (chattr +a)" : "";
}

// The kernel judges owners, capabilities and flags of a file that is to go before it finds that the
// file is no directory: so it answers the question, and removes nothing.
bool may_go(const std::string& file) { return rmdir(file.c_str()) == 0 || errno != EPERM; }

std::optional<Hold> hold_on(const std::string& path) {
    const std::string parent = std::filesystem::path(path).parent_path();
    const std::string directory = parent.empty() ? "." : parent;
    // Drafts in it could be made, and neither renamed nor removed.
    const std::string fixed = forbidden_by(attributes_of(directory));
    if (!fixed.empty())
        return Hold{"its directory is " + fixed, "name a file elsewhere, or take that flag away"};
    struct stat file {
    }, above{};
    if (lstat(path.c_str(), &file) != 0) return std::nullopt;
    const uint64_t attributes = attributes_of(path);
    if ((attributes & STATX_ATTR_MOUNT_ROOT) != 0)
        return Hold{"it is a mount point, as a container's single files are",
                    "name another file, or mount the directory instead of the file"};
    if (may_go(path)) return std::nullopt;
    const std::string flag = forbidden_by(attributes);
    if (!flag.empty()) return Hold{"it is " + flag, "name another file, or take that flag away"};
    const bool sticky = stat(directory.c_str(), &above) == 0 && (above.st_mode & S_ISVTX) != 0;
    if (sticky && file.st_uid != geteuid())
        return Hold{"it belongs to user " + std::to_string(file.st_uid) +
                        ", and its directory is sticky: only the owner may replace it",
                    "name another file, or one in a directory of your own"};
    return Hold{std::strerror(EPERM), "name another file"};
}

const char* remedy_for(int error) {
    if (error == ENOENT) return "make the directory first";
    if (error == ENOSPC || error == EDQUOT || error == EFBIG)
        return "free more than that there, or name a file elsewhere";
    return "name a file in a directory that you may write to";
}

}  // namespace

std::string behind_links(const std::string& path) {
    constexpr int kLinksMost = 40;  // as the kernel's own
    std::filesystem::path file(path);
    std::error_code failed;
    for (int links = 0; links < kLinksMost && std::filesystem::is_symlink(file, failed); ++links) {
        const auto named = std::filesystem::read_symlink(file, failed);
        if (failed) break;
        file = file.parent_path() / named;  // an absolute one replaces it
    }
    return file.string();
}

FileKind kind_of(const std::string& path) {
    std::error_code failed;
    const std::filesystem::file_status status = std::filesystem::status(path, failed);
    switch (status.type()) {
        case std::filesystem::file_type::not_found:
            return FileKind::none;
        case std::filesystem::file_type::regular:
            return FileKind::regular;
        case std::filesystem::file_type::directory:
            return FileKind::directory;
        case std::filesystem::file_type::none:
            throw Error(Trouble::usage, {.what = "the path cannot be followed",
                                         .where = path,
                                         .measured = failed.message(),
                                         .remedy = "name another file, or mend what the path leads "
                                                   "through"});
        default:
            return FileKind::other;
    }
}

void hold_standard_streams() noexcept {
    for (int stream = 0; stream <= kLastStandard; ++stream) {
        if (fcntl(stream, F_GETFD) >= 0 || errno != EBADF) continue;
        // The lowest number that is free: this one. Without it nothing can be said, and nothing
        // may be opened.
        if (open("/dev/null", O_RDWR) != stream) std::_Exit(static_cast<int>(Trouble::io));
    }
}

int open_above_standard(const char* name, int flags, unsigned mode) noexcept {
    int file = -1;
    do file = open(name, flags, mode);
    while (file < 0 && errno == EINTR);
    if (file < 0 || file > kLastStandard) return file;
    const int command = (flags & O_CLOEXEC) != 0 ? F_DUPFD_CLOEXEC : F_DUPFD;
    const int above = fcntl(file, command, kLastStandard + 1);
    const int error = errno;
    close(file);
    errno = error;
    return above;
}

Draft::Draft(const std::string& path, std::string what, std::string where)
    : what_(std::move(what)),
      where_(where.empty() ? path : std::move(where)),
      path_(behind_links(path)) {
    check_replaceable();
    // What can be known before the work. What changes until publish() costs its name, no more.
    if (const auto hold = hold_on(path_))
        throw Error(Trouble::usage, {.what = "the file cannot be replaced",
                                     .where = where_,
                                     .measured = hold->why,
                                     .remedy = hold->remedy});
    create();
}

Draft::~Draft() {
    if (file_ < 0) return;
    close(file_);
    unlink(draft_.c_str());
}

void Draft::create() {
    constexpr mode_t kMode = 0666;     // less the user's mask
    constexpr size_t kNameMost = 200;  // with the suffix below every file system's limit
    constexpr int kTries = 8;
    const std::filesystem::path path(path_);
    const std::string name = path.filename().string().substr(0, kNameMost);
    for (int i = 0; i < kTries; ++i) {
        const std::string suffix = random_suffix();
        if (suffix.empty()) fail(errno);
        draft_ = (path.parent_path() / (name + suffix)).string();
        file_ = open_above_standard(draft_.c_str(),
                                    O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, kMode);
        if (file_ >= 0 || errno != EEXIST) break;
    }
    if (file_ < 0) fail(errno);
    // What was private stays so.
    struct stat old {};
    constexpr mode_t kPermissions = 0777;
    if (stat(path_.c_str(), &old) == 0) fchmod(file_, old.st_mode & kPermissions);
}

void Draft::check_replaceable() const {
    struct stat status {};
    if (lstat(path_.c_str(), &status) != 0 || S_ISREG(status.st_mode)) return;
    throw Error(Trouble::usage, {.what = "it would replace something that is no file",
                                 .where = where_,
                                 .measured = path_,
                                 .remedy = "name a regular file, or a new one"});
}

void Draft::write(std::span<const std::byte> bytes) { write_again(written_, bytes); }

void Draft::write_again(int64_t offset, std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
        // A full disk takes a part first, and says why with the next.
        const ssize_t wrote = pwrite(file_, bytes.data(), bytes.size(), offset);
        if (wrote < 0 && errno == EINTR) continue;
        if (wrote <= 0) fail(wrote < 0 ? errno : EIO);
        bytes = bytes.subspan(static_cast<size_t>(wrote));
        offset += wrote;
        written_ = std::max(written_, offset);
    }
}

void Draft::publish() {
    if (fsync(file_) != 0) fail(errno);
    try {
        check_replaceable();  // once more: it is long since
        if (rename(draft_.c_str(), path_.c_str()) != 0) fail(errno);
    } catch (const Error& error) {
        keep(error);
    }
    close(std::exchange(file_, -1));
    flush_directory();
}

// It may hold what took days. In a directory that went there is none.
void Draft::keep(const Error& error) {
    if (access(draft_.c_str(), F_OK) != 0) throw error;
    close(std::exchange(file_, -1));
    Problem problem = error.problem();
    problem.remedy = "the whole file is in " + draft_ + ": move it to another name";
    throw Error(error.trouble(), std::move(problem));
}

// The name, too, must be there after a power failure.
void Draft::flush_directory() const {
    const std::filesystem::path parent = std::filesystem::path(path_).parent_path();
    const char* name = parent.empty() ? "." : parent.c_str();
    const int directory = open_above_standard(name, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (directory < 0) return;  // one that may be written to and not read
    const int error = fsync(directory) == 0 ? 0 : errno;
    close(directory);
    if (error == EIO) fail(error);  // others: the file system knows no such thing, or needs none
}

void Draft::fail(int error) const {
    throw Error(Trouble::io, {.what = what_,
                              .where = where_,
                              .measured = std::string(std::strerror(error)) + ", after " +
                                          std::to_string(written_) + " bytes",
                              .remedy = remedy_for(error)});
}

}  // namespace ferry
