// The comm lane's tasks as what the ranks exchange.
#pragma once

#include <array>
#include <vector>

#include "comm/comm.h"
#include "cost/operands.h"
#include "ferry/swap.h"
#include "outcome.h"
#include "planner/planner.h"
#include "swap/schedule.h"
#include "swap/store.h"

namespace ferry::train {

class RankLane final : public swap::Collectives {
public:
    // `step`: the run's, which errors name.
    RankLane(comm::Communicator& ranks, const planner::Plan& plan, const OutcomeJudge& judge,
             const int64_t& step)
        : ranks_(ranks),
          plan_(plan),
          judge_(judge),
          step_(step),
          reports_(static_cast<size_t>(ranks.size())) {}

    void start(const swap::Call& call) override;
    void signal(std::atomic<uint64_t>& counter) override { ranks_.signal(counter); }
    void check() override { ranks_.check(); }

    // What this rank has sent since it counts, by collective; those that it took no part in left
    // out.
    std::vector<CollectiveReport> collectives() const;
    void count_anew() { sent_ = {}; }
    // The reports of the step whose outcome is due.
    std::span<const RankReport> reports() const { return reports_; }

private:
    using At = cost::Addressed;
    void exchange(const swap::Task& task, const cost::op::GatherCodes<At>& at);
    void exchange(const swap::Task& task, const cost::op::GatherWeights<At>& at);
    void exchange(const swap::Task& task, const cost::op::Exchange<At>& at);
    void exchange(const swap::Task& task, const cost::op::GatherGradient<At>& at);
    void exchange(const swap::Task& task, const cost::op::ExchangeMomentum<At>& at);
    void exchange(const swap::Task& task, const cost::op::GatherMomentum<At>& at);
    void exchange(const swap::Task& task, const cost::op::Agree<At>& at);
    comm::Topic topic(const char* of, const swap::Task& task) const {
        return {.of = of, .layer = task.layer, .step = step_};
    }
    // What goes to one of the others.
    void count(const swap::Task& task, int64_t raw_bytes, int64_t sent_bytes);

    comm::Communicator& ranks_;
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
