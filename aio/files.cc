#include "files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "backend.h"
#include "base/files.h"
#include "base/log.h"
#include "errors.h"
#include "exchange.h"

namespace ferry::aio {
namespace {

constexpr int64_t kRawDataOffset = kMiB;  // keeps slots aligned to any erase block that matters

int64_t allocated_bytes(const struct stat& status) { return int64_t{status.st_blocks} * 512; }

// Whether the process or the system is at its limit: the file has no fault.
bool is_out_of_descriptors(int error) { return error == EMFILE || error == ENFILE; }

bool is_empty_file(const std::string& name) {
    struct stat status {};
    return lstat(name.c_str(), &status) == 0 && S_ISREG(status.st_mode) && status.st_size == 0;
}

}  // namespace

PathFiles::PathFiles(const PathOptions& path, const VolumeOptions& volume)
    : options_(path), run_id_(volume.run_id), direct_(volume.direct) {
    try {
        if (volume.leftover == Leftover::resume) {
            open_to_resume(volume.paths);
            return;
        }
        header_now_.run_id = run_id_;
        options_.raw_device ? open_device(volume.leftover)
                            : open_directory(volume.leftover, volume.paths);
        measure_room();
        find_alignment();
        probe();
        header_now_.files = file_count_;
        header_now_.only_copies = only_copies_;
    } catch (...) {
        release();
        throw;
    }
}

PathFiles::~PathFiles() { release(); }

void PathFiles::release() noexcept {
    const bool removes = owned_ && !options_.raw_device;
    const int opened = static_cast<int>(std::ssize(descriptors_));
    // Once staged, its state may be the one that counts: whoever comes next looks.
    if (replaces_ && !staged_) unstage(options_.path);
    for (int i = 0; i < opened; ++i) {
        const int file = descriptors_[static_cast<size_t>(i)];
        // A ring lets go of its files some time after it was closed; the space must be free now,
        // for the next volume.
        if (removes && ftruncate(file, 0) != 0)
            log_warn("aio: a slot file in " + options_.path + " could not be emptied");
        // A file that somebody put in its place is not ours.
        const bool in_place = removes && is_named(file, slot_file_name(i));
        close(file);  // first: it may be the last descriptor that this process is given
        if (in_place) remove_plain_file(slot_file_name(i));
    }
    descriptors_.clear();
    if (owned_) {
        for (int i = opened; i < file_count_ && removes; ++i) remove_plain_file(slot_file_name(i));
        if (!header_now_.lost) header_->erase();
    }
    owned_ = false;
    header_.reset();
    for (int* const one : {&nameless_.directory, &nameless_.header})
        if (*one >= 0) close(std::exchange(*one, -1));
}

void PathFiles::refuse(Trouble trouble, Problem problem) const {
    if (problem.where.empty()) problem.where = options_.path;
    throw Error(trouble, std::move(problem));
}

// ---------------------------------------------------------------- lock, header, leftovers

void PathFiles::check_directory() const {
    struct stat status {};
    if (stat(options_.path.c_str(), &status) != 0)
        refuse(Trouble::usage,
               {.what = std::string("the storage path cannot be used: ") + strerror(errno),
                .remedy = "create the directory, or correct the path"});
    if (S_ISBLK(status.st_mode))
        refuse(Trouble::usage, {.what = "the storage path is a block device",
                                .remedy = "give a directory on it; or set raw_device, which "
                                          "destroys everything on the device"});
    if (!S_ISDIR(status.st_mode))
        refuse(Trouble::usage, {.what = "the storage path is not a directory",
                                .remedy = "give a directory on the drive"});
    if (access(options_.path.c_str(), W_OK | X_OK) != 0)
        refuse(Trouble::usage,
               {.what = std::string("the storage path is not writable: ") + strerror(errno),
                .remedy = "make it writable for this user, or give another path"});
}

void PathFiles::open_directory(Leftover leftover, std::span<const PathOptions> paths) {
    check_directory();
    const std::string name = header_name(options_.path);
    // A killed run has no slot file before its header: this one lost what it said.
    if (is_empty_file(name) && access(slot_file_name(0).c_str(), F_OK) == 0)
        refuse(Trouble::io, {.what = "an empty header is left here: the files beside it may be "
                                     "whole",
                             .where = name,
                             .measured = "0 bytes",
                             .remedy = "put the header back as the run left it; or, to give its "
                                       "state up, delete the ferry.* files there"});
    header_ = std::make_unique<HeaderFile>(name, false);
    finish_exchange(paths);
    file_count_ = options_.files ? options_.files : kFilesMany;
    Header found{};
    if (header_->find_leftover(leftover, run_id_, found)) take_over(found, reuses(leftover));
    for (int i = std::max(kept_, files_before_); i < file_count_; ++i) {
        if (access(slot_file_name(i).c_str(), F_OK) == 0)
            refuse(Trouble::usage,
                   {.what = "a file of this name exists and is not ferry's, or its header is gone",
                    .where = slot_file_name(i),
                    .remedy = "if a run left it, put its ferry.volume back, as it may be whole; "
                              "else move or delete it, or give another path"});
    }
    header_now_.files = file_count_;
    if (!replaces_) write_first_header();
}

// We hold the lock, so whoever wrote this header has ended.
void PathFiles::take_over(const Header& found, bool reuse) {
    unstage(options_.path);  // of another start, which was killed
    if (found.published && !reuse && makes_nameless_files()) return give_up_later(found);
    if (reuse && found.laid_out) {
        if (!options_.files) file_count_ = found.files;
        kept_ = std::min(file_count_, found.files);
    }
    for (int i = kept_; i < found.files; ++i)
        if (const int error = remove_plain_file(slot_file_name(i)); is_out_of_descriptors(error))
            refuse(Trouble::does_not_fit,
                   problem_of("a slot file left by a killed run cannot be opened to remove it",
                              slot_file_name(i), error));
    for (int i = 0; i < kept_; ++i) {
        struct stat status {};
        if (stat(slot_file_name(i).c_str(), &status) != 0) status = {};
        // Holes mean that part of it was discarded: then all of it is written again.
        kept_end_.push_back(allocated_bytes(status) < status.st_size ? 0 : status.st_size);
        kept_bytes_ += allocated_bytes(status);
    }
    const char* why =
        reuse && !found.laid_out && !found.lost ? " (their layout was not finished)" : "";
    log_info("aio: " + options_.path + ": " +
             (kept_ ? "its files, " + format_bytes(kept_bytes_) + ", are taken over"
                    : std::string("its files are removed")) +
             why);
}

// Where that cannot be had, the files before ours go first: a file system that knows no such thing,
// or /proc is not mounted.
bool PathFiles::makes_nameless_files() const {
    const int file =
        open_above_standard(options_.path.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    // A full file system makes one again once the old files are gone.
    if (const int error = errno; file < 0 && is_out_of_descriptors(error))
        refuse(Trouble::does_not_fit,
               problem_of("no file can be made beside what a run left", options_.path, error));
    const bool can = file >= 0 && access(name_of_open(file).c_str(), F_OK) == 0;
    if (file >= 0) close(file);
    return can;
}

void PathFiles::give_up_later(const Header& found) {
    const char* path = options_.path.c_str();
    nameless_.directory = open_above_standard(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    nameless_.header = open_above_standard(path, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    if (const int error = errno; nameless_.directory < 0 || nameless_.header < 0)
        refuse(trouble_of(error), problem_of("cannot be opened", options_.path, error));
    replaces_ = true;
    files_before_ = found.files;
    for (int i = 0; i < files_before_; ++i) {
        struct stat status {};
        const std::string name = slot_file_name(i);
        if (lstat(name.c_str(), &status) != 0) continue;
        if (!S_ISREG(status.st_mode) || status.st_nlink != 1)
            refuse(Trouble::usage, {.what = "a slot file left by a run is no plain file",
                                    .where = name,
                                    .remedy = "delete it, or give another path"});
        kept_bytes_ += allocated_bytes(status);
    }
    log_info("aio: " + options_.path + ": its files, " + format_bytes(kept_bytes_) +
             ", are removed once others can take their place");
}

// From here on what lies here is ours. Nothing is opened: there may be no descriptor left.
void PathFiles::take_place() {
    if (!replaces_) return;
    const int files = header_now_.files;
    header_now_.files = std::max(files, files_before_);  // a kill leaves the old ones, too
    header_->write(header_now_);
    header_now_.files = files;
    owned_ = true;
    replaces_ = false;
    for (int i = 0; i < files_before_; ++i) remove_plain_file_unopened(slot_file_name(i));
    for (size_t i = 0; i < descriptors_.size(); ++i)
        give_name(descriptors_[i], slot_file_name(static_cast<int>(i)));
}

void PathFiles::open_device(Leftover leftover) {
    struct stat status {};
    if (stat(options_.path.c_str(), &status) != 0 || !S_ISBLK(status.st_mode))
        refuse(Trouble::usage, {.what = "raw_device is set, but the path is no block device",
                                .remedy = "clear raw_device to use a directory"});
    data_offset_ = kRawDataOffset;
    header_ = std::make_unique<HeaderFile>(options_.path, true);
    Header found{};
    const bool left = header_->find_leftover(leftover, run_id_, found);
    if (left && reuses(leftover) && found.laid_out) kept_end_ = {found.device_end};
    header_now_.files = file_count_;
    write_first_header();
    descriptors_.push_back(open_file(options_.path, 0));
}

// Nothing is probed by writing: whatever is refused stays as it was.
void PathFiles::open_to_resume(std::span<const PathOptions> paths) {
    const std::string name = header_of(options_);
    if (!options_.raw_device) check_directory();
    check_header_is_there(name);
    header_ = std::make_unique<HeaderFile>(name, options_.raw_device);
    if (!options_.raw_device) finish_exchange(paths);
    header_now_ = header_->find_resumable(run_id_);
    resumed_ = true;
    data_offset_ = options_.raw_device ? kRawDataOffset : 0;
    file_count_ = kept_ = header_now_.files;
    only_copies_ = header_now_.only_copies != 0;
    for (int i = 0; i < file_count_; ++i)
        descriptors_.push_back(options_.raw_device ? open_file(options_.path, 0)
                                                   : open_slot_file(i));
    find_alignment();
}

// Opening it would make one, and an empty one would go when it is closed.
void PathFiles::check_header_is_there(const std::string& name) const {
    const bool missing = access(name.c_str(), F_OK) != 0;
    const std::string measured = missing ? strerror(errno) : "0 bytes";
    if (!missing && !is_empty_file(name)) return;
    if (access(slot_file_name(0).c_str(), F_OK) == 0)
        refuse(Trouble::io,
               {.what = "the run cannot be resumed: its header is missing or empty",
                .where = name,
                .measured = measured,
                .remedy = "put it back as the run left it: the files beside it may be whole"});
    refuse(Trouble::usage, {.what = "there is nothing to resume: no run has left its files here",
                            .where = name,
                            .measured = measured,
                            .remedy = "name the paths of the run that was interrupted, or "
                                      "start without --resume"});
}

void PathFiles::describe_layout(const Header& layout) {
    header_now_.volume_id = layout.volume_id;
    header_now_.path = layout.path;
    header_now_.paths = layout.paths;
    header_now_.speed = layout.speed;
    header_now_.alignment = layout.alignment;
    header_now_.record_bytes = layout.record_bytes;
    header_now_.classes = layout.classes;
    memcpy(header_now_.layout, layout.layout, sizeof layout.layout);
}

void PathFiles::write_first_header() {
    owned_ = true;
    header_->write(header_now_);
}

void PathFiles::mark_laid_out() {
    header_now_.laid_out = 1;
    // A record takes the place of another, and of nothing before there is one.
    if (replaces_ && header_now_.record_bytes > 0) return;
    take_place();
    header_->write(header_now_);
}

void PathFiles::stage() {
    if (!replaces_) return;
    Header next = header_now_;
    next.published = 1;
    aio::stage(options_.path, nameless_, descriptors_, next);
    staged_ = true;
}

void PathFiles::keep() {
    const bool replaced = replaces_;
    if (!options_.raw_device && !replaced) flush_names(options_.path, nameless_.directory);
    header_now_.published = 1;
    header_->write(header_now_);
    replaces_ = owned_ = false;
    if (replaced)
        take_names(options_.path, static_cast<int>(descriptors_.size()), nameless_.directory);
}

// Of a new run that was killed while its files took the place of another's.
void PathFiles::finish_exchange(std::span<const PathOptions> paths) {
    const std::optional<Header> next = staged(options_.path);
    const auto counts = [&](const PathOptions& path) {
        const std::optional<Header> header = whole_header(header_of(path));
        return header && header->published && header->volume_id == next->volume_id;
    };
    if (!next || std::none_of(paths.begin(), paths.end(), counts)) return;
    header_->replace(*next);
    take_names(options_.path, next->files);
}

void PathFiles::drop_staged() noexcept {
    if (resumed_ && !options_.raw_device) unstage(options_.path);
}

std::string PathFiles::missing() const {
    if (replaces_) return {};  // nothing of it is durable yet
    if (options_.raw_device) return header_->holds(header_now_) ? std::string() : options_.path;
    if (!header_->in_place() || !header_->holds(header_now_)) return header_name(options_.path);
    // Under another name nobody looks for it, and cut nobody resumes by it.
    for (size_t i = 0; i < descriptors_.size(); ++i) {
        std::string name = slot_file_name(static_cast<int>(i));
        struct stat status {};
        const bool whole = is_named(descriptors_[i], name) && fstat(descriptors_[i], &status) == 0;
        if (!whole || (i < ends_.size() && status.st_size != ends_[i])) return name;
    }
    return {};
}

void PathFiles::note_step(int64_t step) noexcept {
    header_now_.step = step;
    if (!replaces_) note_header("the step");
}

void PathFiles::note_lost() noexcept {
    if (!owned_ || header_now_.step < 0) return;
    header_now_.lost = 1;
    note_header("the end of the run");
}

void PathFiles::note_header(const char* what) noexcept {
    if (!header_->note(header_now_))
        log_warn("aio: " + std::string(what) + " cannot be noted in the header on " +
                 options_.path + ": " + strerror(errno));
}

// ---------------------------------------------------------------- slot files

std::string PathFiles::slot_file_name(int index) const {
    return options_.raw_device ? options_.path : aio::slot_file_name(options_.path, index);
}

int PathFiles::open_slot_file(int index) {
    if (replaces_) return open_file(options_.path, O_TMPFILE);
    if (index >= kept_) return open_file(slot_file_name(index), O_CREAT | O_EXCL);
    if (resumed_ && access(slot_file_name(index).c_str(), F_OK) != 0)
        refuse(Trouble::io,
               {.what = "the run cannot be resumed: a slot file is missing",
                .where = slot_file_name(index),
                .measured = strerror(errno),
                .remedy = "mount or restore it: the run's other files were left as they are"});
    const int file = open_file(slot_file_name(index), resumed_ ? 0 : O_CREAT);
    struct stat status {};
    if (fstat(file, &status) == 0 && S_ISREG(status.st_mode) && status.st_nlink == 1) return file;
    close(file);
    refuse(Trouble::usage, {.what = "a slot file left by a killed run is no plain file",
                            .where = slot_file_name(index),
                            .remedy = "delete it, or give another path"});
}

int PathFiles::open_file(const std::string& name, int flags) {
    const int mode = O_RDWR | O_CLOEXEC | O_NOFOLLOW | flags;
    if (direct_) {
        const int file = open_above_standard(name.c_str(), mode | O_DIRECT, 0600);
        if (file >= 0) return file;
        if (const int error = errno; error != EINVAL)
            refuse(trouble_of(error), problem_of("cannot be opened", name, error));
        if (flags & O_EXCL) unlink(name.c_str());  // O_DIRECT is refused after the creation
        log_warn("aio: O_DIRECT is refused on " + options_.path +
                 ": buffered, and slower for it; its pages count as the kernel's memory");
        direct_ = false;
    }
    const int file = open_above_standard(name.c_str(), mode, 0600);
    const int error = errno;
    if (file < 0) refuse(trouble_of(error), problem_of("cannot be opened", name, error));
    return file;
}

void PathFiles::create_slot_file(int index, int64_t end) {
    if (static_cast<size_t>(index) == ends_.size()) ends_.push_back(end);
    if (resumed_) return check_slot_file_is_whole(index, end);
    if (options_.raw_device) {
        header_now_.device_end = end;
        return;
    }
    const auto i = static_cast<size_t>(index);
    if (i >= descriptors_.size()) descriptors_.push_back(open_slot_file(index));
    if (end > file_size_limit())
        refuse(Trouble::does_not_fit,
               {.what = "the process may not write files this large",
                .where = slot_file_name(index),
                .measured = std::to_string(end) + " bytes needed",
                .limit = std::to_string(file_size_limit()) + " bytes (RLIMIT_FSIZE)",
                .remedy = remedy_for(EFBIG)});
    struct stat status {};
    const int file = descriptors_[i];
    if (fstat(file, &status) != 0 || (status.st_size > end && ftruncate(file, end) != 0))
        refuse(Trouble::io, problem_of("cannot be cut to size", slot_file_name(index), errno));
    if (end > 0) reserve(i);
}

void PathFiles::check_slot_file_is_whole(int index, int64_t end) const {
    struct stat status {};
    const bool known = fstat(descriptors_[static_cast<size_t>(index)], &status) == 0;
    const int64_t size = options_.raw_device ? header_now_.device_end : status.st_size;
    if (known && size == end) return;
    refuse(Trouble::io, {.what = "a slot file of the run to resume is not as it was laid out",
                         .where = slot_file_name(index),
                         .measured = std::to_string(size) + " bytes",
                         .limit = std::to_string(end) + " bytes",
                         .remedy = "put the files back as the run left them, or start without "
                                   "--resume"});
}

namespace {

// Its errno; 0: the file has these blocks.
int preallocate(int file, int64_t end) {
    while (fallocate(file, 0, 0, end) != 0)
        if (errno != EINTR) return errno;
    return 0;
}

}  // namespace

void PathFiles::reserve(size_t index) {
    int64_t both = kept_bytes_;
    for (const int64_t end : ends_) both += end;
    // More than the path may take is not taken meanwhile either; nor is memory, of which there may
    // be less than its file system says.
    if (replaces_)
        awaits_room_ |= only_copies_ || (options_.size_bytes > 0 && both > options_.size_bytes);
    if (awaits_room_) return;
    const int file = descriptors_[index];
    int error = preallocate(file, ends_[index]);
    if (error == EOPNOTSUPP) {
        struct statvfs room {};
        awaits_room_ = replaces_ && statvfs(options_.path.c_str(), &room) == 0 &&
                       static_cast<int64_t>(room.f_bavail * room.f_frsize) < both - kept_bytes_;
        if (awaits_room_) return;
        log_warn("aio: " + options_.path + " cannot preallocate: space may run out later");
        error = ftruncate(file, ends_[index]) == 0 ? 0 : errno;
    }
    if (error == 0) return;
    awaits_room_ = replaces_ && (error == ENOSPC || error == EDQUOT);
    if (!awaits_room_) refuse_space(index, error);
}

void PathFiles::refuse_space(size_t index, int error) const {
    Problem problem =
        problem_of("space cannot be reserved", slot_file_name(static_cast<int>(index)), error);
    problem.measured = std::to_string(ends_[index]) + " bytes needed";
    const bool space = error == ENOSPC || error == EDQUOT || error == EFBIG;
    refuse(space ? Trouble::does_not_fit : Trouble::io, std::move(problem));
}

void PathFiles::check_room() const {
    if (!awaits_room_) return;
    struct statvfs room {};
    if (statvfs(options_.path.c_str(), &room) != 0)
        refuse(Trouble::io, problem_of("free space cannot be read", options_.path, errno));
    if (room.f_blocks == 0) return;
    int64_t there = static_cast<int64_t>(room.f_bavail * room.f_frsize) + kept_bytes_, needed = 0;
    for (size_t i = 0; i < ends_.size(); ++i) {
        struct stat status {};
        if (fstat(descriptors_[i], &status) == 0) there += allocated_bytes(status);
        needed += ends_[i];
    }
    if (needed <= there) return;
    refuse(Trouble::does_not_fit,
           {.what = "the path has too little free space, also without what a run left there: " +
                    std::to_string(needed - there) + " bytes (" + format_bytes(needed - there) +
                    ") are missing",
            .measured = std::to_string(there) + " bytes",
            .limit = std::to_string(needed) + " bytes needed",
            .remedy = "free some space, or give the path a smaller size"});
}

void PathFiles::make_room() {
    if (!awaits_room_) return;
    log_info("aio: " + options_.path +
             ": what a run left is removed now: there is no room for both");
    awaits_room_ = false;
    take_place();
    for (size_t i = 0; i < ends_.size(); ++i)
        if (ends_[i] > 0) reserve(i);
}

}  // namespace ferry::aio
