// Deadlines, blame and news, alike for all kinds of ranks, over a scripted library.
#include "comm_thread.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <thread>

namespace ferry::comm {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

// Rank 1 of 4. What it is told to do stands in `mutex`-guarded fields; what it was asked, too.
struct Script {
    std::mutex mutex{};
    std::vector<int> awaited{0, 2, 3};
    int ends = 0;                    // so many operations may end
    std::optional<Error> refusal{};  // of the library
    std::vector<Wire::Heard> to_hear{};
    std::optional<int> ended{};
    std::vector<News> told{};
    bool hangs = false;  // finished() does not return
    int started = 0, most_in_flight = 0, in_flight = 0;
    bool aborted = false;
};

class Scripted final : public Transport, public Wire {
public:
    explicit Scripted(Script& script) : script_(script) {}
    std::string_view kind() const noexcept override { return "scripted"; }
    RankPlace place() const noexcept override { return {.rank = 1, .size = 4}; }
    void start(const Operation&, size_t) override {
        const std::lock_guard lock(script_.mutex);
        ++script_.started;
        script_.most_in_flight = std::max(script_.most_in_flight, ++script_.in_flight);
    }
    bool finished(size_t) override {
        if (script_.hangs) std::this_thread::sleep_for(std::chrono::hours(1));
        const std::lock_guard lock(script_.mutex);
        if (script_.refusal) throw Error(*script_.refusal);
        if (script_.ends == 0) return false;
        --script_.ends;
        --script_.in_flight;
        return true;
    }
    std::vector<int> awaited(size_t) const override { return script_.awaited; }
    void abort() noexcept override { script_.aborted = true; }
    std::unique_ptr<Transport> group(Communicator&, std::span<const int>) override {
        bug("no test asks for one");
    }
    void tell(const News& news) noexcept override {
        const std::lock_guard lock(script_.mutex);
        script_.told.push_back(news);
    }
    void flush() noexcept override {}
    std::optional<Heard> hear() override {
        const std::lock_guard lock(script_.mutex);
        if (script_.to_hear.empty()) return std::nullopt;
        const Heard heard = script_.to_hear.front();
        script_.to_hear.erase(script_.to_hear.begin());
        return heard;
    }
    std::optional<int> ended() override {
        const std::lock_guard lock(script_.mutex);
        return script_.ended;
    }

private:
    Script& script_;
};

class CommThreadTest : public testing::Test {
protected:
    static constexpr Topic kTopic{.of = "gradient", .layer = 2, .step = 7};

    void make(double timeout_seconds) {
        auto transport = std::make_unique<Scripted>(script_);
        Wire* wire = transport.get();
        thread_ = std::make_unique<CommThread>(*executor_,
                                               CommOptions{.timeout_seconds = timeout_seconds},
                                               std::move(transport), CommThread::Sources{wire});
    }
    void exchange() { thread_->exchange({}, kTopic); }
    template <class Condition>
    void wait_until(Condition met) {
        while (true) {
            {
                const std::lock_guard lock(script_.mutex);
                if (met()) return;
            }
            executor_->wait(executor_->now() + 1'000'000);
        }
    }
    // Waits for everything enqueued so far.
    void wait() {
        std::atomic<uint64_t> done = 0;
        thread_->signal(done);
        while (done == 0) executor_->wait(kForever);
    }
    Error failure() {
        wait();
        try {
            thread_->check();
        } catch (const Error& error) {
            return error;
        }
        ADD_FAILURE() << "nothing failed";
        return {Trouble::internal, {}};
    }
    // `ends`: so many operations may end by then.
    void hear(int from, News::Kind kind, const std::vector<int>& ranks = {}, const char* how = "",
              int ends = 0) {
        News news{.kind = kind};
        for (const int rank : ranks) news.ranks.set(static_cast<size_t>(rank));
        std::snprintf(news.how.data(), news.how.size(), "%s", how);
        const std::lock_guard lock(script_.mutex);
        script_.to_hear.push_back({from, news});
        script_.ends += ends;
    }
    static std::vector<int> ranks_in(const News& news) {
        std::vector<int> ranks;
        for (int rank = 0; rank < News::kRanks; ++rank)
            if (news.ranks.test(static_cast<size_t>(rank))) ranks.push_back(rank);
        return ranks;
    }
    // Whom this rank has called lost, in its one message of that kind.
    std::vector<int> told_lost() {
        const std::vector<News> all = told(News::Kind::lost);
        EXPECT_EQ(all.size(), 1u);
        return all.size() == 1 ? ranks_in(all.front()) : std::vector<int>{};
    }
    std::vector<News> told(News::Kind kind) {
        const std::lock_guard lock(script_.mutex);
        std::vector<News> some;
        for (const News& news : script_.told)
            if (news.kind == kind) some.push_back(news);
        return some;
    }

    Script script_;
    std::unique_ptr<Executor> executor_ = make_thread_executor();
    std::unique_ptr<CommThread> thread_;
};

TEST_F(CommThreadTest, StartsAheadAndEndsInOrder) {
    make(60);
    for (int i = 0; i < 50; ++i) exchange();
    {
        const std::lock_guard lock(script_.mutex);
        script_.ends = 50;
    }
    wait();
    thread_->check();
    EXPECT_EQ(script_.started, 50);
    EXPECT_LE(script_.most_in_flight, static_cast<int>(Transport::kWindow));
    EXPECT_FALSE(script_.aborted);
    EXPECT_TRUE(told(News::Kind::lost).empty());
}

TEST_F(CommThreadTest, ATimeoutNamesThoseWhoAreAwaitedAndSilent) {
    make(0.2);
    hear(0, News::Kind::waiting);
    hear(2, News::Kind::waiting);
    exchange();
    const Error error = failure();
    EXPECT_EQ(error.trouble(), Trouble::rank_lost);
    EXPECT_THAT(error.problem().what,
                HasSubstr("lost rank 3: took no part in the exchange of the gradient of layer 2, "
                          "step 7 within 0.2 s"));
    EXPECT_THAT(told_lost(), ElementsAre(3));
    EXPECT_EQ(told(News::Kind::waiting).size(), 1u);  // this rank had said that it waits
    EXPECT_TRUE(script_.aborted);
}

TEST_F(CommThreadTest, WhoGoesOnIsNoLongerExcused) {
    make(0.2);
    hear(0, News::Kind::waiting);
    hear(0, News::Kind::going_on);
    hear(2, News::Kind::waiting);
    hear(3, News::Kind::waiting);
    exchange();
    EXPECT_THAT(failure().problem().what, HasSubstr("lost rank 0: took no part"));
}

TEST_F(CommThreadTest, SeveralMayBeLost) {
    make(0.1);
    exchange();
    EXPECT_THAT(failure().problem().what, HasSubstr("lost ranks 0, 2 and 3: took no part"));
    EXPECT_THAT(told_lost(), ElementsAre(0, 2, 3));
}

TEST_F(CommThreadTest, NewsNamesAllThatAreLost) {
    make(60);
    hear(0, News::Kind::lost, {2, 3}, "took no part in the exchange");
    exchange();
    EXPECT_EQ(failure().problem().what, "lost ranks 2 and 3: took no part in the exchange");
}

TEST_F(CommThreadTest, WhereAllWaitNobodyIsBlamed) {
    make(0.1);
    for (const int rank : {0, 2, 3}) hear(rank, News::Kind::waiting);
    exchange();
    EXPECT_THAT(failure().problem().what, HasSubstr("lost a rank: every rank is in the exchange"));
    EXPECT_THAT(told_lost(), ElementsAre());
}

TEST_F(CommThreadTest, AnnouncesThatItWaitsAndThatItGoesOn) {
    make(60);
    hear(2, News::Kind::waiting);  // whoever hears it answers at once
    exchange();
    wait_until([this] { return !script_.told.empty(); });
    EXPECT_TRUE(told(News::Kind::going_on).empty());
    {
        const std::lock_guard lock(script_.mutex);
        script_.ends = 1;
    }
    wait();
    EXPECT_EQ(told(News::Kind::going_on).size(), 1u);
    thread_->check();
}

TEST_F(CommThreadTest, NewsOfALostRankEndsEverything) {
    make(60);
    exchange();
    wait_until([this] { return script_.started == 1; });
    hear(3, News::Kind::lost, {0}, "its process has ended");
    const Error error = failure();
    EXPECT_EQ(error.problem().what, "lost rank 0: its process has ended");
    EXPECT_THAT(error.problem().where, HasSubstr("exchange of the gradient of layer 2, step 7"));
    for (int i = 0; i < 5; ++i) exchange();
    wait();  // nothing waits for the others any more
    EXPECT_EQ(script_.started, 1);
    EXPECT_TRUE(told(News::Kind::lost).empty());  // everybody has heard it
}

// It may fail in what follows by itself, and says why then.
TEST_F(CommThreadTest, WhatTheLostRankHasFinishedEndsHereToo) {
    make(60);
    exchange();
    wait_until([this] { return script_.started == 1; });
    hear(0, News::Kind::lost, {0}, "it ended with an error: the budget is too small", 1);
    wait();
    EXPECT_EQ(script_.in_flight, 0);
    exchange();
    EXPECT_EQ(failure().problem().what,
              "lost rank 0: it ended with an error: the budget is too small");
}

TEST_F(CommThreadTest, OneThatWasGivenUpSaysSo) {
    make(60);
    hear(2, News::Kind::lost, {1, 3}, "took no part in the exchange");
    exchange();
    EXPECT_EQ(failure().problem().what,
              "rank 2 has given this rank (1) up: took no part in the exchange");
}

TEST_F(CommThreadTest, AProcessThatEndedIsNamedOnceItsLastWordsAreIn) {
    make(60);
    script_.ended = 2;
    wait();
    thread_->check();  // while nothing is awaited of it, it may have ended well
    exchange();
    EXPECT_EQ(failure().problem().what, "lost rank 2: its process has ended");
    EXPECT_THAT(told_lost(), ElementsAre(2));
}

TEST_F(CommThreadTest, WhatARankSaidLastGoesBeforeItsEnd) {
    make(60);
    exchange();
    {
        const std::lock_guard lock(script_.mutex);
        script_.ended = 2;
        script_.ends = 1;  // its message was on the way
    }
    wait();
    thread_->check();
}

TEST_F(CommThreadTest, AbandonTellsTheOthersWhy) {
    make(60);
    exchange();
    thread_->abandon(Error(Trouble::io, {.what = "the disk is full", .where = "/nvme"}).what());
    EXPECT_THAT(told_lost(), ElementsAre(1));
    EXPECT_STREQ(told(News::Kind::lost).at(0).how.data(),
                 "it ended with an error: the disk is full");
    wait();
    EXPECT_THROW(thread_->check(), Error);
    thread_->abandon("again");  // says nothing more
    EXPECT_EQ(told(News::Kind::lost).size(), 1u);
}

TEST_F(CommThreadTest, TheLibrarysOwnErrorIsThisRanks) {
    make(60);
    script_.refusal = Error(Trouble::internal,
                            {.what = "MPI refused a call", .where = "MPI_Irecv", .measured = "no"});
    exchange();
    const Error error = failure();
    EXPECT_EQ(error.problem().what, "MPI refused a call");
    EXPECT_EQ(error.problem().where, "exchange of the gradient of layer 2, step 7: MPI_Irecv");
    EXPECT_THAT(told_lost(), ElementsAre(1));
    EXPECT_STREQ(told(News::Kind::lost).at(0).how.data(), "MPI refused a call no");
}

// No deadline of the comm thread's own ends the process then.
TEST_F(CommThreadTest, ALibraryThatDoesNotReturnEndsTheProcess) {
    const auto hang = [this](double timeout_seconds) {
        script_.hangs = true;
        executor_ = make_thread_executor();
        make(timeout_seconds);
        exchange();
        wait();
    };
    const std::string where = "where:    rank 1: exchange of the gradient of layer 2, step 7\n";
    const testing::ExitedWithCode lost(6);
    EXPECT_EXIT(hang(0.1), lost,
                "ferry: lost a rank: a call of scripted does not return\n *" + where);
    script_.ended = 2;
    EXPECT_EXIT(hang(3600), lost, "ferry: lost rank 2: its process has ended\n *" + where);
}

// As NCCL's is by the ranks' MPI.
TEST_F(CommThreadTest, WatchesByAnothersEyes) {
    make(60);
    Script above;
    auto transport = std::make_unique<Scripted>(above);
    CommThread upper(*executor_, {.timeout_seconds = 0.3}, std::move(transport),
                     {.watch = thread_.get()});
    hear(0, News::Kind::waiting);
    hear(3, News::Kind::waiting);
    upper.exchange({}, kTopic);
    std::atomic<uint64_t> done = 0;
    upper.signal(done);
    while (done == 0) executor_->wait(kForever);
    EXPECT_THAT(upper.failure()->problem().what, HasSubstr("lost rank 2: took no part"));
    EXPECT_TRUE(above.told.empty());
    EXPECT_THAT(failure().problem().what, HasSubstr("lost rank 2: took no part"));
    EXPECT_THAT(told_lost(), ElementsAre(2));
    EXPECT_EQ(told(News::Kind::waiting).size(), 1u);
}

}  // namespace
}  // namespace ferry::comm
