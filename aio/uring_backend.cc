// io_uring. Small transfers are prepared by submit() and reach the kernel in reap(), so that one
// system call both submits a batch and waits for completions.
#include <fcntl.h>
#include <liburing.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <chrono>
#include <cstring>

#include "backend.h"
#include "base/log.h"
#include "errors.h"

namespace ferry::aio {
namespace {

constexpr uint64_t kWakeId = ~uint64_t{0};
constexpr int64_t kEntryBytesMax = kGiB;  // a larger registered buffer is refused with EFAULT
// A huge page counts as locked as a whole; less than a few transfers is not worth the search.
constexpr int64_t kWorthRegistering = 2 * kMiB;
// Smaller transfers are moved sooner than handed to a worker.
constexpr int64_t kWorthAWorker = 64 * kKiB;
// The block layer merges neighbours of one system call into few large requests, so few that the
// drive idles between them. Transfers of this size are submitted one by one.
constexpr int64_t kAlone = 256 * kKiB;

struct Mode {
    unsigned flags;
    const char* name;
};

// A list of flags known to work together, best first. Only these: some flags are accepted by
// the kernel and then not understood by the liburing in use (NO_SQARRAY).
constexpr Mode kModes[] = {
    {IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN | IORING_SETUP_R_DISABLED,
     "single issuer, deferred task work"},
    {IORING_SETUP_COOP_TASKRUN | IORING_SETUP_R_DISABLED, "cooperative task work"},
    {IORING_SETUP_R_DISABLED, "plain"},
};
constexpr Mode kSqpollModes[] = {
    {IORING_SETUP_SQPOLL | IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_R_DISABLED, "kernel polling"},
    {IORING_SETUP_SQPOLL | IORING_SETUP_R_DISABLED, "kernel polling"},
};

int init_ring(io_uring& ring, unsigned entries, std::span<const Mode> modes, unsigned extra) {
    int error = -ENOSYS;
    for (const Mode& mode : modes) {
        io_uring_params params{};
        params.flags = mode.flags | extra;
        error = io_uring_queue_init_params(entries, &ring, &params);
        if (error == 0 || error == -EPERM || error == -ENOSYS) return error;
    }
    return error;
}

// By the thread that will use it. 0 or -errno.
int enable_ring(io_uring& ring) {
    // liburing 2.3 declares io_uring_enable_rings() but its shared library does not export it.
    return io_uring_register(static_cast<unsigned>(ring.ring_fd), IORING_REGISTER_ENABLE_RINGS,
                             nullptr, 0);
}

Error no_ring(int error) {
    return Error(Trouble::io,
                 problem_of("io_uring cannot be used", "a ring of an aio volume", error));
}

class UringBackend final : public Backend {
public:
    explicit UringBackend(const BackendSetup& setup)
        : workers_(static_cast<unsigned>(setup.workers)),
          iopoll_(setup.iopoll),
          block_device_(setup.block_device),
          by_descriptor_(setup.by_descriptor),
          files_(setup.files) {
        immediate_.reserve(static_cast<size_t>(setup.depth));
        open_ring(setup);
        wake_fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
        if (wake_fd_ < 0) {
            const int error = errno;
            io_uring_queue_exit(&ring_);
            throw no_ring(error);
        }
        if (!by_descriptor_) register_files(setup.files);
        register_buffers(setup.registered);
    }
    ~UringBackend() override {
        io_uring_queue_exit(&ring_);
        close(wake_fd_);
    }

    std::string_view name() const noexcept override { return "uring"; }

    int submit(std::span<const Transfer> batch) override {
        enable();
        int taken = 0;
        for (const Transfer& transfer : batch) {
            if (blocks(transfer.verb)) {
                immediate_.push_back({transfer.id, flush_or_discard(descriptor_of(transfer),
                                                                    block_device_, transfer)});
                ++taken;
                continue;
            }
            io_uring_sqe* sqe = io_uring_get_sqe(&ring_);
            if (!sqe) break;
            prepare(*sqe, transfer);
            ++taken;
            if (workers_ <= 1 && transfer.size_bytes >= kAlone) io_uring_submit(&ring_);
        }
        flying_ += taken;
        return taken;
    }

    int reap(std::span<Completion> out, Nanos until) override {
        enable();
        if (iopoll_) {
            if (!wait_polled(until)) return 0;
        } else {
            if (!wake_armed_) arm_wake();
            enter(immediate_.empty() ? until : 0);
        }
        return collect(out);
    }

    void wake() noexcept override {
        const uint64_t one = 1;
        [[maybe_unused]] const ssize_t written = write(wake_fd_, &one, sizeof one);
    }

    Nanos now() const noexcept override {
        return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
    }

private:
    struct Registered {
        std::byte* begin;
        std::byte* end;
    };

    void open_ring(const BackendSetup& setup) {
        // One entry more than transfers, for the wake-up read: submit() then never runs out.
        const auto entries = std::bit_ceil(static_cast<unsigned>(setup.depth) + 1);
        const unsigned extra = iopoll_ ? IORING_SETUP_IOPOLL : 0;
        int error = -1;
        if (setup.sqpoll) {
            error = init_ring(ring_, entries, kSqpollModes, extra);
            if (error != 0) log_warn("aio: SQPOLL is refused here, not used");
        }
        if (error != 0) error = init_ring(ring_, entries, kModes, extra);
        if (error != 0) throw no_ring(-error);
    }

    void register_files(const std::vector<int>& files) {
        fixed_files_ =
            io_uring_register_files(&ring_, files.data(), static_cast<unsigned>(files.size())) == 0;
        if (!fixed_files_) log_warn("aio: files could not be registered with io_uring");
    }

    // The first `bytes` of the slabs; errno.
    int register_first(const std::vector<std::span<std::byte>>& slabs, int64_t bytes) {
        std::vector<iovec> entries;
        auto left = static_cast<size_t>(bytes);
        for (const auto slab : slabs) {
            for (size_t at = 0; at < slab.size() && left > 0; at += kEntryBytesMax) {
                const size_t size =
                    std::min<size_t>({slab.size() - at, size_t{kEntryBytesMax}, left});
                entries.push_back({slab.data() + at, size});
                left -= size;
            }
        }
        const int error = io_uring_register_buffers(&ring_, entries.data(),
                                                    static_cast<unsigned>(entries.size()));
        for (size_t i = 0; error == 0 && i < entries.size(); ++i) {
            auto* begin = static_cast<std::byte*>(entries[i].iov_base);
            registered_.push_back({begin, begin + entries[i].iov_len});
        }
        return -error;
    }

    // All of them, or as much as the limit on locked memory leaves. Only the kernel knows what
    // counts against it, and what this user's other processes have locked. So it is asked.
    void register_buffers(const std::vector<std::span<std::byte>>& slabs) {
        int64_t all = 0;
        for (const auto slab : slabs) all += static_cast<int64_t>(slab.size());
        if (all == 0) return;
        int64_t bytes = all;
        int error = register_first(slabs, bytes);
        while (error == ENOMEM && bytes / 2 >= kWorthRegistering) {
            bytes = round_down(bytes / 2, kWorthRegistering);
            error = register_first(slabs, bytes);
        }
        const bool locked = error == ENOMEM || bytes < all;
        if (error == 0 && !locked) return;
        log_warn("aio: " + (error == 0 ? format_bytes(bytes) : std::string("none")) + " of " +
                 format_bytes(all) + " of buffers could be registered (" +
                 strerror(locked ? ENOMEM : error) +
                 "): other transfers pin their pages one by one" +
                 (locked ? "; raise the locked-memory limit (ulimit -l)" : ""));
    }

    // A ring for a single issuer belongs to the thread that enables it: the I/O thread.
    void enable() {
        if (enabled_) return;
        FERRY_CHECK(enable_ring(ring_) == 0);
        enabled_ = true;
        if (workers_ <= 1) return;
        unsigned most[2] = {workers_, 0};  // for files and devices; 0: leave the others' as it is
        if (const int error = io_uring_register_iowq_max_workers(&ring_, most); error != 0)
            log_warn(std::string("aio: the kernel's workers cannot be limited: ") +
                     strerror(-error));
    }

    void arm_wake() {
        io_uring_sqe* sqe = io_uring_get_sqe(&ring_);
        FERRY_CHECK(sqe, "no submission entry is left for the wake-up");
        io_uring_prep_read(sqe, wake_fd_, &wake_count_, sizeof wake_count_, 0);
        io_uring_sqe_set_data64(sqe, kWakeId);
        wake_armed_ = true;
    }

    int registered_index(const Transfer& transfer) const {
        for (size_t i = 0; i < registered_.size(); ++i) {
            const Registered& entry = registered_[i];
            if (transfer.data >= entry.begin && transfer.data + transfer.size_bytes <= entry.end)
                return static_cast<int>(i);
        }
        return -1;
    }

    int descriptor_of(const Transfer& transfer) const {
        return by_descriptor_ ? transfer.file : files_[transfer.file];
    }

    void prepare(io_uring_sqe& sqe, const Transfer& transfer) {
        const int file = fixed_files_ ? transfer.file : descriptor_of(transfer);
        const auto offset = static_cast<uint64_t>(transfer.offset);
        const auto size = static_cast<unsigned>(transfer.size_bytes);
        switch (transfer.verb) {
            case Verb::read:
            case Verb::write:
                prepare_data(sqe, transfer, file, offset, size);
                break;
            case Verb::flush:
                io_uring_prep_fsync(&sqe, file, IORING_FSYNC_DATASYNC);
                break;
            case Verb::discard:
                io_uring_prep_fallocate(&sqe, file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                                        transfer.offset, transfer.size_bytes);
                break;
        }
        unsigned flags = fixed_files_ ? IOSQE_FIXED_FILE : 0;
        // The kernel gives a ring one worker where transfers do not wait for a device; those marked
        // so get as many as are allowed.
        if (workers_ > 1 && transfer.size_bytes >= kWorthAWorker) flags |= IOSQE_ASYNC;
        io_uring_sqe_set_flags(&sqe, flags);
        io_uring_sqe_set_data64(&sqe, transfer.id);
    }

    void prepare_data(io_uring_sqe& sqe, const Transfer& transfer, int file, uint64_t offset,
                      unsigned size) {
        const int index = registered_index(transfer);
        const bool read = transfer.verb == Verb::read;
        if (index >= 0 && read)
            io_uring_prep_read_fixed(&sqe, file, transfer.data, size, offset, index);
        else if (index >= 0)
            io_uring_prep_write_fixed(&sqe, file, transfer.data, size, offset, index);
        else if (read)
            io_uring_prep_read(&sqe, file, transfer.data, size, offset);
        else
            io_uring_prep_write(&sqe, file, transfer.data, size, offset);
    }

    // A polled ring knows reads and writes only, and no ring discards from a device on every
    // kernel: what is rare may block the ring's thread.
    bool blocks(Verb verb) const {
        return (iopoll_ && verb == Verb::flush) ||
               ((iopoll_ || block_device_) && verb == Verb::discard);
    }

    // Submits what was prepared and waits. Entries that the kernel did not take for now stay in the
    // ring and go with the next call.
    void enter(Nanos until) {
        int result = 0;
        if (until == kForever) {
            result = io_uring_submit_and_wait(&ring_, 1);
        } else if (const Nanos left = until - now(); left > 0) {
            __kernel_timespec timeout{.tv_sec = left / 1'000'000'000,
                                      .tv_nsec = left % 1'000'000'000};
            io_uring_cqe* cqe = nullptr;
            result = io_uring_submit_and_wait_timeout(&ring_, &cqe, 1, &timeout, nullptr);
        } else {
            result = io_uring_submit_and_get_events(&ring_);
        }
        if (result >= 0) return;
        switch (-result) {
            case ETIME:
            case EINTR:
                return;
            case EAGAIN:
            case EBUSY:
                if (io_uring_cq_ready(&ring_) == 0) give_back(until);
                return;
            default:
                bug("io_uring_enter", strerror(-result));
        }
    }

    // The kernel takes nothing and nothing comes back. What was prepared is handed back as EAGAIN,
    // and the queue decides how often and when that is tried again.
    void give_back(Nanos until) {
        io_uring_sq& queue = ring_.sq;
        constexpr Nanos kPause = 1'000'000;
        if (ring_.flags & IORING_SETUP_SQPOLL)  // the kernel's thread may be reading them
            return sleep_on_wake(std::min(until, now() + kPause));
        const unsigned taken = *queue.khead, prepared = *queue.ktail;
        for (unsigned i = taken; i != prepared; ++i) {
            const uint64_t id = queue.sqes[i & *queue.kring_mask].user_data;
            if (id == kWakeId)
                wake_armed_ = false;
            else
                immediate_.push_back({static_cast<uint32_t>(id), -EAGAIN});
        }
        *queue.ktail = taken;
        queue.sqe_tail -= prepared - taken;
        queue.sqe_head = queue.sqe_tail;
        if (immediate_.empty()) sleep_on_wake(std::min(until, now() + kPause));
    }

    void sleep_on_wake(Nanos until) {
        const Nanos left = until == kForever ? -1 : std::max<Nanos>(0, until - now());
        pollfd wake{.fd = wake_fd_, .events = POLLIN, .revents = 0};
        if (poll(&wake, 1, left < 0 ? -1 : static_cast<int>(ceil_div(left, 1'000'000))) == 1) {
            [[maybe_unused]] const ssize_t got = read(wake_fd_, &wake_count_, sizeof wake_count_);
        }
    }

    // A polled ring cannot wait for an eventfd. It spins in the kernel while transfers are out,
    // which the next completion bounds, and sleeps on the eventfd alone when there is nothing to
    // poll.
    bool wait_polled(Nanos until) {
        if (flying_ > 0) {
            const bool spin = until == kForever && immediate_.empty();
            enter(spin ? kForever : 0);
            return true;
        }
        sleep_on_wake(until);
        return false;
    }

    int collect(std::span<Completion> out) {
        io_uring_cqe* cqe = nullptr;
        unsigned head = 0, seen = 0;
        int count = 0;
        for (; !immediate_.empty() && count < static_cast<int>(out.size()); ++count) {
            out[static_cast<size_t>(count)] = immediate_.back();
            immediate_.pop_back();
        }
        io_uring_for_each_cqe(&ring_, head, cqe) {
            if (count == static_cast<int>(out.size())) break;
            ++seen;
            if (cqe->user_data == kWakeId) {
                wake_armed_ = false;
            } else {
                out[static_cast<size_t>(count++)] = {static_cast<uint32_t>(cqe->user_data),
                                                     cqe->res};
            }
        }
        io_uring_cq_advance(&ring_, seen);
        flying_ -= count;
        return count;
    }

    io_uring ring_{};
    int wake_fd_ = -1;
    uint64_t wake_count_ = 0;
    bool wake_armed_ = false, enabled_ = false, fixed_files_ = false;
    const unsigned workers_;
    const bool iopoll_, block_device_, by_descriptor_;
    int flying_ = 0;
    const std::vector<int> files_;
    std::vector<Registered> registered_;
    std::vector<Completion> immediate_;  // done inside submit()
};

}  // namespace

// A filter may let a ring be made and then refuse to enable it, or to take anything.
std::string why_no_uring() {
    io_uring ring;
    int error = init_ring(ring, 2, kModes, 0);
    if (error != 0) return strerror(-error);
    error = enable_ring(ring);
    if (error == 0) {
        io_uring_prep_nop(io_uring_get_sqe(&ring));
        do error = io_uring_submit_and_wait(&ring, 1);
        while (error == -EINTR);
    }
    io_uring_queue_exit(&ring);
    return error < 0 ? strerror(-error) : "";
}

std::unique_ptr<Backend> make_uring_backend(const BackendSetup& setup) {
    return std::make_unique<UringBackend>(setup);
}

}  // namespace ferry::aio
