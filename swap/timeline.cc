// The simulated replay of schedules: the same waits as the store's, seconds instead of work.
#include <algorithm>
#include <limits>
#include <optional>

#include "ferry/error.h"
#include "scoreboard.h"

namespace ferry::swap {
namespace {

constexpr int64_t kSteps = 5;  // the last one is the answer: what the first left has finished

struct Running {
    double begin_s = 0, left_s = 0;  // left: as if alone
    Cost cost{};
    int64_t step = 0;
    size_t task = 0;
};

class Prediction {
public:
    Prediction(const Schedule& first, const Schedule& steady, uint32_t resources,
               const CostModel& cost)
        : first_(first), steady_(steady), cost_(cost), board_(resources) {}

    Timeline run() {
        result_.tasks.resize(steady_.tasks.size());
        append();
        while (true) {
            while (start_ready()) {
            }
            if (idle()) break;
            advance();
            if (step_ < kSteps && board_.reached(board_.newest(), schedule().outcome)) append();
        }
        FERRY_CHECK(board_.all_complete(), "a schedule that cannot end");
        return std::move(result_);
    }

private:
    const Schedule& schedule() const { return step_ == 1 ? first_ : steady_; }
    bool idle() const {
        return std::none_of(running_.begin(), running_.end(),
                            [](const auto& task) { return task.has_value(); });
    }

    void append() {
        result_.step_seconds = now_s_ - outcome_s_;
        outcome_s_ = now_s_;
        ++step_;
        board_.append(schedule(), step_);
    }

    bool start_ready() {
        bool any = false;
        for (size_t lane = 0; lane < kLanes; ++lane) {
            const Active* active = nullptr;
            const Task* task =
                running_[lane] ? nullptr : board_.next(static_cast<Lane>(lane), &active);
            if (!task || !board_.ready(*task, *active)) continue;
            const Cost cost = cost_(*task);
            const auto index = static_cast<size_t>(task - active->schedule->tasks.data());
            board_.take(static_cast<Lane>(lane));
            running_[lane] = Running{now_s_, cost.seconds, cost, active->sequence, index};
            any = true;
        }
        return any;
    }

    using Wanted = std::array<double, kShared>;
    static double part_of(const Running& task, Shared resource) {
        return task.cost.part[static_cast<size_t>(resource)];
    }
    // The rate by the disk's share alone; the task then takes less of the rest, too.
    static double on_disk(const Running& task, double wanted_of_disk) {
        return part_of(task, Shared::disk) > 0 ? 1 / std::max(wanted_of_disk, 1.0) : 1;
    }
    static double rate(const Running& task, const Wanted& wanted) {
        double rate = 1;
        for (const Shared r : {Shared::cores, Shared::dram}) {
            if (part_of(task, r) > 0)
                rate = std::min(rate, 1 / std::max(wanted[static_cast<size_t>(r)], 1.0));
        }
        return rate * on_disk(task, wanted[static_cast<size_t>(Shared::disk)]);
    }
    Wanted wanted_by_all() const {
        double disk = 0;
        for (const auto& task : running_) disk += task ? part_of(*task, Shared::disk) : 0;
        Wanted wanted{};
        for (const auto& task : running_) {
            for (size_t r = 0; task && r < kShared; ++r)
                wanted[r] += task->cost.part[r] * on_disk(*task, disk);
        }
        wanted[static_cast<size_t>(Shared::disk)] = disk;
        return wanted;
    }

    // To the next completion.
    void advance() {
        const Wanted wanted = wanted_by_all();
        double step_s = std::numeric_limits<double>::infinity();
        for (const auto& task : running_) {
            if (task) step_s = std::min(step_s, task->left_s / rate(*task, wanted));
        }
        now_s_ += step_s;
        for (size_t lane = 0; lane < kLanes; ++lane) {
            if (!running_[lane]) continue;
            Running& task = *running_[lane];
            const double share = rate(task, wanted);
            const bool done = task.left_s / share <= step_s * (1 + 1e-12);
            task.left_s -= step_s * share;
            if (done) finish(lane, task);
        }
    }

    void finish(size_t lane, const Running& task) {
        if (task.step == kSteps) {
            result_.tasks[task.task] = {task.begin_s - outcome_s_, now_s_ - outcome_s_};
            result_.busy_seconds[lane] += now_s_ - task.begin_s;
        }
        running_[lane].reset();
        const auto id = static_cast<Lane>(lane);
        board_.complete(id, board_.completed(id) + 1);
    }

    const Schedule& first_;
    const Schedule& steady_;
    const CostModel& cost_;
    Scoreboard board_;
    std::array<std::optional<Running>, kLanes> running_{};
    double now_s_ = 0, outcome_s_ = 0;
    int64_t step_ = 0;
    Timeline result_;
};

}  // namespace

Timeline predict(const Schedule& first, const Schedule& steady, uint32_t resources,
                 const CostModel& cost) {
    FERRY_CHECK(first.has_outcome && steady.has_outcome, "a step has an outcome");
    return Prediction(first, steady, resources, cost).run();
}

}  // namespace ferry::swap
