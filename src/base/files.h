// How ferry opens and replaces files.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "ferry/error.h"

namespace ferry {

// open(2), but for the numbers of the standard streams: -1 with errno, or a descriptor above them.
// Whoever uses ferry as a library may have closed them.
int open_above_standard(const char* name, int flags, unsigned mode = 0) noexcept;

// The kind of file that a path names, symbolic links followed. Throws usage where that cannot be
// told: a circle of links, a name too long, a directory that may not be searched.
enum class FileKind : uint8_t { none, regular, directory, other };
FileKind kind_of(const std::string& path);

// Whether what lies there lies in memory (tmpfs). False where that cannot be told.
bool is_memory(const std::string& path);

// The path that is written to where `path` is: links end in what they name, which may not be there.
std::string behind_links(const std::string& path);

// The first bytes of what a new file is to replace, at most so many: "" where nothing is there, or
// nothing is in it. Throws usage, naming `where`, where that cannot be read: whose it is nobody
// knows then.
std::string beginning_of(const std::string& path, size_t most, const std::string& where);

// The files whose place a new one may take, beside an empty one.
struct Replaceable {
    std::string_view beginning{};  // a file with these bytes; "": any
    size_t skipped = 0;            // and any so many before them
    bool nothing = false;          // nothing at all: the name must be free, and no link
};

// A file could not have its name and is whole all the same: the remedy says where.
class WholeElsewhere : public Error {
public:
    using Error::Error;
};

// Removes the drafts of this process. For a handler of signals that ends it.
void remove_drafts() noexcept;

// A file that appears under its name whole, with publish(), or not at all. Until then it has a
// random name beside it. So two writers of one name never share a file, no file is in the way, and
// what a kill leaves does not stop the next run. What a symbolic link names is replaced, not the
// link. It refuses at once (usage) what is no regular file, a standard stream of this process or
// not Replaceable. So it does what may not be replaced: a mount point, chattr +i, another's in a
// sticky directory. Else it throws io, beginning with `what`, naming `where` (empty: the path). The
// owner and the permissions of what it replaces stay, as far as they may.
class Draft {
public:
    explicit Draft(const std::string& path, std::string what = "the file cannot be written",
                   const std::string& where = {}, const Replaceable& replaceable = {});
    ~Draft();  // not published, it leaves nothing
    Draft(const Draft&) = delete;
    Draft& operator=(const Draft&) = delete;

    void write(std::span<const std::byte> bytes);
    void write(std::string_view text) { write(std::as_bytes(std::span(text))); }
    // Open for reading and writing until publish(): for who writes to it in another way.
    int descriptor() const { return file_; }
    // Over what was written.
    void write_again(int64_t offset, std::span<const std::byte> bytes);
    // On stable storage under its name at return. Where the name cannot be had any more the whole
    // draft stays, and the error is WholeElsewhere.
    void publish();

private:
    void create();
    bool check_replaceable() const;
    void take_name();
    void take_permissions() const;
    void flush_directory() const;
    [[noreturn]] void keep(const Error& error);
    [[noreturn]] void fail(int error) const;

    const Replaceable replaceable_;
    std::string what_, where_, path_, draft_{};
    int file_ = -1, noted_ = -1;  // noted_: for remove_drafts()
    int64_t written_ = 0;
};

// A name's end that nobody else has drawn; "" with errno.
std::string random_suffix(const char* ending);

// A directory that appears under its name with all that is in it, with publish(), or not at all. It
// is made beside that name, with what is_leftover() knows; a kill leaves it there. Throws io.
class DraftDirectory {
public:
    explicit DraftDirectory(std::string path);
    ~DraftDirectory();  // not published, it goes with all that is in it
    DraftDirectory(const DraftDirectory&) = delete;
    DraftDirectory& operator=(const DraftDirectory&) = delete;

    const std::string& draft() const { return draft_; }  // where its files are written
    // On stable storage under its name at return, as far as its files are. A directory that has the
    // name is replaced in one rename, and removed.
    void publish();

private:
    std::string take_name() const;
    [[noreturn]] void fail(int error) const;

    std::string path_, draft_{};
};

// Renames the directory aside, durably, and then removes it with all that is in it. After a kill
// either all of it is there or nothing of that name. Throws io.
void remove_directory(const std::string& path);

// Whether a kill left this of a DraftDirectory, or of remove_directory(): its path's last part.
bool is_leftover(std::string_view name);

// The names in a directory are on stable storage at return. Throws io.
void flush_directory(const std::string& path);

}  // namespace ferry
