#include "probe.h"

#include <liburing.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>

#include "buffer.h"

namespace ferry::aio {
namespace {

constexpr int kReads = 8;
constexpr int64_t kAlignment = 4096;
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

// Writes all but the file's first block, over and over, as long as the object lives.
class LargeWriter {
public:
    LargeWriter(int file, int64_t bytes)
        : data_(aligned_buffer(kAlignment, bytes - kAlignment)), thread_([this, file, bytes] {
              const auto size = static_cast<size_t>(bytes - kAlignment);
              memset(data_.get(), 0x5a, size);
              for (bool works = true; works && !stop_;) {
                  ++phase_;
                  works = pwrite(file, data_.get(), size, kAlignment) > 0;
                  ++phase_;
              }
              stop_ = true;
          }) {}
    ~LargeWriter() {
        stop_ = true;
        thread_.join();
    }
    LargeWriter(const LargeWriter&) = delete;
    LargeWriter& operator=(const LargeWriter&) = delete;

    // True when `work` was begun during a write and done a while before that write was. Without the
    // while, whoever waited for the write's lock could be faster than the writer's return.
    bool outlasts(const auto& work) const {
        uint64_t before = 0;
        while ((before = phase_) % 2 == 0 && !stop_) std::this_thread::yield();
        work();
        std::this_thread::sleep_for(kPause);
        return phase_ == before;
    }

private:
    const AlignedBuffer data_;
    std::atomic<bool> stop_ = false;
    std::atomic<uint64_t> phase_ = 0;  // odd: within a write
    std::thread thread_;
};

}  // namespace

bool reads_only_copy(int file, int64_t offset, int64_t bytes) {
    const AlignedBuffer data = aligned_buffer(kAlignment, bytes);
    memset(data.get(), 0x5a, static_cast<size_t>(bytes));
    const auto size = static_cast<size_t>(bytes);
    if (pwrite(file, data.get(), size, offset) != bytes) return false;
    rusage before{}, after{};
    getrusage(RUSAGE_THREAD, &before);
    for (int read = 0; read < kReads; ++read)
        if (pread(file, data.get(), size, offset) != bytes) return false;
    getrusage(RUSAGE_THREAD, &after);
    return after.ru_nvcsw == before.ru_nvcsw;
}

bool writers_take_turns(int one, int other, int64_t bytes) {
    constexpr int kSamples = 16, kFirst = 4, kMore = 6;
    const AlignedBuffer data = aligned_buffer(kAlignment, kAlignment);
    memset(data.get(), 0x5a, static_cast<size_t>(kAlignment));
    const LargeWriter writer(one, bytes);
    const auto overtakes = [&](int file) {
        // The pause lets a busy machine run the writer, so that samples fall anywhere in its
        // writes.
        std::this_thread::sleep_for(kPause);
        return writer.outlasts([&] {
            [[maybe_unused]] const ssize_t wrote =
                pwrite(file, data.get(), static_cast<size_t>(kAlignment), 0);
        });
    };
    int same = 0, apart = 0;
    for (int i = 0; i < kSamples; ++i) {
        same += overtakes(one);
        apart += overtakes(other);
        if (i == kFirst && apart == 0) break;  // the device orders them, and no lock
    }
    return apart - same >= kMore;
}

std::string why_no_polling(int file, int64_t offset, unsigned flags) {
    ProbeRing ring(2, flags);
    if (ring.error() != 0) return std::string("the ring: ") + strerror(-ring.error());
    const AlignedBuffer written = aligned_buffer(kAlignment, kAlignment);
    const AlignedBuffer read = aligned_buffer(kAlignment, kAlignment);
    constexpr auto kBytes = static_cast<size_t>(kAlignment);
    memset(written.get(), 0xa5, kBytes);
    memset(read.get(), 0, kBytes);
    for (const bool write : {true, false}) {
        const int result =
            ring.run(write, file, write ? written.get() : read.get(), kAlignment, offset);
        if (result != kAlignment)
            return std::string(write ? "a write: " : "a read: ") +
                   (result < 0 ? strerror(-result) : "short");
    }
    return memcmp(written.get(), read.get(), kBytes) == 0 ? "" : "a read: not what was written";
}

}  // namespace ferry::aio
