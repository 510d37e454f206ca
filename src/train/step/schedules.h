// All schedules of a run, recorded once at start-up.
#pragma once

#include <array>
#include <span>
#include <string>
#include <vector>

#include "cost/operations.h"
#include "step.h"
#include "swap/schedule.h"

namespace ferry::train {

// The exchanges of a schedule in its order: op, layer and bytes of each.
// `in_kernels`: and what exchanges from within, in its order.
std::vector<std::array<int64_t, 3>> exchanges_of(const swap::Schedule& schedule,
                                                 bool in_kernels = false);

// What a pipeline's stage sends to others and takes from them, in its order.
struct Passed {
    cost::StageLink link{};
    bool leaves = false;
    int32_t layer = -1, item = -1;
    int64_t bytes = 0;
    bool operator==(const Passed&) const = default;
};
std::vector<Passed> passes_of(const swap::Schedule& schedule);
// Whether all stages come to an end when each makes its passes one after the other, and waits at
// each until the other stage makes it too. Empty: they do. Else it says what each stage waits for
// that does not. `stages` has the passes of every stage.
std::string why_stages_stop(std::span<const std::vector<Passed>> stages);

struct Schedules {
    std::array<std::array<swap::Schedule, 2>, kPrevious> steps{};  // [previous][speculative]
    std::array<swap::Schedule, kPrevious> drains{};
    // Where momentum is exchanged nothing speculates. So there are those after Previous::none,
    // not_speculative and alone only.
    std::array<swap::Schedule, kPrevious> steps_by_momentum{}, drains_by_momentum{};
    swap::Schedule evaluation{};
    // Micro-batches that evaluation takes through the layers together: the most that fit a group.
    int64_t evaluation_size = 1;

    void record(const planner::Plan& plan, int64_t evaluated_micro_batches);
    const swap::Schedule& step(Previous previous, bool speculative) const {
        return steps[static_cast<size_t>(previous)][speculative ? 1 : 0];
    }
    const swap::Schedule& step_by_momentum(Previous previous) const {
        return steps_by_momentum.at(static_cast<size_t>(previous));
    }
    const swap::Schedule& drain(Previous previous, Exchanged what) const {
        const auto& found = what == Exchanged::gradients ? drains : drains_by_momentum;
        return found[static_cast<size_t>(previous)];
    }
    const swap::Schedule& steady() const { return step(Previous::not_speculative, false); }
    // The tasks of a steady step, and those of operations that only steps that exchange momentum
    // have.
    swap::Schedule of_all_kernels() const;
    std::vector<const swap::Schedule*> all() const;

private:
    void record_by_momentum(const planner::Plan& plan);
};

}  // namespace ferry::train
