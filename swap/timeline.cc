// The simulated replay of schedules: the same waits as the store's, seconds instead of work. Of
// several ranks some tasks wait for each other, too.
#include <algorithm>
#include <bit>
#include <limits>
#include <numeric>
#include <utility>

#include "ferry/error.h"
#include "scoreboard.h"

namespace ferry::swap {
namespace {

constexpr int64_t kSteps = 5;  // the last one is the answer: what the first left has finished

// How often each rank has come to each point.
class Arrivals {
public:
    explicit Arrivals(std::span<const std::vector<size_t>> points)
        : points_(points), counts_(points.size()) {
        for (size_t p = 0; p < points.size(); ++p) counts_[p].resize(points[p].size());
    }
    // The number of this one.
    int64_t arrive(int point, size_t rank) { return ++count(point, rank); }
    const std::vector<size_t>& members(int point) const {
        return points_[static_cast<size_t>(point)];
    }
    // Whether all that meet there have come as often.
    bool met(int point, int64_t turn) const {
        return std::ranges::all_of(counts_[static_cast<size_t>(point)],
                                   [turn](int64_t count) { return count >= turn; });
    }

private:
    int64_t& count(int point, size_t rank) {
        const std::vector<size_t>& members = points_[static_cast<size_t>(point)];
        const auto member = std::ranges::find(members, rank);
        FERRY_CHECK(member != members.end(), "a rank at a point of others");
        return counts_[static_cast<size_t>(point)][static_cast<size_t>(member - members.begin())];
    }

    std::span<const std::vector<size_t>> points_;
    std::vector<std::vector<int64_t>> counts_;
};

struct Running {
    double begin_s = 0, left_s = 0;  // left: as if alone
    double rate = 1;                 // seconds of it in a second, as due_s() found
    Cost cost{};
    int64_t step = 0;
    size_t task = 0;
    int point = kAlone;
    int64_t turn = 0;  // of this rank at that point
    bool begun = true, ended = false;
};

// One rank's steps.
class Replay {
public:
    Replay(const RankSteps& of, size_t rank, size_t ranks, const Meets& meets, Arrivals& arrivals)
        : first_(*of.first),
          steady_(*of.steady),
          cost_(of.cost),
          rank_(rank),
          // Exchanges with several groups of ranks are under way at once.
          exchanges_most_(ranks > 1 ? 64 : 1),
          meets_(meets),
          arrivals_(arrivals),
          board_(of.resources) {
        result_.tasks.resize(steady_.tasks.size());
        append();
    }

    // Starts what can be. A task that waited waits on until another one of this rank is complete.
    void start_ready() {
        if (std::exchange(has_completed_, false)) {
            for (size_t lane = 0; lane < kLanes; ++lane) {
                const size_t most = static_cast<Lane>(lane) == Lane::comm ? exchanges_most_ : 1;
                while (running_[lane].size() < most && start(lane)) {
                }
            }
        }
        if (std::exchange(exchanges_changed_, false)) begin_met();
    }
    // Others came to a point of this rank.
    void others_arrived() { exchanges_changed_ = true; }

    // When the next task is complete; infinite: nothing runs.
    double due_s() {
        const Wanted wanted = wanted_by_all();
        next_s_ = std::numeric_limits<double>::infinity();
        for (auto& lane : running_) {
            for (Running& task : lane) {
                if (!runs(task)) continue;
                task.rate = rate(task, wanted);
                next_s_ = std::min(next_s_, task.left_s / task.rate);
            }
        }
        return now_s_ + next_s_;
    }
    // To when a task is complete, or to when others came to a point, which is no later.
    void advance_to_due() { advance(next_s_); }
    void advance_to(double at_s) {
        if (at_s > now_s_) advance(std::min(at_s - now_s_, next_s_));
    }
    // The points that this rank came to since it was asked last.
    std::vector<int> take_arrivals() { return std::exchange(arrived_, {}); }
    Timeline result() {
        FERRY_CHECK(board_.all_complete(), "a schedule that cannot end");
        return std::move(result_);
    }

private:
    using Wanted = std::array<double, kShared>;

    const Schedule& schedule() const { return step_ == 1 ? first_ : steady_; }
    static bool runs(const Running& task) { return task.begun && !task.ended; }

    // At the rates that due_s() found.
    void advance(double step_s) {
        now_s_ += step_s;
        next_s_ -= step_s;
        for (size_t lane = 0; lane < kLanes; ++lane) {
            bool any = false;
            for (Running& task : running_[lane]) {
                if (!runs(task)) continue;
                task.ended = task.left_s / task.rate <= step_s * (1 + 1e-12);
                task.left_s -= step_s * task.rate;
                if (task.ended) note(lane, task);
                any = any || task.ended;
            }
            if (any) complete(lane);
        }
        if (has_completed_) append_next();
    }
    void append_next() {
        if (step_ < kSteps && board_.reached(board_.newest(), schedule().outcome)) append();
    }
    void append() {
        result_.step_seconds = now_s_ - outcome_s_;
        outcome_s_ = now_s_;
        ++step_;
        board_.append(schedule(), step_);
    }

    bool start(size_t lane) {
        const Active* active = nullptr;
        const Task* task = board_.next(static_cast<Lane>(lane), &active);
        if (!task || !board_.ready(*task, *active)) return false;
        const Cost cost = cost_(*task);
        Running next{.begin_s = now_s_,
                     .left_s = cost.seconds,
                     .cost = cost,
                     .step = active->sequence,
                     .task = static_cast<size_t>(task - active->schedule->tasks.data())};
        if (exchanges_most_ > 1 && static_cast<Lane>(lane) == Lane::comm) {
            next.begun = false;
            next.point = meets_(rank_, *task);
            if (next.point != kAlone) {
                next.turn = arrivals_.arrive(next.point, rank_);
                arrived_.push_back(next.point);
            }
        }
        board_.take(static_cast<Lane>(lane));
        running_[lane].push_back(next);
        exchanges_changed_ = exchanges_changed_ || static_cast<Lane>(lane) == Lane::comm;
        return true;
    }

    // Exchanges at one point go in their order.
    void begin_met() {
        std::vector<Running>& exchanges = running_[static_cast<size_t>(Lane::comm)];
        held_.clear();
        for (Running& task : exchanges) {
            if (task.ended) continue;
            const bool is_held = std::ranges::find(held_, task.point) != held_.end();
            if (!is_held) held_.push_back(task.point);
            if (is_held || task.begun) continue;
            if (task.point != kAlone && !arrivals_.met(task.point, task.turn)) continue;
            task.begun = true;
            task.begin_s = now_s_;
        }
    }

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
    template <class Body>
    void for_running(const Body& body) const {
        for (const auto& lane : running_) {
            for (const Running& task : lane)
                if (runs(task)) body(task);
        }
    }
    Wanted wanted_by_all() const {
        double disk = 0;
        for_running([&](const Running& task) { disk += part_of(task, Shared::disk); });
        Wanted wanted{};
        for_running([&](const Running& task) {
            for (size_t r = 0; r < kShared; ++r)
                wanted[r] += task.cost.part[r] * on_disk(task, disk);
        });
        wanted[static_cast<size_t>(Shared::disk)] = disk;
        return wanted;
    }

    void note(size_t lane, const Running& task) {
        if (task.step != kSteps) return;
        result_.tasks[task.task] = {task.begin_s - outcome_s_, now_s_ - outcome_s_};
        result_.busy_seconds[lane] += now_s_ - task.begin_s;
    }

    // In the lane's order, whichever ended first. Where one did, the next at its point may begin.
    void complete(size_t lane) {
        std::vector<Running>& tasks = running_[lane];
        const auto end = std::ranges::find(tasks, false, &Running::ended);
        const auto id = static_cast<Lane>(lane);
        if (end != tasks.begin()) board_.complete(id, board_.completed(id) + (end - tasks.begin()));
        tasks.erase(tasks.begin(), end);
        has_completed_ = true;
        exchanges_changed_ = exchanges_changed_ || id == Lane::comm;
    }

    const Schedule& first_;
    const Schedule& steady_;
    const CostModel& cost_;
    const size_t rank_, exchanges_most_;
    const Meets& meets_;
    Arrivals& arrivals_;
    Scoreboard board_;
    std::array<std::vector<Running>, kLanes> running_{};  // in their order
    std::vector<int> arrived_{}, held_{};  // points: come to, and those where an exchange is left
    bool has_completed_ = true, exchanges_changed_ = true;  // since start_ready()
    double now_s_ = 0, outcome_s_ = 0, next_s_ = 0;
    int64_t step_ = 0;
    Timeline result_;
};

// When something happens next at each rank. A tree of the earliest: of ten thousands of events none
// looks at all ranks.
class Dues {
public:
    explicit Dues(size_t ranks)
        : leaves_(std::bit_ceil(ranks)),
          earliest_s_(2 * leaves_, std::numeric_limits<double>::infinity()) {}
    void set(size_t rank, double at_s) {
        size_t node = leaves_ + rank;
        earliest_s_[node] = at_s;
        while ((node /= 2) > 0)
            earliest_s_[node] = std::min(earliest_s_[2 * node], earliest_s_[2 * node + 1]);
    }
    double earliest_s() const { return earliest_s_[1]; }
    // Appends the ranks that are due by then, in their order.
    void add_due(double by_s, std::vector<size_t>& ranks, size_t node = 1) const {
        if (earliest_s_[node] > by_s) return;
        if (node >= leaves_) return ranks.push_back(node - leaves_);
        add_due(by_s, ranks, 2 * node);
        add_due(by_s, ranks, 2 * node + 1);
    }

private:
    const size_t leaves_;
    std::vector<double> earliest_s_;  // node 1 is the root; a node has those of 2n and 2n + 1
};

}  // namespace

std::vector<Timeline> predict_together(std::span<const RankSteps> ranks,
                                       std::span<const std::vector<size_t>> points,
                                       const Meets& meets) {
    Arrivals arrivals(points);
    std::vector<Replay> replays;
    replays.reserve(ranks.size());
    for (size_t rank = 0; rank < ranks.size(); ++rank) {
        FERRY_CHECK(ranks[rank].first->has_outcome && ranks[rank].steady->has_outcome,
                    "a step has an outcome");
        replays.emplace_back(ranks[rank], rank, ranks.size(), meets, arrivals);
    }
    // Each rank has its own time, and nothing but an arrival lets another rank begin something: so
    // only those are advanced for which something happens.
    Dues dues(replays.size());
    std::vector<size_t> awake(replays.size());
    std::iota(awake.begin(), awake.end(), size_t{0});
    for (double now_s = 0;;) {
        while (!awake.empty()) {
            const size_t rank = awake.back();
            awake.pop_back();
            Replay& replay = replays[rank];
            replay.advance_to(now_s);
            replay.start_ready();
            dues.set(rank, replay.due_s());
            for (const int point : replay.take_arrivals())
                for (const size_t other : arrivals.members(point)) {
                    if (other == rank) continue;
                    replays[other].others_arrived();
                    awake.push_back(other);
                }
        }
        now_s = dues.earliest_s();
        if (now_s == std::numeric_limits<double>::infinity()) break;
        dues.add_due(now_s, awake);
        for (const size_t rank : awake) replays[rank].advance_to_due();
    }
    std::vector<Timeline> found;
    found.reserve(replays.size());
    for (Replay& replay : replays) found.push_back(replay.result());
    return found;
}

Timeline predict(const Schedule& first, const Schedule& steady, uint32_t resources,
                 const CostModel& cost) {
    const RankSteps alone{&first, &steady, resources, cost};
    return predict_together({&alone, 1}, {}, {}).front();
}

}  // namespace ferry::swap
