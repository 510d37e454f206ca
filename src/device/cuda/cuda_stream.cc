#include "cuda_stream.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <limits>
#include <thread>

#include "base/threads.h"
#include "status.h"

namespace ferry {

void Failures::note(cudaError_t status) noexcept {
    const std::lock_guard lock(mutex_);
    if (first_) return;
    first_ = Error(Trouble::internal, {.what = "work that the GPU was given has failed",
                                       .where = "found while waiting for it",
                                       .measured = text_of(status),
                                       .remedy = "see the driver's messages (dmesg: Xid)"});
    any_.store(true, std::memory_order_release);
}

void Failures::check() const {
    if (!any_.load(std::memory_order_acquire)) return;
    const std::lock_guard lock(mutex_);
    throw Error(*first_);  // any_ follows it
}

void LockedPages::add(std::span<std::byte> pages) {
    const std::lock_guard lock(mutex_);
    const auto later = std::ranges::find_if(
        regions_, [&](const auto& region) { return region.data() > pages.data(); });
    regions_.insert(later, pages);
}

void LockedPages::remove(std::span<std::byte> pages) {
    const std::lock_guard lock(mutex_);
    std::erase_if(regions_, [&](const auto& region) { return region.data() == pages.data(); });
}

int64_t LockedPages::run_of(const void* at) const {
    const std::lock_guard lock(mutex_);
    const auto* byte = static_cast<const std::byte*>(at);
    const auto next =
        std::upper_bound(regions_.begin(), regions_.end(), byte,
                         [](const std::byte* b, const auto& region) { return b < region.data(); });
    if (next != regions_.begin()) {
        const auto& region = *std::prev(next);
        if (byte < region.data() + region.size()) return region.data() + region.size() - byte;
    }
    return std::numeric_limits<int64_t>::max();
}

CudaStream::CudaStream(Executor& executor, std::string name, const LockedPages& pages,
                       Failures& failures)
    : executor_(executor),
      lane_(executor.add_lane(std::move(name), kDepth)),
      pages_(pages),
      failures_(failures) {
    demand(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
    for (Signal& signal : signals_) {
        signal.executor = &executor;
        signal.failures = &failures;
        demand(cudaEventCreateWithFlags(&signal.event, cudaEventDisableTiming),
               "cudaEventCreateWithFlags");
    }
}

CudaStream::~CudaStream() {
    cudaStreamSynchronize(stream_);
    for (const Signal& signal : signals_) cudaEventDestroy(signal.event);
    cudaStreamDestroy(stream_);
}

// By a host function: it takes neither a multiprocessor nor memory bandwidth from what runs beside
// it. The driver calls one at a time, but nothing else waits for that thread: signals are events.
void CudaStream::pause(Nanos duration) {
    const cudaHostFn_t sleep = [](void* nanoseconds) {
        std::this_thread::sleep_for(std::chrono::nanoseconds(std::bit_cast<Nanos>(nanoseconds)));
    };
    enqueued(cudaLaunchHostFunc(stream_, sleep, std::bit_cast<void*>(duration)),
             "cudaLaunchHostFunc");
}

void CudaStream::copy(void* destination, const void* source, int64_t bytes) {
    auto* to = static_cast<std::byte*>(destination);
    const auto* from = static_cast<const std::byte*>(source);
    while (bytes > 0) {
        const int64_t run = std::min({bytes, pages_.run_of(to), pages_.run_of(from)});
        enqueued(cudaMemcpyAsync(to, from, static_cast<size_t>(run), cudaMemcpyDefault, stream_),
                 "cudaMemcpyAsync");
        to += run;
        from += run;
        bytes -= run;
    }
}

void CudaStream::signal(std::atomic<uint64_t>& counter) {
    Signal& next = signals_[next_++ % kDepth];
    next.counter = &counter;
    enqueued(cudaEventRecord(next.event, stream_), "cudaEventRecord");
    executor_.post(lane_, {[](void* context, uint64_t) {
                               const Signal copy = *static_cast<const Signal*>(context);
                               deliver(copy);
                           },
                           &next});
}

// An error of earlier work is not this call's fault.
void CudaStream::enqueued(cudaError_t status, const char* call) {
    if (is_of_earlier_work(status)) return failures_.note(status);
    demand(status, call);
}

// On the lane's thread. Events rather than host functions: the GPU does not stop for them, and they
// are delivered after a failure too.
void CudaStream::deliver(const Signal& signal) noexcept {
    const Nanos start = signal.executor->now();
    cudaError_t status = cudaEventQuery(signal.event);
    while (status == cudaErrorNotReady) {
        nap_after(signal.executor->now() - start);
        status = cudaEventQuery(signal.event);
    }
    if (status != cudaSuccess) signal.failures->note(status);
    signal.counter->fetch_add(1, std::memory_order_release);
    signal.executor->wake();
}

}  // namespace ferry
