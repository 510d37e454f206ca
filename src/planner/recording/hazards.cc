#include "hazards.h"

namespace ferry::planner {
namespace {

// These run one task after another, so a wait of a task for its own lane is implied. So the store
// lets no two tasks of the team overlap that share a place (swap::Kernels::runs_beside). Storage
// operations of a lane overlap and complete in any order; exchanges overlap too, and one must not
// receive where another still sends from.
bool runs_in_order(swap::Lane lane) {
    return lane != swap::Lane::read && lane != swap::Lane::write && lane != swap::Lane::comm;
}

}  // namespace

// A generation of a resource: the writers that fill it together, and the readers that use what they
// wrote. The next writer, or the first of the next ones to join, begins another.
void Hazards::begin_generation(State& state) {
    // Readers waited for every writer before them, so waiting for the readers is enough.
    state.before = state.readers;
    state.has_before = true;
    state.writers = state.readers = {};
    state.written = state.has_readers = false;
}

void Hazards::order(swap::Schedule& schedule, swap::Task& task, std::span<const Use> uses) {
    swap::Counters waits;
    // An entry: a use that nothing in this schedule orders (swap::EntryUse).
    task.first_entry = static_cast<uint32_t>(schedule.entries.size());
    const auto enter = [&](uint32_t resource, bool writes) {
        schedule.entries.push_back({resource, writes});
    };
    for (const Use& use : uses) {
        State& state = states_[use.resource];
        state.touched = true;
        const bool known = state.written || state.has_before;
        switch (use.effect) {
            case Effect::read:
                if (!known) enter(use.resource, false);
                waits.raise(state.before);
                waits.raise(state.writers);
                break;
            case Effect::write:
                if (!known) enter(use.resource, true);
                waits.raise(state.before);
                waits.raise(state.writers);
                waits.raise(state.readers);
                break;
            case Effect::join:
                if (state.has_readers && known) begin_generation(state);
                if (!state.has_before) enter(use.resource, true);
                waits.raise(state.before);
                waits.raise(state.readers);
                break;
        }
    }
    for (const Use& use : uses) {
        State& state = states_[use.resource];
        if (use.effect == Effect::read) {
            state.readers.raise(task.lane, task.index);
            state.has_readers = true;
            continue;
        }
        if (use.effect == Effect::write) {
            state = State{};
            state.touched = state.has_before = true;
            state.before.raise(task.lane, task.index);
        }
        state.writers.raise(task.lane, task.index);
        state.written = true;
    }
    task.entries = static_cast<uint32_t>(schedule.entries.size()) - task.first_entry;
    task.first_wait = static_cast<uint32_t>(schedule.waits.size());
    for (size_t lane = 0; lane < swap::kLanes; ++lane) {
        const auto id = static_cast<swap::Lane>(lane);
        if (waits.last[lane] < 0 || (id == task.lane && runs_in_order(id))) continue;
        schedule.waits.push_back({id, static_cast<uint32_t>(waits.last[lane])});
    }
    task.waits = static_cast<uint32_t>(schedule.waits.size()) - task.first_wait;
}

void Hazards::finish(swap::Schedule& schedule) const {
    for (uint32_t resource = 0; resource < states_.size(); ++resource) {
        const State& state = states_[resource];
        if (!state.touched) continue;
        swap::Counters writers = state.writers;
        writers.raise(state.before);
        schedule.last_uses.push_back(
            {resource, state.written || state.has_before, writers, state.readers});
    }
}

}  // namespace ferry::planner
