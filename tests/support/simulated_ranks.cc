#include "simulated_ranks.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <numeric>
#include <optional>
#include <span>
#include <thread>
#include <utility>

#include "base/checksum.h"
#include "base/random.h"
#include "comm/operation.h"

namespace ferry::comm {
namespace {

// Where the ranks come together: one meeting an operation.
class Hall {
public:
    explicit Hall(const SimulatedRanks& ranks)
        : ranks_(ranks), names_(static_cast<size_t>(ranks.size)), gone_(names_.size()) {
        std::iota(names_.begin(), names_.end(), 0);
    }

    const SimulatedRanks& ranks() const { return ranks_; }
    // The ranks of a group have a hall of their own, and the names they have here.
    int size() const { return static_cast<int>(names_.size()); }
    int name(int rank) const { return names_[static_cast<size_t>(rank)]; }

    // The hall of these ranks, the `number`-th that each of them asks for.
    Hall& group(int number, std::span<const int> members) {
        const std::lock_guard lock(mutex_);
        auto& hall = groups_[{number, members.front()}];
        if (!hall) {
            hall = std::make_unique<Hall>(ranks_);
            hall->names_.assign(members.begin(), members.end());
            hall->gone_.assign(members.size(), std::nullopt);
            for (size_t i = 0; i < members.size(); ++i)
                hall->gone_[i] = gone_[static_cast<size_t>(members[i])];
        }
        return *hall;
    }

    struct Lost {
        int rank;
        std::string how;
    };
    struct Result {
        Nanos ends = 0;                              // at this time
        std::vector<const Operation*> operations{};  // of each rank, until leave()
        std::optional<Lost> lost{};                  // instead
    };

    // Blocks the caller's thread until all have come, or those who have not are known not to.
    Result meet(uint64_t number, int rank, const Operation& operation, Nanos now) {
        std::unique_lock lock(mutex_);
        Meeting& meeting = meetings_[number];
        meeting.here.resize(gone_.size());
        meeting.here[static_cast<size_t>(rank)] = {&operation, now};
        const auto decided = [&] { return meeting.lost || decide(meeting, operation); };
        if (!ranks_.threads) {
            changed_.wait(lock, decided);
        } else if (!changed_.wait_for(lock, std::chrono::nanoseconds(timeout()), decided)) {
            meeting.lost = {now + timeout(),
                            {name(missing(meeting).front()), took_no_part(operation)}};
        }
        // Whoever sees it first tells the others: the last to come, or whose time is out.
        if (!std::exchange(meeting.told, true)) changed_.notify_all();
        if (meeting.lost)
            return {.ends = std::max(now, meeting.lost->at), .lost = meeting.lost->lost};
        Result result{.ends = latest(meeting) + duration(number, rank)};
        for (const Arrival& arrival : meeting.here) result.operations.push_back(arrival.operation);
        return result;
    }

    // The operations of the others may be changed from now on; returns when all have said so.
    void leave(uint64_t number) {
        std::unique_lock lock(mutex_);
        Meeting& meeting = meetings_[number];
        if (++meeting.left == gone_.size()) changed_.notify_all();
        changed_.wait(lock, [&] { return meeting.left == gone_.size(); });
    }

    // This rank comes to no further meeting, because of `lost`.
    void end(int rank, Nanos now, const Lost& lost) {
        {
            const std::lock_guard lock(mutex_);
            auto& gone = gone_[static_cast<size_t>(rank)];
            if (!gone) gone = {now, lost};
            for (auto& [_, hall] : groups_) {
                const auto at = std::ranges::find(hall->names_, rank);
                if (at != hall->names_.end())
                    hall->end(static_cast<int>(at - hall->names_.begin()), now, lost);
            }
        }
        changed_.notify_all();
    }

private:
    struct Arrival {
        const Operation* operation = nullptr;
        Nanos at = 0;
    };
    struct Gone {
        Nanos at;
        Lost lost;
    };
    struct Meeting {
        std::vector<Arrival> here{};
        size_t left = 0;
        bool told = false;  // that it is decided
        std::optional<Gone> lost{};
    };

    Nanos timeout() const { return static_cast<Nanos>(ranks_.options.timeout_seconds * 1e9); }
    static std::string took_no_part(const Operation& operation) {
        return "took no part in the " + operation.text() + " in time";
    }
    static std::vector<int> missing(const Meeting& meeting) {
        std::vector<int> ranks;
        for (size_t rank = 0; rank < meeting.here.size(); ++rank)
            if (!meeting.here[rank].operation) ranks.push_back(static_cast<int>(rank));
        return ranks;
    }
    static Nanos latest(const Meeting& meeting) {
        return std::ranges::max_element(meeting.here, {}, &Arrival::at)->at;
    }

    // Whether it is known how the meeting goes; then `lost` says what it fails by. In virtual time
    // every rank must have come or gone, so that it does not depend on the order of the threads.
    bool decide(Meeting& meeting, const Operation& operation) const {
        const std::vector<int> away = missing(meeting);
        if (away.empty()) {
            const auto first = std::ranges::min_element(meeting.here, {}, &Arrival::at);
            const auto last = std::ranges::max_element(meeting.here, {}, &Arrival::at);
            const Nanos deadline = first->at + timeout();
            if (!ranks_.threads && last->at > deadline) {
                const auto late = static_cast<int>(last - meeting.here.begin());
                meeting.lost = {deadline, {name(late), took_no_part(operation)}};
            }
            return true;
        }
        const auto gone = [this](int rank) { return gone_[static_cast<size_t>(rank)]; };
        std::optional<Gone> first;  // whoever ended first is the reason of the others' end
        for (const int rank : away) {
            if (!gone(rank) && !ranks_.threads) return false;
            if (gone(rank) && (!first || gone(rank)->at < first->at)) first = gone(rank);
        }
        meeting.lost = first;
        return first.has_value();
    }

    std::array<uint32_t, 4> draw(std::array<uint32_t, 4> counter) const {
        return philox({static_cast<uint32_t>(ranks_.seed), Purpose::test}, counter);
    }
    // Up to about a millisecond, skewed, as the simulated executor draws it.
    static Nanos skewed(const std::array<uint32_t, 4>& bits) {
        return 1 + static_cast<Nanos>(bits[0] >> (12 + bits[1] % 12));
    }
    // By the seed the link is slow, so that much computes beside an operation, or fast; and every
    // rank sees the end at a time of its own.
    Nanos duration(uint64_t number, int rank) const {
        const auto n = static_cast<uint32_t>(number);
        const Nanos link = Nanos{1} << draw({0, 3, 0, 0})[0] % 5;
        return link * skewed(draw({n, 1, 0, 0})) +
               skewed(draw({n, 2, static_cast<uint32_t>(rank), 0}));
    }

    const SimulatedRanks ranks_;
    std::vector<int> names_;
    std::mutex mutex_;
    std::condition_variable changed_;
    std::map<uint64_t, Meeting> meetings_;
    std::map<std::pair<int, int>, std::unique_ptr<Hall>> groups_;
    std::vector<std::optional<Gone>> gone_;
};

class SimulatedRank final : public OperationQueue, private Service {
public:
    // A simulated rank has one thread, which waits in a meeting: there all its communicators' calls
    // take their turns in one order, on the lane of the first.
    SimulatedRank(Hall& hall, int rank, Executor& executor, std::optional<LaneId> lane = {})
        : hall_(hall),
          rank_(rank),
          executor_(executor),
          lane_(lane && executor.simulated() ? *lane : executor.add_lane("comm", kDepth)),
          operations_(kDepth) {
        if (executor.simulated()) executor_.host(*this);
    }
    ~SimulatedRank() override {
        while (ended_.load(std::memory_order_acquire) < posted_) executor_.wait(kForever);
        hall_.end(rank_, executor_.now(), {hall_.name(rank_), "its process has ended"});
        if (executor_.simulated()) executor_.retire(*this);
    }

    std::string_view kind() const noexcept override { return "sim"; }
    int rank() const noexcept override { return rank_; }
    int size() const noexcept override { return hall_.size(); }
    int local_rank() const noexcept override { return neighbours(rank_); }
    int local_size() const noexcept override { return neighbours(size()); }
    int host() const noexcept override {
        int first = 0;
        while (host_of(first) != host_of(rank_)) ++first;
        return first;
    }

    void check() override {
        const std::lock_guard lock(mutex_);
        if (failure_) throw Error(*failure_);
    }
    void abandon(std::string_view why) noexcept override {
        why = why.substr(0, why.find('\n'));
        hall_.end(rank_, executor_.now(),
                  {hall_.name(rank_), "it ended with an error: " + std::string(why)});
    }
    std::unique_ptr<Communicator> group(std::span<const int> members) override {
        const auto own = std::ranges::find(members, rank_) - members.begin();
        return std::make_unique<SimulatedRank>(hall_.group(groups_++, members),
                                               static_cast<int>(own), executor_, lane_);
    }
    // In virtual time there is no other thread.
    std::unique_ptr<Communicator> beside(Executor& executor) override {
        if (executor_.simulated()) return nullptr;
        std::vector<int> all(static_cast<size_t>(size()));
        std::iota(all.begin(), all.end(), 0);
        return std::make_unique<SimulatedRank>(hall_.group(groups_++, all), rank_, executor);
    }

private:
    static constexpr size_t kDepth = 1024;

    // An end that has been decided and is yet to be seen here.
    struct Ending {
        uint64_t number;
        Nanos at;
        std::vector<std::vector<std::byte>> arrived{};  // by transfer: of all ranks
        uint64_t left = 0;                              // checksum of what leaves
        std::optional<Error> failure{};
    };

    int host_of(int rank) const { return hall_.name(rank) % hall_.ranks().hosts; }
    // Ranks of this one's host below `end`.
    int neighbours(int end) const {
        int count = 0;
        for (int other = 0; other < end; ++other) count += host_of(other) == host_of(rank_);
        return count;
    }

    void post(const Operation& operation) override {
        operations_[posted_ % kDepth] = operation;
        executor_.post(lane_, {[](void* self, uint64_t number) {
                                   static_cast<SimulatedRank*>(self)->run(number);
                               },
                               this, posted_++});
    }

    // On the lane.
    void run(uint64_t number) {
        const Operation& operation = operations_[number % kDepth];
        Ending ending{.number = number, .at = std::max(executor_.now(), last_)};
        if (!operation.counter && !over_) {
            ending.left = leaving(operation);
            const Hall::Result met = hall_.meet(meetings_++, rank_, operation, ending.at);
            ending.at = std::max(ending.at, met.ends);
            if (met.lost) {
                over_ = true;
                ending.failure = failure_of(operation, *met.lost);
                hall_.end(rank_, ending.at, *met.lost);
            } else {
                for (size_t i = 0; i < operation.count; ++i)
                    ending.arrived.push_back(arriving(operation, i, met.operations));
                hall_.leave(meetings_ - 1);
                for (size_t i = 0; i < operation.count; ++i) spoil(operation, i);
            }
        }
        last_ = ending.at;
        if (!executor_.simulated()) return end(std::move(ending));
        endings_.push_back(std::move(ending));
    }

    Error failure_of(const Operation& operation, const Hall::Lost& by) const {
        if (by.rank != hall_.name(rank_)) return lost({&by.rank, 1}, by.how, operation.text(), "");
        return {Trouble::rank_lost,
                {.what = "the other ranks have given this rank (" + std::to_string(by.rank) +
                         ") up: " + by.how}};
    }

    std::vector<std::byte> arriving(const Operation& operation, size_t i,
                                    const std::vector<const Operation*>& all) const {
        if (operation.kind == Operation::Kind::pass) return passed(operation, i, all);
        if (operation.kind == Operation::Kind::shift) return shifted(operation, i, all);
        return gathered(operation, i, all);
    }

    std::vector<std::byte> gathered(const Operation& operation, size_t i,
                                    const std::vector<const Operation*>& all) const {
        const Transfer& transfer = operation.transfers[i];
        std::vector<std::byte> arrived(all.size() * static_cast<size_t>(transfer.bytes));
        for (size_t from = 0; from < all.size(); ++from) {
            const Operation& theirs = *all[from];
            FERRY_CHECK(
                theirs.kind == operation.kind && theirs.count == operation.count &&
                    theirs.transfers[i].bytes == transfer.bytes &&
                    theirs.text() == operation.text(),
                "the ranks make different calls: " + theirs.text() + ", " + operation.text());
            const std::byte* out = theirs.out_for(theirs.transfers[i], rank_);
            const auto bytes = static_cast<size_t>(transfer.bytes);
            if (bytes > 0) std::memcpy(arrived.data() + from * bytes, out, bytes);
        }
        return arrived;
    }

    // Empty where this rank is the one that passes something on.
    std::vector<std::byte> passed(const Operation& operation, size_t i,
                                  const std::vector<const Operation*>& all) const {
        const Transfer& transfer = operation.transfers[i];
        const Operation& theirs = *all[static_cast<size_t>(1 - rank_)];
        FERRY_CHECK(theirs.kind == operation.kind && theirs.text() == operation.text() &&
                        theirs.transfers[i].bytes == transfer.bytes &&
                        theirs.sends(theirs.transfers[i]) == operation.receives(transfer),
                    "the ranks make different calls: " + theirs.text() + ", " + operation.text());
        if (operation.sends(transfer)) return {};
        const std::byte* from = theirs.transfers[i].out;
        return {from, from + transfer.bytes};
    }

    // What arrives by the i-th transfer of a shift: nothing by that which leaves.
    std::vector<std::byte> shifted(const Operation& operation, size_t i,
                                   const std::vector<const Operation*>& all) const {
        const Operation& theirs = *all[static_cast<size_t>(operation.source(rank_, size()))];
        FERRY_CHECK(theirs.kind == operation.kind && theirs.by == operation.by &&
                        theirs.leaving().bytes == operation.arriving().bytes &&
                        theirs.text() == operation.text(),
                    "the ranks make different calls: " + theirs.text() + ", " + operation.text());
        if (i == 0 || operation.arriving().bytes == 0) return {};
        const std::byte* out = theirs.leaving().out;
        return {out, out + theirs.leaving().bytes};
    }

    // Garbage until it ends, but for this rank's own place, where a gather's transfer may lie.
    void spoil(const Operation& operation, size_t i) const {
        const Transfer& transfer = operation.transfers[i];
        if (!operation.receives(transfer)) return;
        if (!operation.to_all()) {
            if (transfer.bytes > 0)
                std::memset(transfer.in, 0xA5, static_cast<size_t>(transfer.bytes));
            return;
        }
        for (int from = 0; from < size(); ++from) {
            if (from == rank_ || transfer.bytes == 0) continue;
            std::memset(transfer.in + from * transfer.bytes, 0xA5,
                        static_cast<size_t>(transfer.bytes));
        }
    }

    uint64_t leaving(const Operation& operation) const {
        uint64_t all = 0;
        for (size_t i = 0; i < operation.count; ++i) {
            const Transfer& transfer = operation.transfers[i];
            if (!operation.sends(transfer)) continue;
            const int parts = operation.kind == Operation::Kind::exchange ? size() : 1;
            all = all * 31 + checksum({transfer.out, static_cast<size_t>(transfer.bytes * parts)});
        }
        return all;
    }

    void end(Ending ending) {
        const Operation& operation = operations_[ending.number % kDepth];
        if (!ending.arrived.empty()) {
            FERRY_CHECK(leaving(operation) == ending.left,
                        "what leaves was changed before the end of the " + operation.text());
        }
        for (size_t i = 0; i < ending.arrived.size(); ++i) {
            const auto& arrived = ending.arrived[i];
            if (!arrived.empty())
                std::memcpy(operation.transfers[i].in, arrived.data(), arrived.size());
        }
        if (ending.failure) {
            const std::lock_guard lock(mutex_);
            failure_ = std::move(ending.failure);
        }
        Executor& executor = executor_;  // this may be gone once it is done
        if (operation.counter) operation.counter->fetch_add(1, std::memory_order_release);
        ended_.store(ending.number + 1, std::memory_order_release);
        executor.wake();
    }

    std::string_view name() const override { return "comm"; }
    Nanos next_event() const override { return endings_.empty() ? kForever : endings_.front().at; }
    void run_once(Nanos now) override {
        while (!endings_.empty() && endings_.front().at <= now) {
            Ending ending = std::move(endings_.front());
            endings_.pop_front();
            end(std::move(ending));
        }
    }
    void interrupt() override {}

    Hall& hall_;
    const int rank_;
    int groups_ = 0;  // asked for so far
    Executor& executor_;
    LaneId lane_;
    std::vector<Operation> operations_;
    uint64_t posted_ = 0;
    std::atomic<uint64_t> ended_ = 0;
    // The lane's own.
    uint64_t meetings_ = 0;
    Nanos last_ = 0;
    bool over_ = false;
    std::deque<Ending> endings_;  // of simulated executors, whose one thread is the lane's too
    std::mutex mutex_;
    std::optional<Error> failure_;
};

}  // namespace

std::vector<std::exception_ptr> outcomes_of(const SimulatedRanks& ranks, const RankBody& body) {
    Hall hall(ranks);
    std::vector<std::exception_ptr> outcomes(static_cast<size_t>(ranks.size));
    std::vector<std::jthread> threads;
    for (int rank = 0; rank < ranks.size; ++rank) {
        threads.emplace_back([&, rank] {
            const auto executor =
                ranks.threads
                    ? make_thread_executor()
                    : make_simulated_executor(ranks.seed * 64 + static_cast<uint64_t>(rank));
            try {
                SimulatedRank communicator(hall, rank, *executor);
                body(communicator, *executor);
            } catch (...) {
                outcomes[static_cast<size_t>(rank)] = std::current_exception();
            }
        });
    }
    threads.clear();
    return outcomes;
}

void run_ranks(const SimulatedRanks& ranks, const RankBody& body) {
    std::exception_ptr consequence;
    for (const std::exception_ptr& outcome : outcomes_of(ranks, body)) {
        if (!outcome) continue;
        try {
            std::rethrow_exception(outcome);
        } catch (const Error& error) {
            if (error.trouble() != Trouble::rank_lost) throw;
            if (!consequence) consequence = outcome;
        }
    }
    if (consequence) std::rethrow_exception(consequence);
}

}  // namespace ferry::comm
