// The emulated network over a library that moves everything when it is told to, in virtual time.
#include "comm/throttled.h"

#include <gtest/gtest.h>

#include <set>

#include "ferry/error.h"

namespace ferry::comm {
namespace {

constexpr Nanos kMillisecond = 1'000'000;
// A byte a microsecond, and a delay of a millisecond.
constexpr EmulatedNetwork kNetwork{.bytes_per_s = 1e6, .delay = kMillisecond};

// Rank 0 of 3. What may end stands in `ended`.
class Instant final : public Transport {
public:
    explicit Instant(std::set<size_t>& ended) : ended_(ended) {}
    std::string_view kind() const noexcept override { return "instant"; }
    RankPlace place() const noexcept override { return {.rank = 0, .size = 3}; }
    void start(const Operation&, size_t) override {}
    bool finished(size_t slot) override { return ended_.contains(slot); }
    std::vector<int> awaited(size_t) const override { return {1}; }
    std::unique_ptr<Transport> group(Communicator&, std::span<const int>) override {
        return std::make_unique<Instant>(ended_);
    }

private:
    std::set<size_t>& ended_;
};

class ThrottledTest : public testing::Test {
protected:
    Operation exchange(int64_t bytes) const {
        const Exchange parts{nullptr, nullptr, bytes};
        return Operation::exchange({&parts, 1}, {.of = "test"});
    }
    // Checks that an operation ends at this time, and no sooner.
    void expect_ends(size_t slot, Nanos at) {
        now_ = at - 1;
        EXPECT_FALSE(throttled_.finished(slot));
        now_ = at;
        EXPECT_TRUE(throttled_.finished(slot));
    }

    Nanos now_ = 0;
    std::set<size_t> ended_{};
    Throttled throttled_{std::make_unique<Instant>(ended_), kNetwork, [this] { return now_; }};
};

TEST_F(ThrottledTest, TakesTheTimeOfItsBytesToTheOthersAndTheDelay) {
    ended_ = {0};
    throttled_.start(exchange(500), 0);  // 1,000 bytes to two others
    EXPECT_FALSE(throttled_.finished(0));
    expect_ends(0, 2 * kMillisecond);
}

TEST_F(ThrottledTest, BeginsWhenTheLastRankHasBegun) {
    throttled_.start(exchange(500), 0);
    now_ = 10 * kMillisecond;
    EXPECT_FALSE(throttled_.finished(0));
    ended_ = {0};
    EXPECT_FALSE(throttled_.finished(0));
    expect_ends(0, 12 * kMillisecond);
}

TEST_F(ThrottledTest, SendsOneOperationAfterTheOther) {
    ended_ = {0, 1, 2};
    for (size_t slot = 0; slot < 3; ++slot) throttled_.start(exchange(500), slot);
    EXPECT_FALSE(throttled_.finished(0));
    expect_ends(0, 2 * kMillisecond);
    expect_ends(1, 3 * kMillisecond);  // the delay is none of the link's time
    expect_ends(2, 4 * kMillisecond);
    now_ = 20 * kMillisecond;
    throttled_.start(exchange(500), 3);
    ended_.insert(3);
    EXPECT_FALSE(throttled_.finished(3));
    expect_ends(3, 22 * kMillisecond);
}

// Of rank 0's two others rank 1 is on its host.
TEST(ThrottledHosts, HoldWhatCrossesBetweenThemAlone) {
    Nanos now = 0;
    std::set<size_t> ended{0, 1, 2, 3, 4};
    Throttled throttled(std::make_unique<Instant>(ended),
                        {.bytes_per_s = 2e6, .delay = kMillisecond, .ranks_per_host = 2},
                        [&now] { return now; });
    const auto ends = [&](size_t slot, Nanos at) {
        now = at - 1;
        const bool before = throttled.finished(slot);
        now = at;
        return !before && throttled.finished(slot);
    };
    const Exchange parts{nullptr, nullptr, 1000};
    throttled.start(Operation::exchange({&parts, 1}, {.of = "test"}), 0);
    EXPECT_FALSE(throttled.finished(0));
    EXPECT_TRUE(ends(0, 2 * kMillisecond));  // half of the rate, and one of the two others
    // Rank 0 passes around a circle of three: to rank 1, and what comes is from rank 2.
    throttled.start(Operation::shift({nullptr, nullptr, 1000, 1000, 1}, {.of = "test"}), 1);
    EXPECT_FALSE(throttled.finished(1));
    EXPECT_TRUE(ends(1, 3 * kMillisecond));  // it sends nothing away, and waits for the delay
    throttled.start(Operation::shift({nullptr, nullptr, 1000, 1000, 2}, {.of = "test"}), 2);
    EXPECT_FALSE(throttled.finished(2));
    EXPECT_TRUE(ends(2, 5 * kMillisecond));
}

TEST(EmulatedNetworkText, IsARateAndPerhapsADelay) {
    const EmulatedNetwork slow = EmulatedNetwork::from("100Mbit");
    EXPECT_DOUBLE_EQ(slow.bytes_per_s, 12.5e6);
    EXPECT_EQ(slow.delay, 0);
    const EmulatedNetwork fast = EmulatedNetwork::from("2.5Gbit,50us");
    EXPECT_DOUBLE_EQ(fast.bytes_per_s, 312.5e6);
    EXPECT_EQ(fast.delay, 50'000);
    EXPECT_EQ(fast.ranks_per_host, 1);
    EXPECT_EQ(EmulatedNetwork::from("100Mbit,0us,4").ranks_per_host, 4);
    for (const char* text :
         {"", "fast", "100Mbit,5us,0", "100Mbit,5us,2.5", "100Mbit,5us,2,2", "100", "0Mbit",
          "-1Mbit", "100Mbit,", "100Mbit,5", "100Mbit,5us,", "100Mbit 5us"}) {
        SCOPED_TRACE(text);
        EXPECT_THROW(EmulatedNetwork::from(text), Error);
    }
}

TEST(EmulatedNetworkText, CutsTheRanksIntoHostsOfThatSize) {
    const EmulatedNetwork hosts = EmulatedNetwork::from("100Mbit,0us,4");
    EXPECT_NO_THROW(hosts.require_whole_hosts(8));
    EXPECT_NO_THROW(EmulatedNetwork::from("100Mbit,0us").require_whole_hosts(3));
    for (const auto& [ranks, remedy] :
         {std::pair{6, "start 8 ranks, or write 2 as the third number"},
          std::pair{2, "start 4 ranks, or write 2 as the third number"},
          std::pair{1, "start 4 ranks, or write 1 as the third number"}}) {
        SCOPED_TRACE(ranks);
        try {
            hosts.require_whole_hosts(ranks);
            ADD_FAILURE() << "it was taken";
        } catch (const Error& error) {
            EXPECT_EQ(error.trouble(), Trouble::usage);
            EXPECT_EQ(error.problem().where, "FERRY_EMULATED_NETWORK");
            EXPECT_NE(error.problem().measured.find("hosts of 4"), std::string::npos);
            EXPECT_EQ(error.problem().remedy, remedy);
        }
    }
}

}  // namespace
}  // namespace ferry::comm
