#include "header.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstring>
#include <thread>

#include "aio/published_run.h"
#include "base/checksum.h"
#include "base/files.h"
#include "base/log.h"
#include "errors.h"

namespace ferry::aio {
namespace {

constexpr uint32_t kFormatVersion = 5;
constexpr char kMagic[8] = {'f', 'e', 'r', 'r', 'y', 'v', 'o', 'l'};

bool has_magic(const Header& header, ssize_t bytes) {
    return bytes >= static_cast<ssize_t>(sizeof kMagic) &&
           memcmp(header.magic, kMagic, sizeof kMagic) == 0;
}

bool is_whole(const Header& header, ssize_t bytes) {
    return bytes >= static_cast<ssize_t>(sizeof header) && has_magic(header, bytes) &&
           header.version == kFormatVersion && header.sum == sum_of(header);
}

constexpr auto kEach = static_cast<ssize_t>(sizeof(Header));

// Both copies, each read by itself: a sector that the drive lost costs the one that it lies in.
struct Copies {
    explicit Copies(int file) {
        for (int i = 0; i < 2; ++i) {
            got[i] = pread(file, &both[i], sizeof(Header), i * kEach);
            errors[i] = got[i] < 0 ? errno : 0;
            whole[i] = is_whole(both[i], got[i]);
        }
        if (whole[0]) counts = &both[0];
        if (whole[1] && (!whole[0] || both[1].number > both[0].number)) counts = &both[1];
    }
    Copies(const Copies&) = delete;
    Copies& operator=(const Copies&) = delete;

    Header both[2]{};
    ssize_t got[2]{};
    int errors[2]{};  // errno of each copy that could not be read
    bool whole[2]{};
    const Header* counts = nullptr;  // the newer copy that is whole
};

std::string hex(uint64_t value) {
    char text[20];
    snprintf(text, sizeof text, "%016lx", static_cast<unsigned long>(value));
    return text;
}

// Tells whether a step was noted since the system started: what was noted before may have been lost
// with the power.
uint64_t boot_now() noexcept {
    static const uint64_t kBoot = [] {
        char id[64] = {};
        const int file = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
        if (file < 0) return uint64_t{0};
        const ssize_t bytes = ::read(file, id, sizeof id);
        close(file);
        return bytes > 0 ? checksum(std::as_bytes(std::span(id))) : 0;
    }();
    return kBoot;
}

void put_name(Header& header) noexcept {
    memcpy(header.magic, kMagic, sizeof kMagic);
    header.version = kFormatVersion;
}

std::string lost_state(const Header& header) {
    if (!header.laid_out) return "its layout was not finished";
    if (header.step < 0) return "not consistent";
    const bool later = header.boot != boot_now();
    return "not consistent, state of step " + std::to_string(header.step) +
           (later ? " or a later one lost" : " lost");
}

// A configuration has a key for it, who opens a volume without one an option.
std::string set_leftovers(const std::string& values) {
    return "set io.leftovers (VolumeOptions::leftover) to " + values;
}

std::string format_name(uint32_t version) { return "format " + std::to_string(version); }

Error not_ferrys(const std::string& name) {
    return Error(Trouble::usage, {.what = "a file of this name exists and is not ferry's",
                                  .where = name,
                                  .remedy = "move or delete it, or give another path"});
}

// Nothing but the first slot file beside it tells that this was a header.
Error overwritten(const std::string& name, int64_t bytes) {
    return Error(Trouble::io,
                 {.what = "an overwritten header is left here: the files beside it may be whole",
                  .where = name,
                  .measured = std::to_string(bytes) + " bytes, of which no header is made",
                  .remedy = "put the header back as the run left it; or, to give its state up, "
                            "delete the ferry.* files there"});
}

bool has_slot_file_beside(const std::string& name) {
    return access(slot_file_name(name.substr(0, name.rfind('/')), 0).c_str(), F_OK) == 0;
}

Error not_opened(const std::string& name, int error) {
    const bool theirs = error == EACCES || error == EPERM;
    struct stat status {};
    const bool known = lstat(name.c_str(), &status) == 0;
    if (known && (S_ISDIR(status.st_mode) || S_ISSOCK(status.st_mode))) return not_ferrys(name);
    std::string what = "the volume's header cannot be opened";
    if (theirs && known && status.st_uid != geteuid())
        what = "the storage path holds the volume of another user (uid " +
               std::to_string(status.st_uid) + ")";
    // A file system of the kernel's own, such as /proc, answers creation with ENOENT.
    if (error == ENOENT) what = "no file can be created in the storage path";
    const bool users = theirs || error == ENOENT || error == EROFS || error == EBUSY;
    return Error(users ? Trouble::usage : trouble_of(error), problem_of(what, name, error));
}

// An empty header is what was just made, or all that a killed process came to: it says nothing.
void remove_if_empty(int file, const std::string& name) noexcept {
    struct stat status {};
    const bool plain = fstat(file, &status) == 0 && S_ISREG(status.st_mode) && status.st_nlink == 1;
    if (plain && status.st_size == 0) unlink(name.c_str());
}

// Waits a moment: a killed process holds its lock until the last of it has ended, and whoever
// removes its files then holds that lock meanwhile.
bool lock_soon(int file) {
    using namespace std::chrono_literals;
    const auto until = std::chrono::steady_clock::now() + 500ms;
    while (flock(file, LOCK_EX | LOCK_NB) != 0) {
        if (errno != EWOULDBLOCK || std::chrono::steady_clock::now() >= until) return false;
        std::this_thread::sleep_for(5ms);
    }
    return true;
}

void lock_or_throw(int file, const std::string& name) {
    if (lock_soon(file)) return;
    if (const int error = errno; error != EWOULDBLOCK) {
        remove_if_empty(file, name);  // where nobody can lock
        close(file);
        throw Error(Trouble::io, problem_of("the storage path cannot be locked", name, error));
    }
    Header header{};
    const bool known = has_magic(header, pread(file, &header, sizeof header, 0));
    close(file);
    throw Error(Trouble::usage, {.what = "the storage path is in use by another ferry",
                                 .where = name,
                                 .measured = known ? "process " + std::to_string(header.pid) : "",
                                 .remedy = "wait for it, stop it, or give another path"});
}

}  // namespace

std::string header_name(const std::string& path) { return path + "/ferry.volume"; }

std::string header_of(const PathOptions& path) {
    return path.raw_device ? path.path : header_name(path.path);
}

std::string slot_file_name(const std::string& path, int index) {
    return path + "/ferry.slots" + std::to_string(index);
}

uint64_t sum_of(Header header) noexcept {
    put_name(header);
    header.sum = 0;
    return checksum(std::as_bytes(std::span(&header, 1)));
}

uint64_t published_run(const PathOptions& path) noexcept {
    const std::optional<Header> header = whole_header(header_of(path));
    return header && header->published ? header->run_id : 0;
}

Header sealed(Header header, uint64_t number) noexcept {
    put_name(header);
    header.pid = getpid();
    header.boot = boot_now();
    header.number = number;
    header.sum = sum_of(header);
    return header;
}

int write_copies(int file, const Header& header) noexcept {
    int written = 0, error = 0;
    for (const off_t at : {off_t{0}, off_t{kEach}}) {
        errno = EIO;  // a short count says nothing else
        if (pwrite(file, &header, sizeof header, at) == kEach)
            ++written;
        else
            error = errno;
    }
    errno = error;
    return written;
}

std::optional<Header> whole_header(const std::string& name) noexcept {
    const int file =
        open_above_standard(name.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (file < 0) return std::nullopt;
    const Copies known(file);
    close(file);
    if (known.counts == nullptr) return std::nullopt;
    return *known.counts;
}

bool is_named(int file, const std::string& name) noexcept {
    struct stat opened {
    }, named{};
    return fstat(file, &opened) == 0 && stat(name.c_str(), &named) == 0 &&
           opened.st_ino == named.st_ino && opened.st_dev == named.st_dev;
}

std::string name_of_open(int file) { return "/proc/self/fd/" + std::to_string(file); }

HeaderFile::HeaderFile(std::string name, bool raw_device)
    : name_(std::move(name)), raw_device_(raw_device) {
    // Between opening and locking the owner may remove the file: then the lock is on nothing.
    while (!lock()) {
    }
}

HeaderFile::~HeaderFile() {
    if (file_ < 0) return;
    remove_if_empty(file_, name_);  // the file was refused
    close(file_);
}

// False: another process removed the header before the lock was taken.
bool HeaderFile::lock() {
    // O_EXCL on a device: refused while it is mounted or otherwise claimed.
    const int flags = O_RDWR | O_CLOEXEC | O_NOFOLLOW | (raw_device_ ? O_EXCL : O_CREAT);
    int file = open_above_standard(name_.c_str(), flags, 0600);
    if (file < 0 && errno == EBUSY) {
        // O_EXCL does not say who claims the device: a ferry also holds its lock, and may be
        // ending.
        const int busy = open_above_standard(name_.c_str(), O_RDONLY | O_CLOEXEC);
        if (busy >= 0) lock_or_throw(busy, name_), close(busy);
        file = open_above_standard(name_.c_str(), flags, 0600);
    }
    if (file < 0) throw not_opened(name_, errno);
    struct stat opened {
    }, named{};
    if (!raw_device_ && fstat(file, &opened) == 0 && !S_ISREG(opened.st_mode)) {
        close(file);
        throw not_ferrys(name_);
    }
    lock_or_throw(file, name_);
    if (raw_device_ || (fstat(file, &opened) == 0 && stat(name_.c_str(), &named) == 0 &&
                        opened.st_ino == named.st_ino)) {
        file_ = file;
        return true;
    }
    close(file);
    return false;
}

// Throws where it is not ferry's, or a newer ferry's.
HeaderFile::Reading HeaderFile::read() {
    const Copies known(file_);
    if (known.counts == nullptr) {
        // A copy that could not be read may be whole.
        for (const int error : known.errors)
            if (error != 0)
                throw Error(Trouble::io,
                            problem_of("the volume's header cannot be read", name_, error));
        // The copy that proves most of what it was.
        const auto says = [&](int i) {
            return has_magic(known.both[i], known.got[i]) ||
                   (known.got[i] == kEach && known.both[i].sum == sum_of(known.both[i]));
        };
        const int told = !says(0) && says(1) ? 1 : 0;
        return judge(known.both[told], known.got[told]);
    }
    // A file that ends after its first copy: the writer was killed between the two.
    if (!known.whole[0] || (!known.whole[1] && known.got[1] != 0)) {
        const int bad = known.whole[0] ? 1 : 0;
        log_warn("aio: the " + std::string(bad == 1 ? "second" : "first") + " of two headers in " +
                 name_ +
                 (known.errors[bad] == 0
                      ? " is damaged"
                      : " cannot be read (" + std::string(strerror(known.errors[bad])) + ")") +
                 ", the other one is whole and counts: check the drive");
    }
    number_ = known.counts->number;
    Reading reading;
    reading.header = *known.counts;
    reading.condition = Condition::whole;
    return reading;
}

// Says what is there where neither copy is whole.
HeaderFile::Reading HeaderFile::judge(const Header& told, int64_t bytes) const {
    Reading reading;
    const Header& header = reading.header = told;
    const auto broken = [&](const char* fault, std::string proof) {
        reading.condition = Condition::broken;
        reading.fault = fault;
        reading.proof = std::move(proof);
        return reading;
    };
    const bool complete = bytes == int64_t{sizeof header};
    const bool named = has_magic(header, bytes);
    const bool current = named && header.version == kFormatVersion;
    if (complete && header.sum == sum_of(header))
        return broken("damaged", "its magic or version is not as it was");
    if (!named && (bytes == 0 || raw_device_)) return reading;  // a device's may be destroyed
    if (!named && has_slot_file_beside(name_)) throw overwritten(name_, bytes);
    if (!named) throw not_ferrys(name_);
    if (!complete) return broken("truncated", std::to_string(bytes) + " bytes");
    if (current) return broken("damaged", "its checksum does not match");
    reading.condition = Condition::older;
    if (header.version < kFormatVersion) return reading;
    throw Error(Trouble::usage,
                {.what = "the volume was written by a newer ferry",
                 .where = name_,
                 .measured = format_name(header.version),
                 .limit = format_name(kFormatVersion),
                 .remedy = raw_device_ ? "update ferry, or erase the device's first two blocks"
                                       : "update ferry, or delete the ferry.* files there"});
}

bool HeaderFile::find_leftover(Leftover leftover, uint64_t run_id, Header& found) {
    const Reading reading = read();
    if (reading.condition == Condition::none) return false;
    found = reading.header;
    const bool any = leftover == Leftover::remove_any || leftover == Leftover::reuse_any;
    const bool known = reading.condition == Condition::whole;
    const bool lost = known && found.lost;  // nothing is left that anybody could miss
    const bool own = lost || (known && found.run_id == run_id && !found.published);
    if (leftover == Leftover::refuse || !(own || any)) refuse_leftover(reading, run_id);
    if (reading.condition == Condition::broken) {
        found = {.files = kFilesMax, .published = 1};  // it may have been
        log_info("aio: " + name_ + " is " + reading.fault + ": the files beside it are given up");
        return true;
    }
    found.files = std::clamp(found.files, 1, kFilesMax);
    log_info("aio: process " + std::to_string(found.pid) + ", run " + hex(found.run_id) +
             (found.run_id == run_id ? "" : " (another run)") + ", " +
             (lost ? "ended with an error" : "was killed") + " and left " + name_ + ": " +
             (!known            ? "an older format"
              : found.published ? "its durable state is given up"
                                : lost_state(found)));
    if (!known || lost) found.laid_out = 0;
    if (!known) found.published = 1;
    return true;
}

void HeaderFile::refuse_leftover(const Reading& reading, uint64_t run_id) const {
    const Header& header = reading.header;
    Problem problem{
        .what = "files of a killed run are left here",
        .where = name_,
        .measured = "process " + std::to_string(header.pid) + ", run " + hex(header.run_id)};
    std::string allow = set_leftovers("\"remove_any\"");
    if (reading.condition == Condition::broken) {
        problem.what =
            "a " + reading.fault + " header is left here: the files beside it may be whole";
        problem.measured = reading.proof;
        allow = "put the header back as the run left it; or, to give its state up, " + allow;
    } else if (reading.condition == Condition::older) {
        problem.what = "stale files of an older ferry are left here";
        problem.measured = format_name(header.version);
        problem.limit = format_name(kFormatVersion);
    } else if (header.published) {
        problem.what = "the durable state of a run is kept here";
        problem.measured += ", last committed step " + std::to_string(header.step);
        if (header.run_id != run_id) problem.limit = "this run is " + hex(run_id);
        allow = "go on with it (--resume); or, to give it up, " + allow;
    } else if (header.lost) {
        problem.what = "the header of a run that ended with an error is left here";
        allow = set_leftovers("\"remove\"");
    } else if (header.run_id != run_id) {
        problem.what = "files of another run, which was killed, are left here";
        problem.limit = "this run is " + hex(run_id);
    } else {
        allow = set_leftovers("\"remove\" or \"reuse\"");
    }
    if (reading.condition == Condition::whole && !header.published)
        problem.measured += "; " + lost_state(header);
    problem.remedy = allow + (raw_device_ ? ", or erase the device's first two blocks"
                                          : ", or delete the ferry.* files there");
    throw Error(reading.condition == Condition::broken ? Trouble::io : Trouble::usage,
                std::move(problem));
}

Header HeaderFile::find_resumable(uint64_t run_id) {
    const Reading reading = read();
    const Header& found = reading.header;
    const auto refuse = [&](std::string what, std::string measured, std::string limit,
                            std::string remedy, Trouble trouble = Trouble::usage) {
        throw Error(trouble, {.what = std::move(what),
                              .where = name_,
                              .measured = std::move(measured),
                              .limit = std::move(limit),
                              .remedy = std::move(remedy)});
    };
    const std::string afresh =
        "start without --resume; with checkpoint.durable_steps a run survives but for its last "
        "steps";
    const std::string nothing = "there is nothing to resume: ";
    if (reading.condition == Condition::none)
        refuse(nothing + "no run has left its files here", "", "", afresh);
    // A header that says nothing is no word against the files beside it.
    if (reading.condition == Condition::broken)
        refuse("the run cannot be resumed: the header is " + reading.fault, reading.proof, "",
               "put the header back as the run left it: the files beside it may be whole",
               Trouble::io);
    if (reading.condition == Condition::older)
        refuse(nothing + "the files are an older ferry's", format_name(found.version),
               format_name(kFormatVersion), "finish the run with the ferry that began it");
    if (found.run_id != run_id)
        refuse(nothing + "the files are of another run", "run " + hex(found.run_id),
               "this one is " + hex(run_id),
               "resume with the model, batch, precision, optimizer and machine of that run");
    if (!found.published) refuse(nothing + lost_state(found), "", "", afresh);
    // The checksum proves no more than that whoever wrote it knew how.
    const bool some = found.files >= 1 && found.files <= kFilesMax;
    if (!some || !std::isfinite(found.speed) || found.speed <= 0)
        refuse(
            "the run cannot be resumed: its header says what no ferry writes",
            std::to_string(found.files) + " slot files, a speed of " + std::to_string(found.speed),
            "1 to " + std::to_string(kFilesMax) + " slot files, a speed above 0",
            "put the header back as the run left it: the files beside it may be whole",
            Trouble::io);
    return found;
}

bool HeaderFile::note(Header header) noexcept {
    header = sealed(header, ++number_);
    bytes_written_ += kHeaderBytes;
    const int written = write_copies(file_, header);  // either alone is enough to go on by
    const int error = errno;
    if (written == 1 && !warned_) {
        warned_ = true;
        log_warn("aio: one of two headers in " + name_ + " cannot be written: " + strerror(error) +
                 ": check the drive");
    }
    errno = error;
    return written > 0;
}

bool HeaderFile::holds(const Header& header) const noexcept {
    const Copies known(file_);
    return known.counts != nullptr && known.counts->run_id == header.run_id &&
           known.counts->volume_id == header.volume_id &&
           known.counts->published == header.published;
}

bool HeaderFile::in_place() const noexcept { return is_named(file_, name_); }

void HeaderFile::write(const Header& header) {
    if (note(header) && fdatasync(file_) == 0) return;
    const int error = errno;
    throw Error(error == ENOSPC ? Trouble::does_not_fit : trouble_of(error),
                problem_of("the volume's header cannot be written", name_, error));
}

void HeaderFile::replace(const Header& header) {
    read();  // the number that it has to exceed
    write(header);
}

void HeaderFile::erase() noexcept {
    if (!raw_device_) {
        unlink(name_.c_str());
        return;
    }
    // Without the magic the device is free for anyone again.
    alignas(4096) static const char kZero[kHeaderBytes] = {};
    if (pwrite(file_, kZero, kHeaderBytes, 0) != kHeaderBytes)
        log_warn("aio: the header on " + name_ + " could not be erased");
}

}  // namespace ferry::aio
