#include "scoreboard.h"
#include "ferry/error.h"

namespace ferry::swap {
namespace {

Counters absolute(const Counters& relative, const std::array<int64_t, kLanes>& base) {
    Counters result;
    for (size_t lane = 0; lane < kLanes; ++lane) {
        if (relative.last[lane] >= 0) result.last[lane] = base[lane] + relative.last[lane];
    }
    return result;
}

}  // namespace

bool Scoreboard::finished(const Active& active) const {
    for (size_t lane = 0; lane < kLanes; ++lane) {
        const auto tasks = static_cast<int64_t>(active.schedule->lanes[lane].size());
        if (completed_[lane] < active.base[lane] + tasks) return false;
    }
    return true;
}

void Scoreboard::forget_schedules() {
    FERRY_CHECK(all_complete());
    for (Active& active : ring_) active.schedule = nullptr;
    lane_active_.fill(count_);
}

Active& Scoreboard::append(const Schedule& schedule, int64_t sequence) {
    Active& active = ring_[count_ % kActiveMax];
    FERRY_CHECK(!active.schedule || finished(active), "too many schedules in the lanes");
    active.schedule = &schedule;
    active.sequence = sequence;
    active.base = appended_;
    active.entry_waits.clear();
    for (const EntryUse& entry : schedule.entries) {
        Counters waits = resources_[entry.resource].writers;
        if (entry.writes) waits.raise(resources_[entry.resource].readers);
        active.entry_waits.push_back(waits);
    }
    for (const LastUse& last : schedule.last_uses) {
        Use& use = resources_[last.resource];
        const Counters readers = absolute(last.readers, active.base);
        if (last.written) {
            use = {absolute(last.writers, active.base), readers};
        } else {
            use.readers.raise(readers);
        }
    }
    for (size_t lane = 0; lane < kLanes; ++lane) {
        appended_[lane] += static_cast<int64_t>(schedule.lanes[lane].size());
    }
    ++count_;
    return active;
}

const Task* Scoreboard::next(Lane lane, const Active** active) {
    const size_t l = index(lane);
    for (; lane_active_[l] < count_; ++lane_active_[l]) {
        const Active& candidate = ring_[lane_active_[l] % kActiveMax];
        const auto& tasks = candidate.schedule->lanes[l];
        const int64_t position = taken_[l] - candidate.base[l];
        if (position < static_cast<int64_t>(tasks.size())) {
            *active = &candidate;
            return &candidate.schedule->tasks[tasks[static_cast<size_t>(position)]];
        }
    }
    return nullptr;
}

int64_t Scoreboard::committed_writes() const {
    const size_t write = index(Lane::write);
    if (count_ == 0 || !newest().schedule) return appended_[write];
    return newest().base[write] + newest().schedule->committed_writes;
}

bool Scoreboard::reached(const Active& active, const Wait& wait) const {
    const size_t lane = index(wait.lane);
    return completed_[lane] > active.base[lane] + wait.index;
}

bool Scoreboard::ready(const Task& task, const Active& active) const {
    for (uint32_t w = task.first_wait; w < task.first_wait + task.waits; ++w) {
        if (!reached(active, active.schedule->waits[w])) return false;
    }
    for (uint32_t e = task.first_entry; e < task.first_entry + task.entries; ++e) {
        for (size_t lane = 0; lane < kLanes; ++lane) {
            if (completed_[lane] <= active.entry_waits[e].last[lane]) return false;
        }
    }
    return true;
}

}  // namespace ferry::swap
