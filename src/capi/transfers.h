// How a transfer of slots or files ends, as the C ABI says it.
#pragma once

#include <vector>

#include "ferry/aio.h"
#include "options.h"
#include "pollable.h"
#include "status.h"

namespace ferry::capi {

// By the ABI's number.
inline constexpr aio::Priority kPriorities[] = {aio::Priority::normal, aio::Priority::urgent,
                                                aio::Priority::background};

constexpr int64_t kMostBytes = int64_t{1} << 50;

// What a caller asks for, checked as far as it is the same of slots and files. `place`: either's
// number.
inline aio::Operation operation_of(aio::Kind kind, uint32_t place, int64_t offset, void* buffer,
                                   int64_t bytes, int32_t priority, uint64_t tag) {
    check_choice("priority", priority, FERRY_BACKGROUND);
    check_given("buffer", buffer);
    check_range("bytes", bytes, 1, kMostBytes);
    return {.kind = kind,
            .priority = kPriorities[priority],
            .slot = place,
            .offset = offset,
            .buffer = {static_cast<std::byte*>(buffer), static_cast<size_t>(bytes)},
            .tag = tag};
}

// Submits it as one of those that are free. FERRY_AGAIN: there is none, or `source` takes no more.
template <class Source>
ferry_status submit_one(Source& source, std::vector<aio::Operation*>& free,
                        const aio::Operation& operation) {
    if (free.empty()) return FERRY_AGAIN;
    *free.back() = operation;
    if (!source.try_submit(*free.back())) return FERRY_AGAIN;
    free.pop_back();
    return FERRY_OK;
}

// The next one of `source` that has ended; null where none does within the time, or none is under
// way. Below 0: for ever.
template <class Source>
aio::Operation* wait_for_one(Source& source, PollableExecutor& executor, int64_t timeout_ms) {
    constexpr int64_t kMostMs = int64_t{1} << 40;  // 35 years
    const bool ends = timeout_ms >= 0 && timeout_ms < kMostMs;
    const Nanos until = ends ? executor.now() + timeout_ms * 1'000'000 : kForever;
    for (;;) {
        if (aio::Operation* const operation = source.poll()) return operation;
        executor.clear();
        if (aio::Operation* const operation = source.poll()) return operation;
        if (source.in_flight() == 0 || executor.now() >= until) return nullptr;
        executor.wait(until);
    }
}

// Gives its status; keeps the error of one that failed.
template <class Source>
void give_outcome(const char* function, Source& source, const aio::Operation& operation,
                  ferry_completion* completion) {
    ferry_status status = FERRY_OK;
    if (operation.state == aio::State::cancelled) status = FERRY_CANCELLED;
    if (operation.state == aio::State::failed)
        status = keep_error(function, to_error(source, operation));
    give<ferry_completion>(
        completion,
        {.size = 0,
         .tag = operation.tag,
         .bytes = operation.done_bytes,
         .seconds = static_cast<double>(operation.finished_ns - operation.submitted_ns) * 1e-9,
         .slot = operation.slot,
         .status = status,
         .error = operation.error,
         .reserved = 0});
}

}  // namespace ferry::capi
