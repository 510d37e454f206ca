// Seeded tests: which seeds to run, and the one to replay.
//   FERRY_SIM_SEEDS=1000000  FERRY_SIM_SEED=12345 (that one alone)
#pragma once

#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdint>
#include <cstdio>

#include "base/random.h"
#include "tests/support/quick.h"
#include "tests/support/simulated_disk.h"

namespace ferry {

// How far apart the transfers of a list lie at which something happens; the quick run takes few.
inline int64_t stride_of(int64_t all) {
    constexpr int64_t kQuick = 41;
    return static_cast<int64_t>(from_environment(
        "FERRY_SIM_STRIDE", static_cast<uint64_t>(is_quick() ? std::max(all, kQuick) : all)));
}

class Seeds {
public:
    explicit Seeds(uint64_t count)
        : only_(from_environment("FERRY_SIM_SEED", 0)),
          last_(only_ ? only_
                      : from_environment("FERRY_SIM_SEEDS", is_quick() ? few(count) : count)),
          previous_(std::signal(SIGABRT, print)) {
        now_ = only_ ? only_ : 1;
    }
    ~Seeds() { std::signal(SIGABRT, previous_); }
    Seeds(const Seeds&) = delete;
    Seeds& operator=(const Seeds&) = delete;

    uint64_t now() const { return now_; }
    bool next() { return ++now_ <= last_; }
    bool replays() const { return only_ != 0; }  // one seed, of which nothing can be expected
    int64_t count() const { return static_cast<int64_t>(last_); }

private:
    static uint64_t few(uint64_t count) {
        return std::max(count / 8, std::min<uint64_t>(count, 20));
    }
    // A failed check aborts, and whoever reads the log needs the seed.
    static void print(int) {
        char text[64];
        const int size =
            snprintf(text, sizeof text, "aborted in seed %lu\n", static_cast<unsigned long>(now_));
        [[maybe_unused]] const ssize_t written = write(2, text, static_cast<size_t>(size));
    }

    static inline uint64_t now_ = 0;
    const uint64_t only_, last_;
    void (*const previous_)(int);
};

// The trouble of which every seed draws its own mix: no failures, but all that the queue must
// survive.
inline aio::SimulatedDiskOptions disk_with_hiccups(uint64_t seed) {
    const auto bits = philox({static_cast<uint32_t>(seed), Purpose::test}, {7, 0, 0, 0});
    const auto odds = [&](int bit, double value) { return bits[0] >> bit & 1 ? value : 0.0; };
    return {.seed = seed,
            .latency_ns = 1'000 + bits[1] % 1'000'000,
            .bytes_per_s = bits[0] >> 9 & 1 ? 1e9 : 1e10,
            .odds = {.shorten = odds(0, 0.2),
                     .interrupt = odds(1, 0.1),
                     .again = odds(2, 0.1),
                     .stall = odds(3, 0.02),
                     .unsupported = odds(5, 0.2),
                     .partial_submission = odds(4, 0.3)}};
}

// The same with one kind of failure. `silent`: the kinds that only a checksum finds are among them.
inline aio::SimulatedDiskOptions troubled_disk(uint64_t seed, bool silent) {
    const auto bits = philox({static_cast<uint32_t>(seed), Purpose::test}, {7, 0, 0, 0});
    const auto failure = [&](unsigned lot) { return bits[2] % 10 == lot ? 0.01 : 0.0; };
    const auto hidden = [&](unsigned lot) { return silent ? failure(lot) : 0.0; };
    aio::SimulatedDiskOptions options = disk_with_hiccups(seed);
    options.odds.eio = failure(0);
    options.odds.enospc = failure(1);
    options.odds.erofs = failure(2);
    options.odds.vanish = failure(3);
    options.odds.bit_flip = hidden(4);
    options.odds.lost_write = hidden(5);
    options.odds.misdirected_write = hidden(6);
    options.odds.torn_write = hidden(7);
    return options;
}

}  // namespace ferry
