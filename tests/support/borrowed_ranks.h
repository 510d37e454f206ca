// A test's communicator for somebody who wants one of his own, such as an engine.
#pragma once

#include <memory>

#include "comm/comm.h"

namespace ferry::comm {

class BorrowedRanks final : public Communicator {
public:
    explicit BorrowedRanks(Communicator& ranks) : ranks_(ranks) {}

    std::string_view kind() const noexcept override { return ranks_.kind(); }
    int rank() const noexcept override { return ranks_.rank(); }
    int size() const noexcept override { return ranks_.size(); }
    int local_rank() const noexcept override { return ranks_.local_rank(); }
    int local_size() const noexcept override { return ranks_.local_size(); }
    int host() const noexcept override { return ranks_.host(); }
    void all_gather(std::span<const Gather> pieces, Topic topic) override {
        ranks_.all_gather(pieces, topic);
    }
    void exchange(std::span<const Exchange> pieces, Topic topic) override {
        ranks_.exchange(pieces, topic);
    }
    void pass(const Pass& piece, Topic topic) override { ranks_.pass(piece, topic); }
    void shift(const Shift& parts, Topic topic) override { ranks_.shift(parts, topic); }
    void all_gather_host(Gather piece, Topic topic) override {
        ranks_.all_gather_host(piece, topic);
    }
    void signal(std::atomic<uint64_t>& counter) override { ranks_.signal(counter); }
    void check() override { ranks_.check(); }
    std::unique_ptr<Communicator> group(std::span<const int> members) override {
        return ranks_.group(members);
    }
    std::unique_ptr<Communicator> beside(Executor& executor) override {
        return ranks_.beside(executor);
    }
    void abandon(std::string_view why) noexcept override { ranks_.abandon(why); }

private:
    Communicator& ranks_;
};

inline std::unique_ptr<Communicator> borrow(Communicator& ranks) {
    return std::make_unique<BorrowedRanks>(ranks);
}

}  // namespace ferry::comm
