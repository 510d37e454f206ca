// Counts the tasks appended to each lane and those done, over all schedules.
#pragma once

#include <algorithm>
#include <vector>

#include "swap/schedule.h"

namespace ferry::swap {

// A schedule in the lanes: the absolute count of its first task in each, and what its entries wait
// for.
struct Active {
    const Schedule* schedule = nullptr;
    int64_t sequence = 0, step = -1;  // as the owner numbers it; as a recording shows it
    std::array<int64_t, kLanes> base{};
    std::vector<Counters> entry_waits{};
};

class Scoreboard {
public:
    static constexpr size_t kActiveMax = 4;
    explicit Scoreboard(uint32_t resources) : resources_(resources) {}

    Active& append(const Schedule& schedule, int64_t sequence);
    // The lane's next task that was not taken yet, or null; `active` is its schedule.
    const Task* next(Lane lane, const Active** active);
    void take(Lane lane) { ++taken_[index(lane)]; }
    void complete(Lane lane, int64_t count) { completed_[index(lane)] = count; }

    bool ready(const Task& task, const Active& active) const;
    // Whether `lane` has a task that was not taken yet, comes before this task of another lane in
    // program order, and for which `asked` is true. next() of `lane` must have been called since.
    template <class Asked>
    bool is_left_before(Lane lane, const Task& task, const Active& active,
                        const Asked& asked) const {
        const size_t l = index(lane);
        for (size_t a = lane_active_[l]; a < count_; ++a) {
            const Active& its = ring_[a % kActiveMax];
            const auto& tasks = its.schedule->lanes[l];
            for (auto i = static_cast<size_t>(std::max<int64_t>(taken_[l] - its.base[l], 0));
                 i < tasks.size(); ++i) {
                const Task& other = its.schedule->tasks[tasks[i]];
                if (&its == &active && &other > &task) return false;
                if (asked(other)) return true;
            }
            if (&its == &active) return false;
        }
        return false;
    }
    bool reached(const Active& active, const Wait& wait) const;
    int64_t taken(Lane lane) const { return taken_[index(lane)]; }
    int64_t completed(Lane lane) const { return completed_[index(lane)]; }
    int64_t in_flight(Lane lane) const { return taken(lane) - completed(lane); }
    bool all_complete() const { return completed_ == appended_; }
    // When all is complete: afterwards the schedules may go.
    void forget_schedules();
    bool none_in_flight() const { return completed_ == taken_; }
    // How many writes must be completed for the step before the newest schedule to be committed.
    int64_t committed_writes() const;
    const Active& newest() const { return ring_[(count_ - 1) % kActiveMax]; }

private:
    struct Use {
        Counters writers{}, readers{};
    };
    static size_t index(Lane lane) { return static_cast<size_t>(lane); }
    bool finished(const Active& active) const;

    std::vector<Use> resources_;
    std::array<Active, kActiveMax> ring_{};
    size_t count_ = 0;                          // schedules ever appended
    std::array<size_t, kLanes> lane_active_{};  // which of them each lane's next task is in
    std::array<int64_t, kLanes> appended_{}, taken_{}, completed_{};
};

}  // namespace ferry::swap
