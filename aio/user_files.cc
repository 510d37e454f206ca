#include "ferry/user_files.h"

#include <fcntl.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <vector>

#include "backend.h"
#include "base/files.h"
#include "errors.h"
#include "header.h"
#include "queue.h"

namespace ferry::aio {
namespace {

constexpr int64_t kAlignment = 4096;        // transfers around the page cache need it
constexpr int kDescriptorsMax = 1 << 16;    // Transfer::file names one
constexpr unsigned kModeOfNewFiles = 0600;  // as all that ferry writes

bool is_aligned(const Operation& operation) {
    return operation.offset % kAlignment == 0 &&
           reinterpret_cast<uintptr_t>(operation.buffer.data()) % uintptr_t{kAlignment} == 0;
}

// An operation is one request, or two: the whole blocks of it, and what is left.
struct Split {
    std::array<Operation, 2> parts{};
    Operation* whole = nullptr;
    int left = 0;  // parts under way
};

struct File {
    std::string path{};
    int descriptor = -1;  // through the page cache; -1: the number is free
    int direct = -1;      // around it; -1: cannot be had
    bool writes = false;
    int under_way = 0;
};

// Of a file that its caller names, not of a place for ferry's own.
[[noreturn]] void refuse_to_open(const std::string& path, int error) {
    Problem problem = problem_of("the file cannot be opened", path, error);
    if (error == ENOENT || error == ENOTDIR) problem.remedy = "correct the path";
    if (error == EACCES || error == EPERM)
        problem.remedy = "give a file that this user may open, or change its owner or mode";
    throw Error(trouble_of(error), problem);
}

}  // namespace

class UserFiles::OnQueue {
public:
    OnQueue(const UserFilesOptions& options, Executor& executor)
        : options_(options),
          executor_(executor),
          files_(static_cast<size_t>(options.files_max)),
          splits_(static_cast<size_t>(options.operations_max)) {
        for (auto i = static_cast<FileNumber>(files_.size()); i-- > 0;) free_files_.push_back(i);
        for (auto i = static_cast<uint32_t>(splits_.size()); i-- > 0;) free_splits_.push_back(i);
        const int operations = 2 * options.operations_max;
        queue_ = std::make_unique<Queue>(
            QueueOptions{.name = "files",
                         .depth = options.queue_depth,
                         .operations_max = operations,
                         .block_bytes = options.block_bytes,
                         .alignment = kAlignment,
                         .slots = files_.size()},
            factory_of(options.backend)({.by_descriptor = true, .depth = options.queue_depth}),
            executor);
        executor_.host(*queue_);
    }
    OnQueue(const OnQueue&) = delete;
    OnQueue& operator=(const OnQueue&) = delete;
    ~OnQueue() {
        cancel_queued();
        while (in_flight_ > 0)
            if (!poll()) executor_.wait(kForever);
        executor_.retire(*queue_);
        for (File& file : files_) close_all_of(file);
    }

    FileNumber add(const std::string& path, FileUse use) {
        check_room(path);
        struct stat status {};
        if (stat(path.c_str(), &status) == 0) check_kind(status, path);  // opening a pipe may wait
        const bool writes = use == FileUse::write;
        const int flags = O_CLOEXEC | (writes ? O_RDWR | O_CREAT : O_RDONLY);
        File file{.path = path, .writes = writes};
        file.descriptor = open_above_standard(path.c_str(), flags, kModeOfNewFiles);
        if (file.descriptor < 0) refuse_to_open(path, errno);
        // Refused by file systems that know no O_DIRECT: then all goes through the page cache.
        // Not by its name, which may lead to another file by now.
        if (options_.direct)
            file.direct = open_above_standard(name_of_open(file.descriptor).c_str(),
                                              (flags & ~O_CREAT) | O_DIRECT);
        return keep(std::move(file));
    }

    FileNumber add(int descriptor) {
        const std::string path = "descriptor " + std::to_string(descriptor);
        check_room(path);
        const int flags = fcntl(descriptor, F_GETFL);
        constexpr int kFirst = 3;  // above the standard streams
        File file{.path = path, .writes = (flags & O_ACCMODE) != O_RDONLY};
        file.descriptor = flags < 0 ? -1 : fcntl(descriptor, F_DUPFD_CLOEXEC, kFirst);
        if (file.descriptor < 0)
            throw errno == EBADF
                ? Error(Trouble::usage, problem_of("the file is not open", path, errno))
                : Error(trouble_of(errno), problem_of("the file cannot be opened", path, errno));
        // O_DIRECT is the open file's, and the caller's too: another opening has it, or has not.
        const std::string again = name_of_open(descriptor);
        const int access = O_CLOEXEC | (flags & O_ACCMODE);
        if (options_.direct) file.direct = open_above_standard(again.c_str(), access | O_DIRECT);
        if (flags & O_DIRECT) {
            close(file.descriptor);
            file.descriptor = open_above_standard(again.c_str(), access);
            if (file.descriptor < 0) {
                const int error = errno;
                close_all_of(file);
                throw Error(Trouble::io, problem_of("the file cannot be opened", path, error));
            }
        }
        return keep(std::move(file));
    }

    bool is_open(FileNumber file) const noexcept {
        return file < files_.size() && files_[file].descriptor >= 0;
    }

    void remove(FileNumber number) noexcept {
        File& file = of(number);
        FERRY_CHECK(file.under_way == 0, "a file is closed with operations under way");
        close_all_of(file);
        free_files_.push_back(number);
    }

    int in_flight(FileNumber number) const noexcept { return of(number).under_way; }

    int64_t size_bytes(FileNumber number) const {
        const File& file = of(number);
        struct stat status {};
        uint64_t device_bytes = 0;
        if (fstat(file.descriptor, &status) != 0 ||
            (S_ISBLK(status.st_mode) && ioctl(file.descriptor, BLKGETSIZE64, &device_bytes) != 0))
            throw Error(Trouble::io, problem_of("the file's size is not known", file.path, errno));
        return S_ISBLK(status.st_mode) ? static_cast<int64_t>(device_bytes) : status.st_size;
    }

    void flush(FileNumber number) {
        const File& file = of(number);
        if (fdatasync(file.descriptor) != 0)
            throw Error(Trouble::io, problem_of("flush failed", file.path, errno));
    }

    bool try_submit(Operation& operation) {
        FERRY_CHECK(operation.state != State::queued, "an operation is submitted twice");
        check_reach(operation);
        if (free_splits_.empty()) return false;
        const uint32_t index = free_splits_.back();
        free_splits_.pop_back();
        begin(operation, executor_.now());
        ++in_flight_;
        ++of(operation.slot).under_way;
        start(index, operation);
        return true;
    }

    Operation* poll() noexcept {
        while (Operation* const part = queue_->poll()) {
            Split& split = splits_[part->tag];
            Operation& whole = *split.whole;
            whole.done_bytes += part->done_bytes;
            whole.finished_ns = std::max(whole.finished_ns, part->finished_ns);
            if (whole.error == 0) whole.error = part->error;
            if (part->state == State::cancelled) whole.state = State::cancelled;
            if (--split.left > 0) continue;
            finish(static_cast<uint32_t>(part->tag));
            return &whole;
        }
        return nullptr;
    }

    void cancel_queued() noexcept { queue_->cancel(); }
    int in_flight() const noexcept { return in_flight_; }
    std::string describe(FileNumber number) const { return of(number).path; }
    std::string_view backend_name() const noexcept { return queue_->backend_name(); }

private:
    File& of(FileNumber number) {
        FERRY_CHECK(is_open(number), "a file that is not open");
        return files_[number];
    }
    const File& of(FileNumber number) const {
        FERRY_CHECK(is_open(number), "a file that is not open");
        return files_[number];
    }

    void check_room(const std::string& path) const {
        if (!free_files_.empty()) return;
        throw Error(Trouble::usage, {.what = "too many files are open",
                                     .where = path,
                                     .measured = std::to_string(files_.size()) + " files",
                                     .limit = "files_max of " + std::to_string(options_.files_max),
                                     .remedy = "close some, or open with more"});
    }

    FileNumber keep(File file) {
        try {
            struct stat status {};
            if (fstat(file.descriptor, &status) == 0) check_kind(status, file.path);
            if (std::max(file.descriptor, file.direct) >= kDescriptorsMax)
                throw Error(Trouble::usage, {.what = "the process has too many files open",
                                             .where = file.path,
                                             .limit = std::to_string(kDescriptorsMax)});
        } catch (...) {
            close_all_of(file);
            throw;
        }
        if (file.direct >= 0 && !takes_blocks(file.direct)) {
            close(file.direct);
            file.direct = -1;
        }
        const FileNumber number = free_files_.back();
        free_files_.pop_back();
        files_[number] = std::move(file);
        return number;
    }

    static void check_kind(const struct stat& status, const std::string& path) {
        if (S_ISREG(status.st_mode) || S_ISBLK(status.st_mode)) return;
        throw Error(Trouble::usage, {.what = "it is no file that bytes have a place in",
                                     .where = path,
                                     .measured = "a directory, pipe, socket or the like",
                                     .limit = "regular files and block devices"});
    }

    // Whether multiples of 4096 are enough for O_DIRECT, as far as the kernel says.
    static bool takes_blocks([[maybe_unused]] int descriptor) {
#ifdef STATX_DIOALIGN
        struct statx status {};
        if (statx(descriptor, "", AT_EMPTY_PATH, STATX_DIOALIGN, &status) == 0 &&
            (status.stx_mask & STATX_DIOALIGN))
            return status.stx_dio_offset_align > 0 &&
                   kAlignment % status.stx_dio_offset_align == 0 &&
                   kAlignment % std::max<uint32_t>(status.stx_dio_mem_align, 1) == 0;
#endif
        return true;
    }

    static void close_all_of(File& file) noexcept {
        if (file.descriptor >= 0) close(file.descriptor);
        if (file.direct >= 0) close(file.direct);
        file = File{};
    }

    void check_reach(const Operation& operation) const {
        const File& file = of(operation.slot);
        const auto size = static_cast<int64_t>(operation.buffer.size());
        FERRY_CHECK(size > 0 && operation.offset >= 0, "an operation without a place");
        if (operation.kind == Kind::write) {
            if (file.writes) return;
            throw Error(Trouble::usage, {.what = "a file that was opened for reading is written",
                                         .where = file.path,
                                         .remedy = "open it for writing"});
        }
        const int64_t end = size_bytes(operation.slot);
        if (operation.offset <= end - size) return;
        throw Error(Trouble::io, {.what = "the file is shorter than what is read of it",
                                  .where = file.path,
                                  .measured = std::to_string(end) + " bytes",
                                  .limit = std::to_string(size) + " bytes from " +
                                           std::to_string(operation.offset) + " on",
                                  .remedy = "read less, or write the rest of the file first"});
    }

    void start(uint32_t index, Operation& operation) {
        const File& file = of(operation.slot);
        const auto size = static_cast<int64_t>(operation.buffer.size());
        const bool direct = file.direct >= 0 && is_aligned(operation);
        const int64_t blocks = direct ? round_down(size, kAlignment) : 0;
        Split& split = splits_[index];
        split.whole = &operation;
        split.left = (blocks > 0 ? 1 : 0) + (blocks < size ? 1 : 0);
        if (blocks > 0) send(split.parts[0], index, file.direct, 0, blocks);
        if (blocks < size) send(split.parts[1], index, file.descriptor, blocks, size - blocks);
    }

    void send(Operation& part, uint32_t index, int descriptor, int64_t start, int64_t size) {
        const Operation& whole = *splits_[index].whole;
        part = Operation{
            .kind = whole.kind,
            .priority = whole.priority,
            .slot = whole.slot,
            .offset = whole.offset + start,
            .buffer = whole.buffer.subspan(static_cast<size_t>(start), static_cast<size_t>(size)),
            .tag = index,
            .state = State::queued,
            .submitted_ns = whole.submitted_ns};
        queue_->submit({.operation = &part,
                        .verb = whole.kind == Kind::read ? Verb::read : Verb::write,
                        .file = static_cast<uint16_t>(descriptor),
                        .file_offset = part.offset,
                        .size_bytes = size});
    }

    void finish(uint32_t index) noexcept {
        Operation& whole = *splits_[index].whole;
        if (whole.error != 0)
            whole.state = State::failed;
        else if (whole.state != State::cancelled)
            whole.state = State::done;
        --files_[whole.slot].under_way;
        --in_flight_;
        free_splits_.push_back(index);
    }

    const UserFilesOptions options_;
    Executor& executor_;
    std::vector<File> files_;
    std::vector<FileNumber> free_files_;
    std::vector<Split> splits_;
    std::vector<uint32_t> free_splits_;
    int in_flight_ = 0;
    std::unique_ptr<Queue> queue_{};
};

namespace {

void check(const char* name, int64_t value, int64_t least, int64_t most) {
    if (value >= least && value <= most) return;
    throw Error(Trouble::usage, {.what = std::string(name) + " is out of range",
                                 .measured = std::to_string(value),
                                 .limit = std::to_string(least) + " to " + std::to_string(most)});
}

}  // namespace

std::unique_ptr<UserFiles> UserFiles::open(const UserFilesOptions& options, Executor& executor) {
    check("block_bytes", options.block_bytes, kAlignment, kGiB);
    check("queue_depth", options.queue_depth, 1, 4096);
    check("operations_max", options.operations_max, 1, 1 << 20);
    check("files_max", options.files_max, 1, 1 << 20);
    UserFilesOptions rounded = options;
    rounded.block_bytes = round_down(options.block_bytes, kAlignment);
    return std::unique_ptr<UserFiles>(new UserFiles(std::make_unique<OnQueue>(rounded, executor)));
}

UserFiles::UserFiles(std::unique_ptr<OnQueue> files) : files_(std::move(files)) {}
UserFiles::~UserFiles() = default;

FileNumber UserFiles::add(const std::string& path, FileUse use) { return files_->add(path, use); }
FileNumber UserFiles::add(int descriptor) { return files_->add(descriptor); }
bool UserFiles::is_open(FileNumber file) const noexcept { return files_->is_open(file); }
void UserFiles::remove(FileNumber file) noexcept { files_->remove(file); }
int UserFiles::in_flight(FileNumber file) const noexcept { return files_->in_flight(file); }
int64_t UserFiles::size_bytes(FileNumber file) const { return files_->size_bytes(file); }
void UserFiles::flush(FileNumber file) { files_->flush(file); }
bool UserFiles::try_submit(Operation& operation) { return files_->try_submit(operation); }
Operation* UserFiles::poll() noexcept { return files_->poll(); }
void UserFiles::cancel_queued() noexcept { files_->cancel_queued(); }
int UserFiles::in_flight() const noexcept { return files_->in_flight(); }
std::string UserFiles::describe(FileNumber file) const { return files_->describe(file); }
std::string_view UserFiles::backend_name() const noexcept { return files_->backend_name(); }

Error to_error(const UserFiles& files, const Operation& operation) {
    return transfer_error(
        operation.kind == Kind::read ? "read failed" : "write failed",
        files.describe(operation.slot) + " at " + std::to_string(operation.offset), operation.error,
        operation.done_bytes, std::ssize(operation.buffer));
}

}  // namespace ferry::aio
