#include "probe.h"

#include <liburing.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>

#include "buffer.h"

namespace ferry::aio {
namespace {

constexpr int kReads = 8;
constexpr std::chrono::microseconds kPause(50);

// A ring for as long as the object lives.
class ProbeRing {
public:
    ProbeRing(unsigned entries, unsigned flags)
        : error_(io_uring_queue_init(entries, &ring_, flags)) {}
    ~ProbeRing() {
        if (error_ == 0) io_uring_queue_exit(&ring_);
    }
    ProbeRing(const ProbeRing&) = delete;
    ProbeRing& operator=(const ProbeRing&) = delete;

    int error() const { return error_; }
    io_uring* get() { return &ring_; }
    // The result of one transfer, or what failed before it.
    int run(bool write, int file, std::byte* data, int64_t bytes, int64_t offset) {
        io_uring_sqe* sqe = io_uring_get_sqe(&ring_);
        const auto size = static_cast<unsigned>(bytes);
        const auto at = static_cast<uint64_t>(offset);
        write ? io_uring_prep_write(sqe, file, data, size, at)
              : io_uring_prep_read(sqe, file, data, size, at);
        if (const int submitted = io_uring_submit(&ring_); submitted < 0) return submitted;
        return wait();
    }
    int wait() {
        io_uring_cqe* cqe = nullptr;
        int error = -EINTR;
        while (error == -EINTR) error = io_uring_wait_cqe(&ring_, &cqe);
        if (error != 0) return error;
        const int result = cqe->res;
        io_uring_cqe_seen(&ring_, cqe);
        return result;
    }

private:
    io_uring ring_{};
    int error_;
};

// Writes all but the file's first block, each time that it is asked to.
class LargeWriter {
public:
    LargeWriter(int file, int64_t begin, int64_t end)
        : data_(aligned_buffer(begin, end - begin)), thread_([this, file, begin, end] {
              const auto size = static_cast<size_t>(end - begin);
              memset(data_.get(), 0x5a, size);
              for (uint64_t done = 0;; ++done) {
                  asked_.wait(done);
                  if (stop_) return;
                  ++phase_;
                  works_ = works_ && pwrite(file, data_.get(), size, begin) > 0;
                  ++phase_;
              }
          }) {}
    ~LargeWriter() {
        stop_ = true;
        ++asked_;
        asked_.notify_one();
        thread_.join();
    }
    LargeWriter(const LargeWriter&) = delete;
    LargeWriter& operator=(const LargeWriter&) = delete;

    // Begins a write, does `work` a while later, and looks again a while after that. Without the
    // first while the write might not have its lock yet; without the second, whoever waited for
    // that lock could be faster than the writer's return.
    enum class Order : uint8_t { overtook, waited, too_late };
    Order meet(const auto& work) {
        const uint64_t during = 2 * asked_ + 1;
        ++asked_;
        asked_.notify_one();
        while (phase_ < during) std::this_thread::yield();
        std::this_thread::sleep_for(kPause);
        const bool begun = phase_ == during;
        if (begun) work();
        std::this_thread::sleep_for(kPause);
        const bool going_on = phase_ == during;
        while (phase_ == during) std::this_thread::yield();
        if (!begun || !works_) return Order::too_late;
        return going_on ? Order::overtook : Order::waited;
    }

private:
    const AlignedBuffer data_;
    std::atomic<bool> stop_ = false, works_ = true;
    std::atomic<uint64_t> asked_ = 0;
    std::atomic<uint64_t> phase_ = 0;  // odd: within a write
    std::thread thread_;
};

}  // namespace

bool reads_only_copy(Probe& probe, int file, int64_t offset, int64_t bytes) {
    const AlignedBuffer data = aligned_buffer(probe.alignment, bytes);
    memset(data.get(), 0x5a, static_cast<size_t>(bytes));
    const auto size = static_cast<size_t>(bytes);
    if (pwrite(file, data.get(), size, offset) != bytes) return false;
    probe.bytes_written += bytes;
    rusage before{}, after{};
    getrusage(RUSAGE_THREAD, &before);
    for (int read = 0; read < kReads; ++read)
        if (pread(file, data.get(), size, offset) != bytes) return false;
    getrusage(RUSAGE_THREAD, &after);
    return after.ru_inblock == before.ru_inblock && after.ru_nvcsw == before.ru_nvcsw;
}

bool writers_take_turns(Probe& probe, int one, int other, int64_t bytes) {
    constexpr int kSamples = 16, kFirst = 4, kMore = 6;
    const AlignedBuffer data = aligned_buffer(probe.alignment, probe.alignment);
    const auto small = static_cast<size_t>(probe.alignment);
    memset(data.get(), 0x5a, small);
    LargeWriter writer(one, probe.alignment, bytes);
    int writes = 0;
    const auto overtakes = [&](int file) {
        // On a busy machine whoever slept may sleep through the whole write.
        auto order = LargeWriter::Order::too_late;
        while (order == LargeWriter::Order::too_late && writes < kLargeWritesMax) {
            ++writes;
            probe.bytes_written += bytes;  // the large write and the small one
            order = writer.meet(
                [&] { [[maybe_unused]] const ssize_t wrote = pwrite(file, data.get(), small, 0); });
        }
        return order == LargeWriter::Order::overtook;
    };
    int same = 0, apart = 0;
    for (int i = 0; i < kSamples && writes < kLargeWritesMax; ++i) {
        same += overtakes(one);
        apart += overtakes(other);
        if (i == kFirst && apart == 0) break;  // the device orders them, and no lock
        const int left = kSamples - 1 - i;
        if (apart - same + left < kMore || apart - same - left >= kMore) break;  // it is decided
    }
    return apart - same >= kMore;
}

std::string why_no_polling(Probe& probe, int file, int64_t offset, unsigned flags) {
    ProbeRing ring(2, flags);
    if (ring.error() != 0) return std::string("the ring: ") + strerror(-ring.error());
    const AlignedBuffer written = aligned_buffer(probe.alignment, probe.alignment);
    const AlignedBuffer read = aligned_buffer(probe.alignment, probe.alignment);
    const auto size = static_cast<size_t>(probe.alignment);
    memset(written.get(), 0xa5, size);
    memset(read.get(), 0, size);
    for (const bool write : {true, false}) {
        const int result =
            ring.run(write, file, write ? written.get() : read.get(), probe.alignment, offset);
        if (write && result > 0) probe.bytes_written += result;
        if (result != probe.alignment)
            return std::string(write ? "a write: " : "a read: ") +
                   (result < 0 ? strerror(-result) : "short");
    }
    return memcmp(written.get(), read.get(), size) == 0 ? "" : "a read: not what was written";
}

namespace {

// A device number alone names another file system once it was unmounted: its own id is part
// of the key, as far as it has one.
using Place = std::array<uint64_t, 5>;

struct Known {
    std::mutex mutex;
    std::map<Place, Findings> findings;
};
Known& known() {
    static Known one;
    return one;
}

}  // namespace

Findings& findings_of(int file, bool direct) {
    struct stat status {};
    struct statfs system {};
    fstat(file, &status);
    fstatfs(file, &system);
    uint64_t id = 0;
    static_assert(sizeof system.f_fsid == sizeof id);
    memcpy(&id, &system.f_fsid, sizeof id);
    const bool device = S_ISBLK(status.st_mode);
    const std::lock_guard lock(known().mutex);
    return known()
        .findings[{device ? status.st_rdev : status.st_dev, static_cast<uint64_t>(system.f_type),
                   id, uint64_t{device}, uint64_t{direct}}];
}

void forget_findings() {
    const std::lock_guard lock(known().mutex);
    known().findings.clear();
}

}  // namespace ferry::aio
