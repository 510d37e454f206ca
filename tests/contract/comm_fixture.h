// The ranks that a test runs on, whatever they are: this process alone, simulated ones on threads,
// or those that mpirun has started this program as, of which this process is one.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <iterator>
#include <string>
#include <vector>

#include "comm/comm.h"
#include "tests/support/simulated_ranks.h"

namespace ferry::comm {

struct RanksKind {
    const char* name;
    int size = 0;  // 0: as launched
    friend void PrintTo(const RanksKind& kind, std::ostream* out) { *out << kind.name; }
};
inline std::string test_name(const testing::TestParamInfo<RanksKind>& info) {
    const int size = info.param.size;
    return info.param.name + (size > 0 ? std::to_string(size) : "");
}

// One rank of a test: its communicator, and memory of its device.
class Rank {
public:
    Rank(Communicator& communicator, Executor& executor, Device& device)
        : comm(communicator), executor_(executor), device_(device) {}

    Communicator& comm;
    int rank() const { return comm.rank(); }
    int size() const { return comm.size(); }

    // Device memory that holds these bytes.
    std::byte* put(const std::vector<uint8_t>& bytes) {
        std::byte* place = device_.memory().data() + used_;
        used_ += round_up(static_cast<int64_t>(bytes.size()), 256);
        EXPECT_LE(used_, static_cast<int64_t>(device_.memory().size()));
        copy(place, bytes.data(), bytes.size());
        return place;
    }
    std::vector<uint8_t> get(const std::byte* place, size_t bytes) {
        std::vector<uint8_t> found(bytes);
        copy(found.data(), place, bytes);
        return found;
    }
    void forget_memory() { used_ = 0; }
    // This rank as one of a group; its memory is the `part`-th quarter of the arena.
    Rank in(Communicator& group, int part) const {
        Rank rank(group, executor_, device_);
        rank.used_ = std::ssize(device_.memory()) / 4 * part;
        return rank;
    }
    Executor& executor() { return executor_; }
    Device& device() { return device_; }

    // Until all that was enqueued has ended.
    void finish() {
        std::atomic<uint64_t> done = 0;
        comm.signal(done);
        wait_for(done, 1);
    }
    void wait_for(std::atomic<uint64_t>& counter, uint64_t value) {
        while (counter.load(std::memory_order_acquire) < value) executor_.wait(kForever);
    }
    void agree(const std::vector<uint8_t>& mine, std::vector<uint8_t>& all) {
        comm::agree(comm, executor_, std::as_bytes(std::span(mine)),
                    std::as_writable_bytes(std::span(all)), {.of = "test"});
    }
    void require_same(const std::vector<Fact>& facts) {
        comm::require_same(comm, executor_, facts);
    }
    void sleep(double seconds) {
        const Nanos until = executor_.now() + static_cast<Nanos>(seconds * 1e9);
        while (executor_.now() < until) executor_.wait(until);
    }

private:
    void copy(void* to, const void* from, size_t bytes) {
        std::atomic<uint64_t> done = 0;
        Stream& stream = device_.stream(StreamKind::h2d);
        if (bytes > 0) stream.copy(to, from, static_cast<int64_t>(bytes));
        stream.signal(done);
        wait_for(done, 1);
    }

    Executor& executor_;
    Device& device_;
    int64_t used_ = 0;
};
using RankTest = std::function<void(Rank&)>;

// Runs the test on all ranks of that kind, here or, as launched, on this process's one. Throws what
// a rank throws.
void on_ranks(const RanksKind& kind, const CommOptions& options, const RankTest& test);

}  // namespace ferry::comm
