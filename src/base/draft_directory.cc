// Directories that appear and go whole.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <utility>

#include "base/files.h"
#include "ferry/error.h"

namespace ferry {
namespace {

constexpr const char *kDraft = ".part", *kGone = ".gone";

[[noreturn]] void refuse(const char* what, const std::string& where, int error,
                         const char* remedy) {
    throw Error(Trouble::io,
                {.what = what, .where = where, .measured = std::strerror(error), .remedy = remedy});
}

std::string parent_of(const std::string& path) {
    const std::string parent = std::filesystem::path(path).parent_path();
    return parent.empty() ? "." : parent;
}

void remove_all(const std::string& path) {
    std::error_code failed;
    std::filesystem::remove_all(path, failed);
    if (failed) refuse("a directory cannot be removed", path, failed.value(), "remove it by hand");
}

}  // namespace

void flush_directory(const std::string& path) {
    const int directory = open_above_standard(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    const int error = directory < 0 ? errno : fsync(directory) == 0 ? 0 : errno;
    if (directory >= 0) close(directory);
    // EINVAL: the file system knows no such thing, or needs none.
    if (error != 0 && error != EINVAL)
        refuse("a directory cannot be made durable", path, error, "check the drive below it");
}

bool is_leftover(std::string_view name) {
    constexpr size_t kDrawn = 17, kEnding = 5;  // ".0123456789abcdef", ".part"
    if (name.size() <= kDrawn + kEnding) return false;
    const std::string_view ending = name.substr(name.size() - kEnding);
    const std::string_view drawn = name.substr(name.size() - kEnding - kDrawn, kDrawn);
    return (ending == kDraft || ending == kGone) && drawn.front() == '.' &&
           drawn.find_first_not_of("0123456789abcdef", 1) == std::string_view::npos;
}

DraftDirectory::DraftDirectory(std::string path) : path_(std::move(path)) {
    const std::string suffix = random_suffix(kDraft);
    if (suffix.empty()) fail(errno);
    draft_ = path_ + suffix;
    if (mkdir(draft_.c_str(), 0777) != 0) fail(errno);
}

DraftDirectory::~DraftDirectory() {
    if (draft_.empty()) return;
    std::error_code whatever;  // the next run removes what stays
    std::filesystem::remove_all(draft_, whatever);
}

void DraftDirectory::publish() {
    flush_directory(draft_);
    const std::string old = take_name();
    draft_.clear();
    flush_directory(parent_of(path_));
    if (!old.empty()) remove_all(old);
}

// Where what had the name lies then; "": it was free.
std::string DraftDirectory::take_name() const {
    const auto renamed = [this](unsigned flags) {
        return renameat2(AT_FDCWD, draft_.c_str(), AT_FDCWD, path_.c_str(), flags) == 0;
    };
    if (renamed(RENAME_NOREPLACE)) return {};
    if (errno == EEXIST && renamed(RENAME_EXCHANGE)) return draft_;
    if (errno != EINVAL && errno != ENOSYS) fail(errno);
    // Some file systems know no flags: a kill between the two leaves nothing of that name.
    std::string aside = path_ + random_suffix(kGone);
    if (rename(path_.c_str(), aside.c_str()) != 0) {
        if (errno != ENOENT) fail(errno);
        aside.clear();
    }
    if (rename(draft_.c_str(), path_.c_str()) != 0) fail(errno);
    return aside;
}

void DraftDirectory::fail(int error) const {
    refuse("a directory cannot be written", path_, error,
           error == ENOENT ? "make the directory above it"
                           : "see that its file system is there, has room and may be written to");
}

void remove_directory(const std::string& path) {
    std::string plain = path;
    while (plain.size() > 1 && plain.ends_with('/')) plain.pop_back();
    const std::string aside = plain + random_suffix(kGone);
    if (rename(plain.c_str(), aside.c_str()) != 0)
        refuse("a directory cannot be removed", path, errno,
               "see that its file system may be written to");
    flush_directory(parent_of(plain));
    remove_all(aside);
}

}  // namespace ferry
