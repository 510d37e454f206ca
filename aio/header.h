// The header of a path's files: whose they are, and how far their layout went. It is locked while
// the volume is in use, so whoever finds it unlocked knows that its writer has ended.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "ferry/aio.h"

namespace ferry::aio {

constexpr bool reuses(Leftover leftover) {
    return leftover == Leftover::reuse || leftover == Leftover::reuse_any;
}

// In a directory.
std::string header_name(const std::string& path);
std::string slot_file_name(const std::string& path, int index);
std::string header_of(const PathOptions& path);  // a device begins with its own

constexpr int kFilesMax = 256;         // a path
constexpr int kRecordClassesMax = 64;  // classes of slots in a volume that can be resumed

// As on disk, a block of its own, and a second time in the block behind it: a byte that the drive
// loses costs neither. What changes while a volume is used lies in the first sector with the
// checksum, and a block is written at once: a power failure leaves the old header or the new. Of
// two that are whole the one with the larger number counts.
struct Header {
    char magic[8] = {};
    uint32_t version = 0;
    int32_t pid = 0;
    uint64_t run_id = 0;
    int32_t files = 0;        // at most this many lie beside the header
    uint8_t laid_out = 0;     // 1: every byte of them was written
    uint8_t published = 0;    // 1: a record was: the files outlive the process
    uint8_t only_copies = 0;  // as probed
    uint8_t lost = 0;         // 1: the run ended with an error, and nothing lies beside the header
    uint64_t sum = 0;         // checksum of all other fields: sum_of()
    int64_t device_end = 0;   // where slots and record end on a raw device
    // How far the run came, which whoever finds its files wants to know: the last step that
    // note_step() was told (-1: none), and when that was: a hash of the system's boot.
    int64_t step = -1;
    uint64_t boot = 0;
    // Where every slot lies, for Leftover::resume.
    uint64_t volume_id = 0;       // the same on all paths of a volume, drawn at its layout
    int32_t path = 0, paths = 0;  // this one, of so many
    double speed = 0;             // by which the slots were divided
    int64_t alignment = 0, record_bytes = 0;
    int64_t classes = 0;
    uint64_t number = 0;  // counts how often the header was written
    struct {
        int64_t slot_bytes = 0, slots = 0, slots_here = 0;
    } layout[kRecordClassesMax] = {};
    char unused[2440] = {};
};
static_assert(2 * sizeof(Header) == kHeaderBytes && offsetof(Header, layout) == 120,
              "has no padding");

// As it would be with this format's magic and version: a header proves itself also where one of
// these is damaged.
uint64_t sum_of(Header header) noexcept;

// As it is written: with magic, version, process, boot, that number and sum.
Header sealed(Header header, uint64_t number) noexcept;
// Tries both. How many of the two could be written; errno says why one could not.
int write_copies(int file, const Header& header) noexcept;
// The header in a file, which need not be in use. None: it is not there, or neither copy is whole.
std::optional<Header> whole_header(const std::string& name) noexcept;

// Whether the name still leads to the open file: it was neither removed, renamed nor replaced.
bool is_named(int file, const std::string& name) noexcept;
// By which an open file can be opened once more, or be given a name, where /proc is mounted.
std::string name_of_open(int file);

class HeaderFile {
public:
    // Opens, creates (in a directory) and locks. Throws Error where another process holds it.
    HeaderFile(std::string name, bool raw_device);
    ~HeaderFile();  // unlocks
    HeaderFile(const HeaderFile&) = delete;
    HeaderFile& operator=(const HeaderFile&) = delete;

    int file() const noexcept { return file_; }
    int64_t bytes_written() const noexcept { return bytes_written_; }
    // Finds what a killed run left: true and its header, or false. Throws where it may not be taken
    // over: a foreign file, a newer format, or one that `leftover` does not allow. A header that is
    // not whole is not believed.
    bool find_leftover(Leftover leftover, uint64_t run_id, Header& found);
    // The header of files that can be resumed; throws what stands against it. Writes nothing.
    Header find_resumable(uint64_t run_id);
    // With magic, version, process, boot and sum filled in; on stable storage at return. Throws
    // Error.
    void write(const Header& header);
    // The same in place of another run's.
    void replace(const Header& header);
    // As write(), but it is on its way only: a kill cannot lose it, a power failure can. False:
    // neither copy could be written, and errno says why.
    bool note(Header header) noexcept;
    void erase() noexcept;  // the path is free for anyone again
    // Its name still leads to it: neither it nor its directory was removed or replaced.
    bool in_place() const noexcept;
    // Whether the header there is whole, and names the same owner as this one.
    bool holds(const Header& header) const noexcept;

private:
    bool lock();
    // none: new, killed before it was written, or a device that is free for anyone.
    enum class Condition : uint8_t { none, broken, older, whole };
    struct Reading {
        Header header{};
        Condition condition = Condition::none;
        std::string fault{}, proof{};  // what is wrong: "truncated", "200 bytes"
    };
    Reading read();
    Reading judge(const Header& told, int64_t bytes) const;
    [[noreturn]] void refuse_leftover(const Reading& reading, uint64_t run_id) const;

    const std::string name_;
    const bool raw_device_;
    int file_ = -1;
    bool warned_ = false;
    uint64_t number_ = 0;  // of the newest header there
    int64_t bytes_written_ = 0;
};

}  // namespace ferry::aio
