// A disk in virtual time that goes wrong on purpose: the third aio backend, for tests of everything
// above it. One seed is one run, down to the order of completions.
//
//   auto executor = make_simulated_executor(seed);
//   SimulatedDisk disk({.seed = seed, .odds = {.shorten = 0.1}}, *executor);
//   auto volume = aio::open_simulated_volume(options, *executor, disk);
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <vector>

#include "aio/backend.h"
#include "aio/volume.h"

namespace ferry::aio {

enum class Fault : uint8_t {
    none,
    // Loud, and no failure: the queue must get over them.
    shorten,      // fewer bytes than asked for, at any byte
    interrupt,    // EINTR
    again,        // EAGAIN
    stall,        // completes after seconds
    unsupported,  // discards: EOPNOTSUPP
    // Loud failures.
    eio,           // of a flush: what it was to make durable is lost at the next power failure
    failed_flush,  // the same of flushes alone, of which there are few
    enospc,        // writes, and flushes, as where blocks are allocated late
    erofs,         // writes
    vanish,        // ENODEV from now on, whatever is asked of this path
    // Silent: only a checksum finds them.
    bit_flip,
    lost_write,
    misdirected_write,
    torn_write,
};
constexpr int kFaults = 15;
const char* name_of(Fault fault);
bool silent(Fault fault);
bool loud_failure(Fault fault);

struct SimulatedDiskOptions {
    uint64_t seed = 0;
    Nanos latency_ns = 80'000;               // mean; the spread reorders completions
    double bytes_per_s = 3e9;                // a path
    std::vector<double> path_bytes_per_s{};  // instead, for paths of different speed
    struct Odds {                            // of each fault, for each transfer it can happen to
        double shorten = 0, interrupt = 0, again = 0, stall = 0, unsupported = 0;
        double eio = 0, failed_flush = 0, enospc = 0, erofs = 0, vanish = 0;
        double bit_flip = 0, lost_write = 0, misdirected_write = 0, torn_write = 0;
        double partial_submission = 0;  // for each submission: takes fewer than offered
    } odds{};
    // Besides: exactly this fault, at the n-th transfer that it can happen to.
    Fault fault = Fault::none;
    int64_t fault_at = -1;
    bool power_loss = false;  // keep what lose_power() needs (twice the memory)
    // The machine stops as the n-th transfer of any kind is about to end: with `power_loss` as
    // lose_power() says, without it as if the process were killed: what has ended stays.
    int64_t stop_at = -1;
};

// The contents; outlives the volumes opened on it, as a disk does.
class SimulatedDisk {
public:
    SimulatedDisk(SimulatedDiskOptions options, Executor& executor);

    BackendFactory factory();
    // Power fails now: of everything not flushed, and of what is under way, any sectors may be
    // lost. Transfers fail with EIO until power_up().
    void lose_power();
    void power_up() { powered_ = true; }
    bool powered() const { return powered_; }
    // Nothing is wrong any more: there is power, paths that vanished are back with what they held,
    // and of the options' troubles none happens again.
    void heal();
    // From now on, of a healed disk: these odds, and the machine stops as the n-th transfer from
    // here is about to end (below 0: it does not).
    void trouble(const SimulatedDiskOptions::Odds& odds, int64_t stop_at);
    // A bit of what lies there turns by itself, wherever it is; nothing, where nothing lies.
    void rot();
    // From now on; options name the speeds at first.
    void set_path_speed(int path, double bytes_per_s) {
        options_.path_bytes_per_s.at(static_cast<size_t>(path)) = bytes_per_s;
    }

    int64_t transfers() const { return transfers_; }
    int64_t injected(Fault fault) const { return injected_[static_cast<size_t>(fault)]; }
    int64_t injected_of(bool (*kind)(Fault)) const;
    uint64_t trace() const { return trace_; }  // a hash of everything that happened, with its time
    std::vector<std::byte>& contents(int path, int file) { return at(path, file).now; }
    // The step whose state is lost, as the headers say where a run has ended with an error.
    std::optional<int64_t> lost_step() const { return lost_step_; }

private:
    friend class SimulatedVolume;
    friend class SimulatedBackend;
    struct File {
        std::vector<std::byte> now, durable;
        struct Write {
            int64_t offset;
            std::vector<std::byte> bytes;
        };
        std::vector<Write> unflushed;
    };

    File& at(int path, int file) { return files_[{path, file}]; }
    uint64_t draw();
    double draw_unit();
    Fault draw_fault(int path, Verb verb);
    bool possible(Fault fault, Verb verb) const;
    void record(const Transfer& transfer, int64_t result);
    int32_t perform(int path, const Transfer& transfer, Fault fault);
    int32_t perform_write(File& file, const Transfer& transfer, Fault fault);
    void store(File& file, int64_t offset, const std::byte* data, int64_t bytes);
    void keep_some(File& file);
    double rate_of(int path) const;
    void end_flights();

    SimulatedDiskOptions options_;
    Executor& executor_;
    uint64_t state_;
    bool powered_ = true;
    std::set<int> vanished_;  // paths
    int64_t transfers_ = 0, candidates_ = 0, ended_ = 0;
    int64_t injected_[kFaults] = {};
    uint64_t trace_ = 14695981039346656037u;
    std::map<std::pair<int, int>, File> files_;
    std::vector<class SimulatedBackend*> backends_;
    std::optional<int64_t> lost_step_{};
};

std::unique_ptr<Volume> open_simulated_volume(VolumeOptions options, Executor& executor,
                                              SimulatedDisk& disk);

}  // namespace ferry::aio
