#include "exchange.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>

#include "base/files.h"
#include "base/log.h"
#include "errors.h"

namespace ferry::aio {
namespace {

std::string staged_header(const std::string& path) { return path + "/ferry.next"; }

std::string staged_name(const std::string& path, int index) {
    return slot_file_name(path, index) + ".next";
}

bool is_there(const std::string& name) {
    struct stat status {};
    return lstat(name.c_str(), &status) == 0;
}

[[noreturn]] void fail(const char* what, const std::string& name, int error) {
    throw Error(trouble_of(error), problem_of(what, name, error));
}

}  // namespace

void stage(const std::string& path, const Nameless& opened, std::span<const int> slot_files,
           const Header& header) {
    for (size_t i = 0; i < slot_files.size(); ++i)
        give_name(slot_files[i], staged_name(path, static_cast<int>(i)));
    const Header next = sealed(header, 1);
    const std::string name = staged_header(path);
    if (write_copies(opened.header, next) < 2 || fdatasync(opened.header) != 0)
        fail("the volume's header cannot be written", name, errno);
    give_name(opened.header, name);
    flush_names(path, opened.directory);
}

std::optional<Header> staged(const std::string& path) { return whole_header(staged_header(path)); }

void take_names(const std::string& path, int files, int directory) {
    for (int i = 0; i < files; ++i) {
        const std::string from = staged_name(path, i), to = slot_file_name(path, i);
        if (!is_there(from)) continue;  // a killed run came this far
        remove_plain_file_unopened(to);
        if (rename(from.c_str(), to.c_str()) != 0)
            fail("a slot file cannot be given its name", to, errno);
    }
    for (int i = files; i < kFilesMax; ++i) remove_plain_file_unopened(slot_file_name(path, i));
    flush_names(path, directory);
    unlink(staged_header(path).c_str());
}

void unstage(const std::string& path) noexcept {
    remove_plain_file_unopened(staged_header(path));
    for (int i = 0; i < kFilesMax; ++i) remove_plain_file_unopened(staged_name(path, i));
}

void give_name(int file, const std::string& name) {
    if (linkat(AT_FDCWD, name_of_open(file).c_str(), AT_FDCWD, name.c_str(), AT_SYMLINK_FOLLOW) !=
        0)
        fail("a file cannot be given its name", name, errno);
}

int remove_plain_file(const std::string& name) noexcept {
    const int file = open(name.c_str(), O_WRONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (file < 0) return errno;
    struct stat status {};
    const bool plain = fstat(file, &status) == 0 && S_ISREG(status.st_mode) && status.st_nlink == 1;
    if (plain && (ftruncate(file, 0) != 0 || unlink(name.c_str()) != 0))
        log_warn("aio: " + name + " could not be removed: " + strerror(errno));
    close(file);
    return 0;
}

void remove_plain_file_unopened(const std::string& name) noexcept {
    struct stat status {};
    const bool plain =
        lstat(name.c_str(), &status) == 0 && S_ISREG(status.st_mode) && status.st_nlink == 1;
    if (plain && (truncate(name.c_str(), 0) != 0 || unlink(name.c_str()) != 0))
        log_warn("aio: " + name + " could not be removed: " + strerror(errno));
}

void flush_names(const std::string& path, int directory) {
    constexpr int kFlags = O_RDONLY | O_DIRECTORY | O_CLOEXEC;
    const int file = directory >= 0 ? directory : open_above_standard(path.c_str(), kFlags);
    const bool flushed = file >= 0 && fsync(file) == 0;
    const int error = errno;
    if (file >= 0 && file != directory) close(file);
    // Some file systems know no such thing, and need none.
    if (!flushed && error != EINVAL) fail("the directory cannot be flushed", path, error);
}

}  // namespace ferry::aio
