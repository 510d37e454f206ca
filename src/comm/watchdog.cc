#include "watchdog.h"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <utility>

namespace ferry::comm {
namespace {

constexpr Nanos kLook = 200'000'000;

}  // namespace

Watchdog::Watchdog(Judge judge)
    : judge_(std::move(judge)), thread_([this](const std::stop_token& over) { watch(over); }) {}

// Time is counted in looks, of which one that was stopped makes none.
void Watchdog::watch(const std::stop_token& over) {
    std::unique_lock lock(mutex_);
    const auto is_over = [&over] { return over.stop_requested(); };
    uint64_t seen = 0;
    Nanos stuck = 0;
    while (!changed_.wait_for(lock, over, std::chrono::nanoseconds(kLook), is_over)) {
        const uint64_t crossings = crossings_.load(std::memory_order_relaxed);
        const bool stays = crossings % 2 == 1 && crossings == seen;
        stuck = stays ? stuck + kLook : 0;
        seen = crossings;
        if (!stays) continue;
        const std::optional<Error> failure = judge_(stuck);
        if (!failure) continue;
        std::fprintf(stderr, "ferry: %s\n", failure->what());
        std::_Exit(failure->exit_code());
    }
}

}  // namespace ferry::comm
