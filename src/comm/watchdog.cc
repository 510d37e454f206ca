#include "watchdog.h"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <utility>

#include "comm.h"

namespace ferry::comm {
namespace {

constexpr Nanos kLook = 200'000'000;

struct Instead {
    std::recursive_mutex mutex{};  // a call may itself say what is called from then on
    std::shared_ptr<const Stuck> call{};
};
Instead& instead() {
    static Instead* const kInstead = new Instead;  // watchdogs may look until the process ends
    return *kInstead;
}

// Ends the process, unless the program has something to be called instead.
void tell(const Error& failure) {
    const std::lock_guard lock(instead().mutex);
    if (const auto call = instead().call) return (*call)(failure);
    std::fprintf(stderr, "ferry: %s\n", failure.what());
    std::_Exit(failure.exit_code());
}

}  // namespace

void on_stuck(Stuck call) {
    auto next = call ? std::make_shared<const Stuck>(std::move(call)) : nullptr;
    const std::lock_guard lock(instead().mutex);
    instead().call = std::move(next);
}

Watchdog::Watchdog(Judge judge)
    : judge_(std::move(judge)), thread_([this](const std::stop_token& over) { watch(over); }) {}

// Time is counted in looks, of which one that was stopped makes none.
void Watchdog::watch(const std::stop_token& over) {
    std::unique_lock lock(mutex_);
    const auto is_over = [&over] { return over.stop_requested(); };
    uint64_t seen = 0, told = 0;
    Nanos stuck = 0;
    while (!changed_.wait_for(lock, over, std::chrono::nanoseconds(kLook), is_over)) {
        const uint64_t crossings = crossings_.load(std::memory_order_relaxed);
        const bool stays = crossings % 2 == 1 && crossings == seen;
        stuck = stays ? stuck + kLook : 0;
        seen = crossings;
        if (!stays || crossings == told) continue;
        const std::optional<Error> failure = judge_(stuck);
        if (!failure) continue;
        tell(*failure);
        told = crossings;
    }
}

}  // namespace ferry::comm
