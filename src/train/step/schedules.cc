#include "schedules.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>

#include "cost/operation_table.h"
#include "ferry/error.h"

namespace ferry::train {

std::vector<std::array<int64_t, 3>> exchanges_of(const swap::Schedule& schedule, bool in_kernels) {
    std::vector<std::array<int64_t, 3>> found;
    for (const uint32_t index : schedule.lanes[static_cast<size_t>(swap::Lane::comm)]) {
        const swap::Task& task = schedule.tasks[index];
        found.push_back({task.op, task.layer, task.bytes});
    }
    if (!in_kernels) return found;
    for (const uint32_t index : schedule.lanes[static_cast<size_t>(swap::Lane::compute)]) {
        const swap::Task& task = schedule.tasks[index];
        if (cost::exchanges_within(task)) found.push_back({task.op, task.layer, task.item});
    }
    return found;
}

std::vector<Passed> passes_of(const swap::Schedule& schedule) {
    std::vector<Passed> found;
    for (const uint32_t index : schedule.lanes[static_cast<size_t>(swap::Lane::comm)]) {
        const swap::Task& task = schedule.tasks[index];
        const cost::StageEnd end = cost::row_of(task).stage_end;
        if (end == cost::StageEnd::none) continue;
        found.push_back({static_cast<cost::StageLink>(task.flags), end == cost::StageEnd::sends,
                         task.layer, task.item, task.bytes});
    }
    return found;
}

namespace {

// The stage at the other end. Behind the last one comes the first, for the next virtual stages.
size_t other_end(size_t stage, cost::StageLink link, size_t stages) {
    switch (link) {
        case cost::StageLink::previous:
            return (stage + stages - 1) % stages;
        case cost::StageLink::next:
            return (stage + 1) % stages;
        case cost::StageLink::table:
            return stage == 0 ? stages - 1 : 0;
    }
    bug("no such link");
}

bool match(const Passed& mine, const Passed& theirs) {
    return mine.leaves != theirs.leaves && mine.layer == theirs.layer && mine.item == theirs.item &&
           mine.bytes == theirs.bytes;
}

}  // namespace

// A task waits for earlier ones of its rank alone. So where the stages could take all their tasks
// in the order of the record, each pass at both ends at once, no order in which lanes run ahead
// makes one wait for ever (decision 51).
std::string why_stages_stop(std::span<const std::vector<Passed>> stages) {
    std::vector<size_t> done(stages.size());
    for (bool moved = true; moved;) {
        moved = false;
        for (size_t s = 0; s < stages.size(); ++s) {
            while (done[s] < stages[s].size()) {
                const Passed& mine = stages[s][done[s]];
                const size_t other = other_end(s, mine.link, stages.size());
                if (other >= stages.size() || done[other] == stages[other].size()) break;
                const Passed& theirs = stages[other][done[other]];
                if (other_end(other, theirs.link, stages.size()) != s || !match(mine, theirs))
                    break;
                ++done[s];
                ++done[other];
                moved = true;
            }
        }
    }
    std::string text;
    for (size_t s = 0; s < stages.size(); ++s) {
        if (done[s] == stages[s].size()) continue;
        const Passed& next = stages[s][done[s]];
        text +=
            fmt::format("{}stage {} {} layer {}, item {}, {} stage {}", text.empty() ? "" : "; ", s,
                        next.leaves ? "passes on" : "takes over", next.layer, next.item,
                        next.leaves ? "to" : "from", other_end(s, next.link, stages.size()));
    }
    return text;
}

void Schedules::record(const planner::Plan& plan, int64_t evaluated_micro_batches) {
    for (size_t p = 0; p < kPrevious; ++p) {
        const auto previous = static_cast<Previous>(p);
        if (previous == Previous::alone) continue;
        steps[p][0] = record_step(plan, previous, false);
        if (plan.speculative) {
            steps[p][1] = record_step(plan, previous, true);
            // Ranks compare the steps without speculative updates: not all of them need make any.
            FERRY_CHECK(exchanges_of(steps[p][0]) == exchanges_of(steps[p][1]) &&
                            passes_of(steps[p][0]) == passes_of(steps[p][1]),
                        "a speculative update changes nothing that ranks exchange");
        }
        drains[p] = record_drain(plan, previous);
    }
    record_by_momentum(plan);
    evaluation_size = std::min(plan.group_size(), std::max<int64_t>(evaluated_micro_batches, 1));
    while (evaluated_micro_batches % evaluation_size != 0) --evaluation_size;
    evaluation = record_evaluation(plan, evaluation_size);
}

void Schedules::record_by_momentum(const planner::Plan& plan) {
    if (!plan.has_feedback()) return;
    for (const Previous previous : {Previous::none, Previous::not_speculative, Previous::alone}) {
        if (previous == Previous::alone && !plan.partition.codecs.local_steps) continue;
        const auto p = static_cast<size_t>(previous);
        steps_by_momentum[p] = record_step(plan, previous, false, Exchanged::momentum);
        if (previous != Previous::none)
            drains_by_momentum[p] = record_drain(plan, previous, Exchanged::momentum);
    }
}

swap::Schedule Schedules::of_all_kernels() const {
    swap::Schedule all = steady();
    const auto& others = step_by_momentum(Previous::none).tasks;
    all.tasks.insert(all.tasks.end(), others.begin(), others.end());
    return all;
}

std::vector<const swap::Schedule*> Schedules::all() const {
    std::vector<const swap::Schedule*> found{&evaluation};
    for (const auto& step : steps) found.push_back(step.data());
    for (const swap::Schedule& drain : drains) found.push_back(&drain);
    for (const auto& step : steps_by_momentum) found.push_back(&step);
    for (const swap::Schedule& drain : drains_by_momentum) found.push_back(&drain);
    return found;
}

}  // namespace ferry::train
