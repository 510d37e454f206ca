#include "base/files.h"

#include <fcntl.h>
#include <linux/capability.h>
#include <linux/magic.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <optional>
#include <utility>

#include "base/process_limits.h"
#include "ferry/error.h"
#include "ferry/streams.h"

namespace ferry {
namespace {

constexpr int kLastStandard = STDERR_FILENO;

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

// In a sticky directory another's file goes all the same for whoever has this capability.
bool overrules_owners() {
    __user_cap_header_struct header{.version = _LINUX_CAPABILITY_VERSION_3, .pid = 0};
    __user_cap_data_struct data[_LINUX_CAPABILITY_U32S_3]{};
    return syscall(SYS_capget, &header, data) == 0 && (data[0].effective & (1U << CAP_FOWNER)) != 0;
}

bool same_file(const struct stat& one, const struct stat& other) {
    return one.st_dev == other.st_dev && one.st_ino == other.st_ino;
}

// Whether standard output or error goes there: it would be lost with a file that is replaced.
bool is_standard_stream(const struct stat& file) {
    struct stat stream {};
    for (int number = 0; number <= kLastStandard; ++number)
        if (fstat(number, &stream) == 0 && same_file(file, stream)) return true;
    return false;
}

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
    const std::string flag = forbidden_by(attributes);
    if (!flag.empty()) return Hold{"it is " + flag, "name another file, or take that flag away"};
    const bool sticky = stat(directory.c_str(), &above) == 0 && (above.st_mode & S_ISVTX) != 0;
    // The kernel's rule. Trying it instead, by removing what cannot be, might remove something.
    if (!sticky || file.st_uid == geteuid() || above.st_uid == geteuid() || overrules_owners())
        return std::nullopt;
    return Hold{"it belongs to user " + std::to_string(file.st_uid) +
                    ", and its directory is sticky: only the owner may replace it",
                "name another file, or one in a directory of your own"};
}

// The names of the drafts of this process, for a handler of signals. Who takes one out owns it.
std::array<std::atomic<char*>, 16> g_drafts{};
std::atomic<pid_t> g_drafts_of = 0;  // no child's that inherits them

// Where it is noted; -1: there are more of them than there is room for, and a signal leaves it.
int note_draft(const std::string& name) {
    char* own = strdup(name.c_str());
    if (own == nullptr) return -1;
    g_drafts_of = getpid();
    for (size_t i = 0; i < g_drafts.size(); ++i) {
        char* none = nullptr;
        if (g_drafts[i].compare_exchange_strong(none, own)) return static_cast<int>(i);
    }
    std::free(own);
    return -1;
}

void forget_draft(int& noted) {
    if (noted >= 0) std::free(g_drafts[static_cast<size_t>(noted)].exchange(nullptr));
    noted = -1;
}

const char* remedy_for(int error) {
    if (error == ENOENT) return "make the directory first";
    if (!limit_behind(error).empty()) return "raise that limit";
    if (error == ENOSPC || error == EDQUOT || error == EFBIG)
        return "free more than that there, or name a file elsewhere";
    return "name a file in a directory that you may write to";
}

}  // namespace

std::string random_suffix(const char* ending) {
    uint64_t drawn = 0;
    if (getrandom(&drawn, sizeof drawn, 0) != sizeof drawn) return {};
    char text[40];
    std::snprintf(text, sizeof text, ".%016llx%s", static_cast<unsigned long long>(drawn), ending);
    return text;
}

std::string beginning_of(const std::string& path, size_t most, const std::string& where) {
    const auto unknown = [&](int error) -> Error {
        return {Trouble::usage,
                {.what = "the file cannot be read, so whose it is cannot be told",
                 .where = where,
                 .measured = std::strerror(error),
                 .limit = limit_behind(error),
                 .remedy = limit_behind(error).empty()
                               ? "name another file, or one that you may read and that is of the "
                                 "kind that it replaces"
                               : "raise that limit"}};
    };
    const int file =
        open_above_standard(path.c_str(), O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
    struct stat status {};
    if (file < 0) {
        const int error = errno;
        const bool there = stat(path.c_str(), &status) == 0 || errno != ENOENT;
        const bool empty = !there || (S_ISREG(status.st_mode) && status.st_size == 0);
        if (empty) return {};
        throw unknown(error);
    }
    std::string text(most, '\0');
    size_t had = 0;
    int error = 0;
    while (had < most && error == 0) {
        const ssize_t count = pread(file, text.data() + had, most - had, static_cast<off_t>(had));
        if (count == 0) break;
        if (count > 0) had += static_cast<size_t>(count);
        if (count < 0 && errno != EINTR) error = errno;
    }
    close(file);
    if (error != 0) throw unknown(error);
    text.resize(had);
    return text;
}

void remove_drafts() noexcept {
    if (g_drafts_of != getpid()) return;
    for (auto& slot : g_drafts)
        if (const char* name = slot.exchange(nullptr)) unlink(name);  // and no free() in a handler
}

bool is_memory(const std::string& path) {
    struct statfs system {};
    return ::statfs(path.c_str(), &system) == 0 && system.f_type == TMPFS_MAGIC;
}

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

Draft::Draft(const std::string& path, std::string what, const std::string& where,
             const Replaceable& replaceable)
    : replaceable_(replaceable),
      what_(std::move(what)),
      where_(where.empty() ? path : where),
      path_(replaceable.nothing ? path : behind_links(path)) {
    // A link of /proc names an open file, which may have no name or another one.
    struct stat meant {
    }, named{};
    const bool there = stat(path.c_str(), &meant) == 0;
    if (there && (stat(path_.c_str(), &named) != 0 || !same_file(meant, named)))
        throw Error(Trouble::usage, {.what = "it names an open file, and no name leads to that",
                                     .where = where_,
                                     .measured = path_,
                                     .remedy = "name a regular file, or a new one"});
    check_replaceable();
    // Checks what can be known before the work. A change until publish() costs the name, no more.
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
    forget_draft(noted_);
}

void Draft::create() {
    // Less the user's mask. What was private is so from the beginning.
    const mode_t mode = access(path_.c_str(), F_OK) == 0 ? 0600 : 0666;
    constexpr size_t kNameMost = 200;  // with the suffix below every file system's limit
    constexpr int kTries = 8;
    const std::filesystem::path path(path_);
    const std::string name = path.filename().string().substr(0, kNameMost);
    for (int i = 0; i < kTries; ++i) {
        const std::string suffix = random_suffix(".part");
        if (suffix.empty()) fail(errno);
        draft_ = (path.parent_path() / (name + suffix)).string();
        noted_ = note_draft(draft_);  // before it is there: a signal may come in between
        file_ = open_above_standard(draft_.c_str(),
                                    O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, mode);
        if (file_ >= 0) return take_permissions();
        const int error = errno;
        forget_draft(noted_);
        errno = error;
        if (error != EEXIST) break;
    }
    fail(errno);
}

// Takes those of the file that it replaces.
void Draft::take_permissions() const {
    struct stat old {
    }, own{};
    if (stat(path_.c_str(), &old) != 0 || fstat(file_, &own) != 0) return;
    mode_t mode = old.st_mode & 0777;
    // Root may give it to the owner; others at most to a group that they are in.
    const bool given = (own.st_uid == old.st_uid && own.st_gid == old.st_gid) ||
                       fchown(file_, old.st_uid, old.st_gid) == 0 ||
                       fchown(file_, static_cast<uid_t>(-1), old.st_gid) == 0;
    // Another group has the rights of all others.
    if (!given) mode = (mode & ~mode_t{070}) | ((mode & 07) << 3);
    fchmod(file_, mode);
}

// Whether there is something to replace.
bool Draft::check_replaceable() const {
    struct stat status {};
    if (lstat(path_.c_str(), &status) != 0) return false;
    const auto refuse = [this](const char* what, const char* remedy) {
        throw Error(Trouble::usage,
                    {.what = what, .where = where_, .measured = path_, .remedy = remedy});
    };
    if (replaceable_.nothing)
        refuse("something of that name is there by now", "name a new file, or a new directory");
    if (!S_ISREG(status.st_mode))
        refuse("it would replace something that is no file", "name a regular file, or a new one");
    if (is_standard_stream(status))
        refuse("it would replace the file that a standard stream of this process goes to",
               "name another file, or let the output go elsewhere");
    const std::string_view beginning = replaceable_.beginning;
    if (beginning.empty()) return true;
    const size_t most = replaceable_.skipped + beginning.size();
    const std::string start = beginning_of(path_, most, where_);
    if (!start.empty() && (start.size() < most || !start.ends_with(beginning)))
        refuse("it would replace a file of another kind, or one that ferry did not make",
               "name another file, or move that one away");
    return true;
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
        take_name();
    } catch (const Error& error) {
        keep(error);
    }
    forget_draft(noted_);
    close(std::exchange(file_, -1));
    flush_directory();
}

// Looks once more at what may be replaced: the first look is long ago. A name that was free then is
// taken without a look, and only if it still is.
void Draft::take_name() {
    for (;;) {
        const bool replaces = check_replaceable();
        const unsigned flags = replaces ? 0 : RENAME_NOREPLACE;
        if (renameat2(AT_FDCWD, draft_.c_str(), AT_FDCWD, path_.c_str(), flags) == 0) return;
        if (!replaces && errno == EEXIST) continue;  // since that look
        // Some file systems know no flags.
        if (!replaces && (errno == EINVAL || errno == ENOSYS) &&
            rename(draft_.c_str(), path_.c_str()) == 0)
            return;
        fail(errno);
    }
}

// It may hold what took days. In a directory that went there is none.
void Draft::keep(const Error& error) {
    if (access(draft_.c_str(), F_OK) != 0) throw error;
    forget_draft(noted_);
    close(std::exchange(file_, -1));
    Problem problem = error.problem();
    problem.remedy = "the whole file is in " + draft_ + ": move it to another name";
    throw WholeElsewhere(error.trouble(), std::move(problem));
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
    // A full disk or one file too large came up in the work; a lack of descriptors is the
    // process's.
    throw Error(error == EMFILE ? Trouble::does_not_fit : Trouble::io,
                {.what = what_,
                 .where = where_,
                 .measured = std::string(std::strerror(error)) + ", after " +
                             std::to_string(written_) + " bytes",
                 .limit = limit_behind(error),
                 .remedy = remedy_for(error)});
}

}  // namespace ferry
