// A network slower than the one that is there: for bench/slow_network.py and tests, where a machine
// lets nobody shape a real one. Every rank counts as a host of its own, or so many neighbours as
// one host. A rank has one link to the other hosts, at its share of the rate, on which operations
// leave one after the other. What an operation sends there takes as long as the link's rate says,
// from when the last rank has begun it, and arrives a delay later. What stays in the host is not
// held.
#pragma once

#include <array>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "ferry/executor.h"
#include "transport.h"

namespace ferry::comm {

struct EmulatedNetwork {
    double bytes_per_s = 0;
    Nanos delay = 0;
    int ranks_per_host = 1;

    // "100Mbit", "2.5Gbit,50us" or "100Mbit,0us,2": and ranks a host. Throws usage for anything
    // else.
    static EmulatedNetwork from(const std::string& text);
    // As FERRY_EMULATED_NETWORK says; none where that is not set.
    static std::optional<EmulatedNetwork> asked_for();
    // Throws usage where so many ranks are no whole number of its hosts.
    void require_whole_hosts(int ranks) const;
    std::string text() const;
    double bytes_per_s_of_a_rank() const { return bytes_per_s / ranks_per_host; }
};

class Throttled final : public Transport {
public:
    using Clock = std::function<Nanos()>;
    Throttled(std::unique_ptr<Transport> real, const EmulatedNetwork& network, Clock now);

    std::string_view kind() const noexcept override { return real_->kind(); }
    RankPlace place() const noexcept override { return real_->place(); }
    bool uses_streams() const noexcept override { return real_->uses_streams(); }
    bool ready() override { return real_->ready(); }
    void start(const Operation& operation, size_t slot) override;
    bool finished(size_t slot) override;
    std::vector<int> awaited(size_t slot) const override { return real_->awaited(slot); }
    void abort() noexcept override { real_->abort(); }
    std::unique_ptr<Transport> group(Communicator& of, std::span<const int> members) override;
    CommThread* watch() const override { return real_->watch(); }

private:
    // Of this rank, which its groups share.
    struct Link {
        std::mutex mutex{};
        Nanos free_at = 0;
    };
    Throttled(std::unique_ptr<Transport> real, const EmulatedNetwork& network, Clock now,
              std::shared_ptr<Link> link, std::vector<int> members);
    // Whether a rank of this communicator is on another host.
    bool is_away(int rank) const;
    void look();
    Nanos leave(Nanos takes);

    const std::unique_ptr<Transport> real_;
    const EmulatedNetwork network_;
    const Clock now_;
    const std::shared_ptr<Link> link_;
    const std::vector<int> members_;        // the run's numbers of these ranks
    std::array<int64_t, kWindow> bytes_{};  // that each sends
    std::array<bool, kWindow> leaves_{};    // false: it only arrives, at the other's rate
    std::array<bool, kWindow> held_{};      // false: it stays in the host
    std::array<Nanos, kWindow> due_{};
    std::deque<size_t> under_way_{};  // that have not really ended, in their order
};

}  // namespace ferry::comm
