// pread and pwrite on a pool of threads: for containers whose seccomp filter forbids io_uring.
#include <fcntl.h>
#include <linux/fs.h>
#include <pthread.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

#include "backend.h"
#include "base/log.h"

namespace ferry::aio {
namespace {

constexpr int kThreadsMax = 64;

class PosixBackend final : public Backend {
public:
    explicit PosixBackend(const BackendSetup& setup)
        : files_(setup.files),
          by_descriptor_(setup.by_descriptor),
          block_device_(setup.block_device),
          depth_(static_cast<size_t>(setup.depth)) {
        waiting_.reserve(depth_);
        finished_.reserve(depth_);
        const int wanted = std::min(setup.depth, kThreadsMax);
        workers_.reserve(static_cast<size_t>(wanted));
        try {
            while (static_cast<int>(workers_.size()) < wanted)
                workers_.emplace_back([this] { work(); });
        } catch (const std::system_error& error) {
            if (workers_.empty()) throw;
            log_warn("aio: only " + std::to_string(workers_.size()) + " of " +
                     std::to_string(wanted) + " I/O threads could be started: " + error.what());
        }
    }

    ~PosixBackend() override {
        {
            const std::lock_guard lock(mutex_);
            stopping_ = true;
        }
        filled_.notify_all();
        for (std::thread& worker : workers_) worker.join();
    }

    std::string_view name() const noexcept override { return "posix"; }

    int submit(std::span<const Transfer> batch) override {
        size_t taken = 0;
        {
            const std::lock_guard lock(mutex_);
            taken = std::min(batch.size(), depth_ - flying_);
            waiting_.insert(waiting_.end(), batch.begin(),
                            batch.begin() + static_cast<std::ptrdiff_t>(taken));
            flying_ += taken;
        }
        for (size_t i = 0; i < taken; ++i) filled_.notify_one();
        return static_cast<int>(taken);
    }

    int reap(std::span<Completion> out, Nanos until) override {
        std::unique_lock lock(mutex_);
        const auto ready = [this] { return !finished_.empty() || woken_; };
        if (until == kForever) {
            done_.wait(lock, ready);
        } else if (const Nanos left = until - now(); left > 0) {
            done_.wait_for(lock, std::chrono::nanoseconds(left), ready);
        }
        woken_ = false;
        const size_t count = std::min(out.size(), finished_.size());
        const auto end = finished_.begin() + static_cast<std::ptrdiff_t>(count);
        std::copy(finished_.begin(), end, out.begin());
        finished_.erase(finished_.begin(), end);
        flying_ -= count;
        return static_cast<int>(count);
    }

    void wake() noexcept override {
        {
            const std::lock_guard lock(mutex_);
            woken_ = true;
        }
        done_.notify_one();
    }

    Nanos now() const noexcept override {
        return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
    }

private:
    void work() {
        pthread_setname_np(pthread_self(), "ferry-posix-io");
        std::unique_lock lock(mutex_);
        while (true) {
            filled_.wait(lock, [this] { return !waiting_.empty() || stopping_; });
            if (waiting_.empty()) return;
            const Transfer transfer = waiting_.front();
            waiting_.erase(waiting_.begin());
            lock.unlock();
            const Completion completion{transfer.id, perform(transfer)};
            lock.lock();
            finished_.push_back(completion);
            done_.notify_one();
        }
    }

    int32_t perform(const Transfer& transfer) const {
        const int file = by_descriptor_ ? transfer.file : files_[transfer.file];
        const auto size = static_cast<size_t>(transfer.size_bytes);
        ssize_t result = 0;
        switch (transfer.verb) {
            case Verb::read:
                result = pread(file, transfer.data, size, transfer.offset);
                break;
            case Verb::write:
                result = pwrite(file, transfer.data, size, transfer.offset);
                break;
            case Verb::flush:
            case Verb::discard:
                return flush_or_discard(file, block_device_, transfer);
        }
        return result < 0 ? -errno : static_cast<int32_t>(result);
    }

    const std::vector<int> files_;
    const bool by_descriptor_;
    const bool block_device_;
    const size_t depth_;
    std::mutex mutex_;
    std::condition_variable filled_, done_;
    std::vector<Transfer> waiting_;  // at most depth_ entries, so that erasing the front is cheap
    std::vector<Completion> finished_;
    size_t flying_ = 0;
    bool woken_ = false, stopping_ = false;
    std::vector<std::thread> workers_;
};

}  // namespace

int32_t flush_or_discard(int file, bool block_device, const Transfer& transfer) noexcept {
    int failed = 0;
    if (transfer.verb == Verb::flush) {
        failed = fdatasync(file);
    } else if (block_device) {
        uint64_t range[2] = {static_cast<uint64_t>(transfer.offset),
                             static_cast<uint64_t>(transfer.size_bytes)};
        failed = ioctl(file, BLKDISCARD, range);
    } else {
        failed = fallocate(file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, transfer.offset,
                           transfer.size_bytes);
    }
    return failed ? -errno : 0;
}

std::unique_ptr<Backend> make_posix_backend(const BackendSetup& setup) {
    return std::make_unique<PosixBackend>(setup);
}

}  // namespace ferry::aio
