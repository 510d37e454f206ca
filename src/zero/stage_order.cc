#include "zero/stage_order.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "ferry/error.h"
#include "ferry/units.h"

namespace ferry::zero {
namespace {

// A virtual stage's work on a group, forward or back.
struct Visit {
    int64_t virtual_stage = 0, group = 0;
    bool back = false;
};

size_t at(int64_t i) { return static_cast<size_t>(i); }

// Of interleaved schedules: sets of groups, none smaller than the stages are many.
int64_t sets_of(int64_t stages, int64_t groups) { return std::max<int64_t>(groups / stages, 1); }
int64_t largest_set(int64_t stages, int64_t groups) {
    return ceil_div(groups, sets_of(stages, groups));
}

// Visits forward, or back, in the order in which every stage makes them.
std::vector<Visit> visits_by_sets(const Stage& stage, int64_t groups, bool back) {
    const int64_t sets = sets_of(stage.count, groups), each = stage.virtual_stages();
    std::vector<Visit> found;
    int64_t first = 0;
    for (int64_t set = 0; set < sets; ++set) {
        const int64_t end = first + groups / sets + (set < groups % sets ? 1 : 0);
        for (int64_t v = 0; v < each; ++v)
            for (int64_t g = first; g < end; ++g)
                found.push_back({back ? each - 1 - v : v, g, back});
        first = end;
    }
    return found;
}

// Visits forward before the first one back.
int64_t ahead(const Stage& stage, int64_t groups) {
    const int64_t behind = stage.count - 1 - stage.index, each = stage.virtual_stages();
    return std::min(each * groups, 2 * behind + (each - 1) * largest_set(stage.count, groups));
}

std::vector<Visit> interleaved(const Stage& stage, int64_t groups) {
    const std::vector<Visit> forward = visits_by_sets(stage, groups, false),
                             back = visits_by_sets(stage, groups, true);
    const auto all = std::ssize(forward), before = ahead(stage, groups);
    std::vector<Visit> found;
    for (int64_t i = 0; i < all + before; ++i) {
        if (i < all) found.push_back(forward[at(i)]);
        if (i >= before) found.push_back(back[at(i - before)]);
    }
    return found;
}

// Behind the last stage nobody waits for the last forward: there each group goes back at once.
std::vector<Visit> round_robin(const Stage& stage, int64_t groups) {
    const int64_t last = stage.virtual_stages() - 1;
    std::vector<Visit> found;
    for (int64_t v = 0; v <= last; ++v) {
        for (int64_t g = 0; g < groups; ++g) {
            found.push_back({v, g, false});
            if (stage.is_last() && v == last) found.push_back({v, g, true});
        }
    }
    for (int64_t v = stage.is_last() ? last - 1 : last; v >= 0; --v)
        for (int64_t g = 0; g < groups; ++g) found.push_back({v, g, true});
    return found;
}

std::vector<Visit> visits_of(const Stage& stage, int64_t groups) {
    return stage.round_robin ? round_robin(stage, groups) : interleaved(stage, groups);
}

// When every stage is done with each of its visits, where passing takes no time and all virtual
// stages are as long: of a forward one unit, back three.
class Clock {
public:
    Clock(const Stage& stage, int64_t groups)
        : stages_(stage.count), each_(stage.virtual_stages()), groups_(groups) {
        for (int64_t s = 0; s < stages_; ++s) {
            Stage other = stage;
            other.index = static_cast<int>(s);
            visits_.push_back(visits_of(other, groups));
            done_.emplace_back(at(2 * each_ * groups), kNever);
        }
        std::vector<size_t> next(at(stages_));
        std::vector<int64_t> free(at(stages_));
        for (bool moved = true; moved;) {
            moved = false;
            for (int64_t s = 0; s < stages_; ++s) {
                for (; next[at(s)] < visits_[at(s)].size(); ++next[at(s)]) {
                    const Visit& visit = visits_[at(s)][next[at(s)]];
                    const int64_t given = given_at(s, visit);
                    if (given == kNever) break;
                    free[at(s)] = std::max(free[at(s)], given) + (visit.back ? 3 : 1);
                    done(s, visit) = free[at(s)];
                    moved = true;
                }
            }
        }
        for (int64_t s = 0; s < stages_; ++s)
            FERRY_CHECK(next[at(s)] == visits_[at(s)].size(), "stages wait for each other");
    }

    const std::vector<Visit>& visits(int64_t stage) const { return visits_[at(stage)]; }
    int64_t done_at(int64_t stage, const Visit& visit) const {
        return done_[at(stage)][place(visit)];
    }
    // Which stage's visit gives what this one takes, and which; -1: none of another stage.
    std::pair<int64_t, Visit> giver(int64_t stage, const Visit& visit) const {
        const int64_t round = visit.back ? 1 : -1, edge = visit.back ? stages_ - 1 : 0;
        if (stage != edge) return {stage + round, visit};
        const int64_t before = visit.virtual_stage + round;
        if (before < 0 || before >= each_) return {-1, visit};
        return {stages_ - 1 - edge, {before, visit.group, visit.back}};
    }

private:
    static constexpr int64_t kNever = -1;

    size_t place(const Visit& visit) const {
        return at(((visit.back ? each_ : 0) + visit.virtual_stage) * groups_ + visit.group);
    }
    int64_t& done(int64_t stage, const Visit& visit) { return done_[at(stage)][place(visit)]; }
    // When all is there that a visit takes.
    int64_t given_at(int64_t stage, const Visit& visit) const {
        const auto [other, what] = giver(stage, visit);
        if (other >= 0) return done_at(other, what);
        if (!visit.back) return 0;
        return done_at(stage, {visit.virtual_stage, visit.group, false});
    }

    const int64_t stages_, each_, groups_;
    std::vector<std::vector<Visit>> visits_{};
    std::vector<std::vector<int64_t>> done_{};
};

// All passes in the order in which they are made, each at the end of the visit that gives: what a
// stage takes comes before its own visits that end later. So every stage has the same order.
std::vector<Action> actions_by_clock(const Stage& stage, int64_t groups) {
    const Clock clock(stage, groups);
    const int64_t own = stage.index;
    struct Event {
        int64_t done = 0, stage = 0;
        Action action{};
    };
    std::vector<Event> events;
    for (const Visit& visit : clock.visits(own)) {
        const auto what = [&](Action::What back, Action::What forward) {
            return Action{visit.back ? back : forward, visit.virtual_stage, visit.group};
        };
        const auto [other, given] = clock.giver(own, visit);
        if (other >= 0)
            events.push_back({clock.done_at(other, given), other,
                              what(Action::What::take_gradients, Action::What::take_inputs)});
        events.push_back(
            {clock.done_at(own, visit), own, what(Action::What::backward, Action::What::forward)});
    }
    // A stage is done with one visit at a time.
    std::ranges::sort(events, {}, [](const Event& e) { return std::tuple(e.done, e.stage); });
    std::vector<Action> actions;
    actions.reserve(events.size());
    for (const Event& event : events) actions.push_back(event.action);
    return actions;
}

// The inputs of the next group arrive beside a backward. Behind each backward comes what an earlier
// one has left: nobody waits for that, so late it fills what stages wait for each other at the end.
std::vector<Action> one_f_one_b(const Stage& stage, int64_t groups) {
    using enum Action::What;
    const int64_t under_way = stage.under_way(groups), deferred = stage.deferred(groups);
    std::vector<Action> actions;
    const auto add = [&](Action::What what, int64_t group) {
        if (group >= 0 && group < groups) actions.push_back({what, 0, group});
    };
    add(take_inputs, 0);
    for (int64_t g = 0; g < groups + under_way - 1; ++g) {
        const int64_t back = g - (under_way - 1);
        add(forward, g);
        add(take_gradients, back);
        add(take_inputs, g + 1);
        add(backward, back);
        if (deferred > 0 && back >= 0) add(weight_gradients, back - deferred);
    }
    for (int64_t g = groups - deferred; g < groups; ++g) add(weight_gradients, g);
    return actions;
}

bool is_one_f_one_b(const Stage& stage) { return stage.several.empty() && !stage.round_robin; }

}  // namespace

std::vector<Action> actions_of(const Stage& stage, int64_t groups) {
    return is_one_f_one_b(stage) ? one_f_one_b(stage, groups) : actions_by_clock(stage, groups);
}

int64_t held_at_once(const Stage& stage, int64_t groups) {
    int64_t held = 0, most = 0;
    const int64_t last = stage.virtual_stages() - 1;
    for (const Action& action : actions_of(stage, groups)) {
        const bool embeds = stage.is_first() && action.virtual_stage == 0;
        const bool has_head = stage.is_last() && action.virtual_stage == last;
        using enum Action::What;
        if (action.what == take_inputs) held += embeds ? 0 : 1;
        if (action.what == take_gradients) held += has_head ? 0 : 1;
        if (action.what == forward && embeds) ++held;
        most = std::max(most, held);
        if (action.what == forward && !has_head) --held;
        if (action.what == backward) --held;
    }
    return most;
}

std::vector<int64_t> Stage::under_way_of_each(int64_t groups) const {
    if (is_one_f_one_b(*this)) return {std::min<int64_t>(count - index, groups)};
    std::vector<int64_t> now(at(virtual_stages())), most = now;
    for (const Visit& visit : visits_of(*this, groups)) {
        const size_t v = at(visit.virtual_stage);
        now[v] += visit.back ? -1 : 1;
        most[v] = std::max(most[v], now[v]);
    }
    return most;
}

int64_t Stage::under_way(int64_t groups) const {
    return std::ranges::max(under_way_of_each(groups));
}

std::vector<int64_t> Stage::under_way_by_layer(int64_t groups, int64_t layers) const {
    if (all()) return std::vector<int64_t>(at(layers), under_way(groups));
    std::vector<int64_t> found(at(layers));
    const std::vector<int64_t> most = under_way_of_each(groups);
    for (int64_t v = 0; v < virtual_stages(); ++v) {
        const VirtualStage of = virtual_stage(v);
        std::fill(found.begin() + of.first, found.begin() + of.end, most[at(v)]);
    }
    return found;
}

}  // namespace ferry::zero
