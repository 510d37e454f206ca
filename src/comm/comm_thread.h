// A communicator over a transport: the queue of operations and the thread that carries them out,
// deadlines, and who is to blame when one is not kept.
#pragma once

#include <condition_variable>
#include <mutex>

#include "transport.h"
#include "watchdog.h"

namespace ferry::comm {

class CommThread final : public OperationQueue, private Service {
public:
    // The transport's own wire, or the communicator by which it was made and which goes on watching
    // the other ranks; not both. With neither, a failure names no rank. `members`: the ranks of
    // that communicator, where it has more.
    struct Sources {
        Wire* wire = nullptr;
        CommThread* watch = nullptr;
        std::vector<int> members{};
    };
    CommThread(Executor& executor, const CommOptions& options, std::unique_ptr<Transport> transport,
               Sources sources);
    ~CommThread() override;

    std::string_view kind() const noexcept override { return transport_->kind(); }
    bool uses_streams() const noexcept override { return transport_->uses_streams(); }
    int rank() const noexcept override { return place_.rank; }
    int size() const noexcept override { return place_.size; }
    int local_rank() const noexcept override { return place_.local_rank; }
    int local_size() const noexcept override { return place_.local_size; }
    int host() const noexcept override { return place_.host; }
    const RankPlace& place() const noexcept { return place_; }

    void check() override;
    void abandon(std::string_view why) noexcept override;
    std::unique_ptr<Communicator> group(std::span<const int> members) override;
    std::unique_ptr<Communicator> beside(Executor& executor) override;

    // ---- as the watch of another; any thread

    // Whether this rank is in an operation for long.
    void set_waiting(bool waiting);
    // Whether that rank said so of itself.
    bool waits(int rank) const noexcept;
    // Tells the others that `ranks` are lost, unless something failed before.
    void give_up(std::span<const int> ranks, std::string_view how) noexcept;
    // The first failure that was found or heard of.
    std::optional<Error> failure() const;
    // The number by which the run knows a rank.
    int name_of(int rank) const noexcept;

private:
    static constexpr uint64_t kDepth = 1024;  // operations enqueued and not ended

    std::string_view name() const override { return "comm"; }
    void run_once(Nanos until) override;
    void interrupt() override;

    void post(const Operation& operation) override;
    std::unique_ptr<Communicator> group_on(Executor& executor, std::span<const int> members);
    Operation& at(uint64_t number) { return operations_[number % kDepth]; }

    // Parts of run_once(), on the comm thread.
    bool advance();
    bool progress();
    bool start_next();
    bool finish_oldest();
    void end_oldest();
    void drop_all();
    void take_news();
    void heed_what_was_told();
    void keep_watch();
    void announce(bool waiting);
    void look_for_ended(Nanos now);
    void run_out_of_time();
    bool others_wait() const;
    // A rank as the watch counts; all of them.
    int watched(int rank) const {
        return sources_.members.empty() ? rank : sources_.members[static_cast<size_t>(rank)];
    }
    std::vector<int> watched(std::span<const int> ranks) const;
    Error lost_here(std::span<const int> ranks, const std::string& how, const std::string& where,
                    const std::string& remedy) const;
    std::string where(std::span<const int> lost = {}) const;
    std::string where_of_watched(std::span<const int> lost) const;
    std::string among() const;
    void fail(const Error& error);
    void fail_and_tell(const Error& error, std::span<const int> ranks, std::string_view how);
    void rest();

    // Called on the watchdog's thread, the last one by this one's watch too.
    std::optional<Error> judge(Nanos stuck) const;
    std::optional<Error> known() const;
    std::string oldest() const;

    Executor& executor_;
    const CommOptions options_;
    const Nanos timeout_;
    std::unique_ptr<Transport> transport_;
    const Sources sources_;
    RankPlace place_;

    mutable std::mutex mutex_;
    std::condition_variable changed_;
    std::vector<Operation> operations_;  // a ring; a slot is its owner's until it has ended
    uint64_t posted_ = 0, ended_ = 0;    // under mutex_
    bool interrupted_ = false;           // under mutex_
    std::optional<Error> failure_;       // under mutex_, the first
    std::optional<std::pair<std::vector<int>, std::string>> given_up_;  // under mutex_, to be told
    std::atomic<bool> failed_ = false;                                  // failure_ is there

    // The comm thread's own.
    uint64_t started_ = 0, first_ = 0;  // first_: the oldest that has not ended
    Nanos oldest_since_ = 0;            // when it became the oldest, or progress was last seen
    Nanos ended_seen_at_ = kForever;    // when a process was first seen to have ended
    Nanos next_look_ = 0;               // for such
    std::optional<Error> told_;         // by another rank: that one is lost
    std::vector<int> told_of_{};        // which
    Nanos told_at_ = 0;
    bool announced_ = false, over_ = false;

    std::atomic<int> asked_waiting_ = 0;  // by those that this is the watch of
    mutable std::mutex watched_mutex_;
    std::vector<const CommThread*> watched_{};  // under watched_mutex_: whose watch this is
    std::vector<std::atomic<bool>> waits_;

    Watchdog watchdog_;  // watches the comm thread's rounds; that thread watches the rest
};

}  // namespace ferry::comm
