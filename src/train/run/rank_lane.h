// The comm lane's tasks as what the ranks exchange.
#pragma once

#include <array>
#include <vector>

#include "comm/comm.h"
#include "cost/operands.h"
#include "outcome.h"
#include "planner/planner.h"
#include "swap/schedule.h"
#include "swap/store.h"

namespace ferry::train {

// Groups of the ranks that share weights and gradients: those of this host, and those that have
// this one's position in the other hosts. Null: they do not exchange by hosts.
struct HostGroups {
    comm::Communicator *inside = nullptr, *across = nullptr;
};

class RankLane final : public swap::Collectives {
public:
    // `ranks`: the run's, which agree. `sharers`: those that share weights and gradients; null: no
    // other rank does. `hosts`: groups of them. `links`: to other stages; null: to none. `step`:
    // the run's, which errors name.
    using Links = std::array<comm::Communicator*, cost::kStageLinks>;
    RankLane(comm::Communicator& ranks, comm::Communicator* sharers, const HostGroups& hosts,
             const Links& links, const planner::Plan& plan, const OutcomeJudge& judge,
             const int64_t& step)
        : ranks_(ranks),
          sharers_(sharers),
          hosts_(hosts),
          links_(links),
          plan_(plan),
          judge_(judge),
          step_(step),
          reports_(static_cast<size_t>(ranks.size())) {}

    void start(const swap::Call& call) override;
    void signal(std::atomic<uint64_t>& counter) override;
    void check() override;

    // What this rank has sent since count_anew(), by collective. Those that it took no part in are
    // left out.
    std::vector<CollectiveReport> collectives() const;
    void count_anew() { sent_ = {}; }
    // The reports of the step whose outcome is due.
    std::span<const RankReport> reports() const { return reports_; }

private:
    using At = cost::Addressed;
    void exchange(const swap::Task& task, const cost::op::GatherCodes<At>& at);
    void exchange(const swap::Task& task, const cost::op::GatherCodesInHost<At>& at);
    void exchange(const swap::Task& task, const cost::op::GatherWeights<At>& at);
    void exchange(const swap::Task& task, const cost::op::GatherWeightsInHost<At>& at);
    void exchange(const swap::Task& task, const cost::op::ExchangeInHost<At>& at);
    void exchange(const swap::Task& task, const cost::op::Exchange<At>& at);
    void exchange(const swap::Task& task, const cost::op::GatherGradient<At>& at);
    void exchange(const swap::Task& task, const cost::op::ExchangeMomentum<At>& at);
    void exchange(const swap::Task& task, const cost::op::GatherMomentum<At>& at);
    void exchange(const swap::Task& task, const cost::op::PassOn<At>& at);
    void exchange(const swap::Task& task, const cost::op::TakeOver<At>& at);
    void exchange(const swap::Task& task, const cost::op::Agree<At>& at);
    comm::Topic topic(const char* of, const swap::Task& task) const {
        return {.of = of, .layer = task.layer, .step = step_};
    }
    // What goes to each of so many others.
    void count(const swap::Task& task, int64_t others, int64_t raw_bytes, int64_t sent_bytes);
    int64_t others() const { return plan_.partition.ranks - 1; }
    void gather_second_shards(const swap::Task& task, std::byte* all);
    // Which communicator such a task goes through.
    static size_t on_of(const swap::Task& task);
    void tell_ended();
    bool one_order() const;
    comm::Communicator& communicator(size_t on) const;

    comm::Communicator& ranks_;
    comm::Communicator* const sharers_;
    const HostGroups hosts_;
    const Links links_;
    // Each communicator ends its operations in an order of its own, but the lane ends tasks in
    // their order. So there is noted for each task which communicator it is on, and for each
    // communicator how many operations have ended.
    static constexpr size_t kTasks = 1024;
    enum On : uint8_t { run, slice, inside, across, link };  // link: and which
    static constexpr size_t kOns = link + cost::kStageLinks;
    size_t last_ = run;
    std::array<uint8_t, kTasks> on_{};
    uint64_t posted_ = 0, told_ = 0;
    std::array<std::atomic<uint64_t>, kOns> ended_{};
    std::array<uint64_t, kOns> taken_{};
    std::atomic<uint64_t>* counter_ = nullptr;
    const planner::Plan& plan_;
    const OutcomeJudge& judge_;
    const int64_t& step_;
    RankReport mine_{};
    std::vector<RankReport> reports_;
    struct Sent {
        int64_t calls = 0, raw_bytes = 0, sent_bytes = 0;
    };
    std::array<Sent, static_cast<size_t>(cost::Op::end)> sent_{};
};

}  // namespace ferry::train
