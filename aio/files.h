// The files of one path: a locked header, and preallocated slot files that hold the slots.
//
//   <path>/ferry.volume   the header (header.h)
//   <path>/ferry.slots<N>   slots, nothing else
//
// In a volume that can be resumed, the first slot file of the first path ends with two copies of
// the record (record.h). The header is written before the first slot file and removed after the
// last one, so that a slot file without a header is never ours. On a raw block device the header is
// its first block.
//
// What a run left that can be resumed, and is to be given up, stays until nothing can refuse the
// new one any more: its slot files have no name until then, and go with the process.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "exchange.h"
#include "ferry/aio.h"
#include "header.h"
#include "probe.h"

namespace ferry::aio {

class PathFiles {
public:
    // Checks the path, locks it, deals with what is there, probes it. Throws Error.
    PathFiles(const PathOptions& path, const VolumeOptions& volume);
    ~PathFiles();
    PathFiles(const PathFiles&) = delete;
    PathFiles& operator=(const PathFiles&) = delete;

    // Taken over with every slot as it was; found() says where they lie.
    bool resumed() const noexcept { return resumed_; }
    const Header& found() const noexcept { return header_now_; }
    // The parts of the header that resuming goes by; on disk with mark_laid_out() or keep().
    void describe_layout(const Header& layout);

    int64_t alignment() const noexcept { return alignment_; }
    int file_count() const noexcept { return file_count_; }
    int64_t data_offset() const noexcept { return data_offset_; }
    int64_t capacity_bytes() const noexcept { return capacity_bytes_; }
    // Processors move its bytes, as on tmpfs: the more of them, the faster.
    bool only_copies() const noexcept { return only_copies_; }
    bool direct() const noexcept { return direct_; }  // obtained
    // Writes and reads a little in the first slot file. bytes/s, for weighing paths.
    double measure_speed();
    // Why a ring with these flags cannot be used; empty: it can.
    std::string why_no_polling(unsigned flags);
    // Bytes that probes and headers wrote.
    int64_t bytes_written() const noexcept {
        return probe_.bytes_written + header_->bytes_written();
    }
    // Preallocates slot file `index` up to `end`; they are created in order.
    void create_slot_file(int index, int64_t end);
    // Where there is no room for them beside what is given up: throws Error if there is none
    // without that either; removes it, and preallocates them.
    void check_room() const;
    void make_room();
    // What is given up goes, and ours get their names, before there is a record of theirs.
    void take_place();
    // Up to where slot file `index` was written by a killed run whose files were taken over.
    int64_t written_end(int index) const noexcept {
        const auto i = static_cast<size_t>(index);
        return i < kept_end_.size() ? kept_end_[i] : 0;
    }
    // Every byte is written: from now on a killed run's files can be taken over. Throws Error.
    void mark_laid_out();
    // A record was published: from now on the files stay when the volume goes. On all paths first
    // stage(), then keep(): see exchange.h. Both throw Error.
    void stage();
    void keep();
    bool replaces() const noexcept { return replaces_; }
    // What a start that was killed left beside the files of the run that goes on.
    void drop_staged() noexcept;
    // The first of its files that was removed, replaced, overwritten (a header) or cut while it is
    // in use; empty: none was.
    std::string missing() const;
    void note_step(int64_t step) noexcept;
    // The header stays, and says which state was lost; the space is given back. Of no effect before
    // a step was noted, or once a record was published.
    void note_lost() noexcept;
    const std::vector<int>& descriptors() const noexcept { return descriptors_; }
    std::string slot_file_name(int index) const;

private:
    static constexpr int kFilesMany = 8;  // where writers of one file take turns

    void check_directory() const;
    void open_directory(Leftover leftover, std::span<const PathOptions> paths);
    void take_over(const Header& found, bool reuse);
    void open_device(Leftover leftover);
    void open_to_resume(std::span<const PathOptions> paths);
    void finish_exchange(std::span<const PathOptions> paths);
    void check_header_is_there(const std::string& name) const;
    void check_slot_file_is_whole(int index, int64_t end) const;
    void write_first_header();
    void give_up_later(const Header& found);
    bool makes_nameless_files() const;
    void note_header(const char* what) noexcept;
    void measure_room();
    void find_alignment();
    int64_t probe_bytes() const;
    void probe();
    bool several_files_pay(int64_t room);
    int open_slot_file(int index);
    int open_file(const std::string& name, int flags);
    void reserve(size_t index);
    [[noreturn]] void refuse_space(size_t index, int error) const;
    void release() noexcept;
    [[noreturn]] void refuse(Trouble trouble, Problem problem) const;

    const PathOptions options_;
    const uint64_t run_id_;
    bool direct_;
    std::unique_ptr<HeaderFile> header_;
    Header header_now_;
    bool resumed_ = false;
    bool owned_ = false;        // the header is ours: we remove what lies here
    bool replaces_ = false;     // what lies here is another's, and goes last
    bool awaits_room_ = false;  // that must go before our slot files are preallocated
    int files_before_ = 0;      // of what is replaced
    bool staged_ = false;       // its own files lie beside what it replaces
    Nameless nameless_;         // opened early, where something is replaced
    int file_count_ = 1;        // at most, until the probe has spoken
    int kept_ = 0;              // of them, taken over from a killed run
    bool only_copies_ = false;
    Probe probe_{};
    int64_t kept_bytes_ = 0;  // of the files that are taken over or replaced
    int64_t alignment_ = 4096, data_offset_ = 0, capacity_bytes_ = 0;
    std::vector<int> descriptors_;
    std::vector<int64_t> kept_end_;
    std::vector<int64_t> ends_;  // as laid out, of each slot_file
};

}  // namespace ferry::aio
