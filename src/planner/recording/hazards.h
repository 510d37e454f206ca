// Which earlier tasks a task must wait for, from what each reads and writes.
#pragma once

#include <span>
#include <vector>

#include "swap/schedule.h"

namespace ferry::planner {

// join: one of several writers that fill a resource together. They wait for its earlier readers,
// but not for each other. The verification of bytes that are on their way joins too, so that
// readers wait for it.
enum class Effect : uint8_t { read, write, join };
struct Use {
    uint32_t resource = 0;
    Effect effect = Effect::read;
};

class Hazards {
public:
    explicit Hazards(uint32_t resources) : states_(resources) {}

    // Adds the task's waits and entries to the schedule, and remembers its uses.
    void order(swap::Schedule& schedule, swap::Task& task, std::span<const Use> uses);
    // Notes the state of each resource at the end, for the schedules that follow.
    void finish(swap::Schedule& schedule) const;

private:
    struct State {
        swap::Counters before{};  // ordered before the writers that are joining
        swap::Counters writers{};
        swap::Counters readers{};
        bool written = false, has_before = false, has_readers = false, touched = false;
    };
    static void begin_generation(State& state);

    std::vector<State> states_;
};

}  // namespace ferry::planner
