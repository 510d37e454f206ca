// How fast the optimizer's update goes over memory: the host's, by the team, or the device's own.
#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <latch>
#include <system_error>
#include <thread>
#include <vector>

#include "base/log.h"
#include "base/median.h"
#include "base/process_limits.h"
#include "ferry/pinned_mem.h"
#include "ferry/units.h"
#include "measure.h"
#include "train/kernels/state_span.h"
#include "train/stack/memory_left.h"
#include "train/stack/seconds_of.h"
#include "train/stack/tier_stack.h"

namespace ferry::train {
namespace {

// Room in memory for an element's state, gradient and weight.
int64_t bytes_of_element(const planner::Plan& plan) {
    return ceil_div(plan.state.bytes(optim::kLeaf), optim::kLeaf) + size_of(plan.wire) +
           size_of(plan.compute);
}

constexpr int64_t kTogether = 64;  // elements: every array begins at a cache line

// Parts of a memory, evenly over all of it: where hundreds of gigabytes are not alike, a few of
// them in one place say nothing of the others.
class Stripes {
public:
    // Of a chunk's size each, `bytes` in all; smaller than a chunk where there is no room for two.
    Stripes(std::span<std::byte> memory, int64_t bytes, const planner::Plan& plan)
        : memory_(memory),
          elements_(std::min(plan.chunk_elements,
                             round_down(bytes / (2 * bytes_of_element(plan)), kTogether))),
          bytes_(elements_ * bytes_of_element(plan)),
          count_(bytes_ > 0 ? bytes / bytes_ : 0),
          stride_(count_ > 0 ? round_down(std::ssize(memory) / count_, 64) : 0) {}
    int64_t elements() const { return elements_; }  // of each
    int64_t count() const { return count_; }
    int64_t bytes() const { return count_ * bytes_; }  // of all
    std::span<std::byte> at(int64_t i) const {
        return memory_.subspan(static_cast<size_t>(i * stride_), static_cast<size_t>(bytes_));
    }

private:
    const std::span<std::byte> memory_;
    const int64_t elements_, bytes_, count_, stride_;
};

// Seconds of body(0) on this thread and body(1) on another, from when the first of them begins. A
// small plan's updates take less than it takes to start a thread.
template <class Body>
double seconds_of_two(const Body& body) {
    using Clock = std::chrono::steady_clock;
    std::array<Clock::time_point, 2> begin, end;
    std::latch both_run(2);
    const auto part = [&](int64_t thread) {
        const auto i = static_cast<size_t>(thread);
        both_run.arrive_and_wait();
        begin[i] = Clock::now();
        body(thread);
        end[i] = Clock::now();
    };
    try {
        std::jthread other([&] { part(1); });
        part(0);
    } catch (const std::system_error& error) {
        refuse_thread("the second thread of updates that are timed", error.what());
    }
    return std::chrono::duration<double>(std::max(end[0], end[1]) - std::min(begin[0], begin[1]))
        .count();
}

// Chunks of state with their gradients and weights.
class ColdUpdates {
public:
    ColdUpdates(NodeTeams& teams, const optim::Scalars& scalars, const planner::Plan& plan,
                const Stripes& stripes)
        : teams_(teams), scalars_(scalars), plan_(plan), stripes_(stripes) {}

    // Seconds of an update of so many elements, by a pass over all of the memory. As in a run two
    // threads take turns, so that the cores do not wait between two updates.
    double seconds(int64_t elements, bool in_place, const Together& together) {
        const int64_t all = stripes_.count() * (stripes_.elements() / elements);
        const int64_t threads = updates_take_turns(teams_) && all >= 4 ? 2 : 1;
        const int64_t chunks = round_down(all, threads);
        const auto turn = [&](int64_t first) {
            for (int64_t i = first; i < chunks; i += threads)
                update(elements, i, in_place ? i : (i + threads) % chunks);
        };
        const auto pass = [&] {
            return threads > 1 ? seconds_of_two(turn) : seconds_of([&] { turn(0); });
        };
        pass();
        const std::vector<double> passes{pass(), pass(), pass()};
        const double taken = together.size() > 1 ? median(passes) : std::ranges::min(passes);
        return taken / static_cast<double>(chunks);
    }

    // One more update of so many elements, of all in turn.
    void one(int64_t elements) {
        const int64_t all = stripes_.count() * (stripes_.elements() / elements);
        next_ = (next_ + 1) % all;
        update(elements, next_, next_);
    }

private:
    std::byte* place_of(int64_t elements, int64_t i) const {
        const int64_t of_a_stripe = stripes_.elements() / elements;
        return stripes_.at(i / of_a_stripe).data() +
               i % of_a_stripe * elements * bytes_of_element(plan_);
    }

    void update(int64_t elements, int64_t from, int64_t to) {
        std::byte* in = place_of(elements, from);
        std::byte* out = place_of(elements, to);
        optim::Span span = state_span(plan_.state, elements, in, out);
        const int64_t state = round_up(plan_.state.bytes(elements), 64);  // a cache line
        span.gradient = in + state;
        span.gradient_type = plan_.wire;
        const auto weight_at = state + elements * size_of(plan_.wire);
        span.weight = out + weight_at;
        span.weight_type = plan_.compute;
        if (plan_.state.split) span.weight_in = reinterpret_cast<uint16_t*>(in + weight_at);
        optim::update(teams_, span, scalars_);
    }

    NodeTeams& teams_;
    const optim::Scalars& scalars_;
    const planner::Plan& plan_;
    const Stripes& stripes_;
    int64_t next_ = 0;
};

// At the least two chunks.
int64_t bytes_of_updates(const planner::Plan& plan, int64_t working_bytes,
                         const Topology& machine) {
    return bytes_to_time(working_bytes, 2 * plan.chunk_elements * bytes_of_element(plan), machine);
}

// A few per cent that weights take elsewhere are no matter. The slowest of several ranks counts, so
// that one alone with little makes nothing faster.
void warn_of_little(int64_t bytes, int64_t wanted) {
    if (bytes >= wanted - wanted / 4) return;
    log_warn_of_run(
        "updates are timed in " + format_bytes(bytes) + ", not in " + format_bytes(wanted) +
        ", for want of memory: the caches may make them, and so the bound, faster than a "
        "step's are");
}

void clear(std::span<std::byte> memory, Team& team) {
    constexpr int64_t kPart = 2 * kMiB;
    team.parallel(ceil_div(std::ssize(memory), kPart), [&](int64_t part) {
        const int64_t at = part * kPart;
        std::memset(memory.data() + at, 0,
                    static_cast<size_t>(std::min(kPart, std::ssize(memory) - at)));
    });
}

}  // namespace

int64_t bytes_to_time(int64_t working_bytes, int64_t least_bytes, const Topology& machine) {
    // So many times the last-level cache. With 300 MB of it the rate fell from 186 GB/s in 0.3 GB
    // and 154 in 1.5 to 139 in 3, and in 12 GB it was 144 (bench/results/dram_footprint.json).
    constexpr int64_t kCaches = 10;
    return std::max(std::min(working_bytes, kCaches * machine.l3_bytes), least_bytes);
}

int64_t footprint_of_updates(const planner::Plan& plan) {
    int64_t elements = 0;
    for (const planner::Chunk& chunk : plan.chunks) elements += chunk.trainable ? chunk.count : 0;
    return elements * bytes_of_element(plan);
}

UpdateRates time_updates(NodeTeams& teams, const Topology& machine, const optim::Scalars& scalars,
                         const planner::Plan& plan, int64_t working_bytes,
                         std::span<std::byte> buffers, Together& together) {
    const int64_t wanted = bytes_of_updates(plan, working_bytes, machine);
    const int64_t own = std::min(wanted, machine.memory_left_bytes);
    pinned_mem::Pool pool(machine, own);
    const std::span<std::byte> memory =
        own > std::ssize(buffers) ? pool.reserve("updates", own, teams) : buffers;
    const int64_t bytes = std::min(wanted, std::ssize(memory));
    const Stripes stripes(memory, bytes, plan);  // whole chunks of it
    warn_of_little(bytes, wanted);
    const int64_t large = stripes.elements();
    const int64_t small = std::max(optim::kLeaf, round_down(large / 8, optim::kLeaf));
    ColdUpdates updates(teams, scalars, plan, stripes);
    double whole_s = 0, part_s = 0, elsewhere_s = 0;
    together.run(
        [&] {
            whole_s = updates.seconds(large, true, together);
            part_s = large > small ? updates.seconds(small, true, together) : whole_s;
            elsewhere_s = updates.seconds(large, false, together);
        },
        [&] { updates.one(large); });
    // A line through both: seconds = overhead + elements * slope.
    const double slope = large > small ? (whole_s - part_s) / static_cast<double>(large - small)
                                       : whole_s / static_cast<double>(large);
    const double overhead_s =
        std::clamp(whole_s - slope * static_cast<double>(large), 0.0, whole_s / 2);
    return {.bytes_per_s =
                static_cast<double>(update_bytes_as_asked(plan, large)) / (whole_s - overhead_s),
            .overhead_s = overhead_s,
            .out_of_place = std::max(1.0, elsewhere_s / whole_s),
            .memory_bytes = stripes.bytes()};
}

UpdateRates time_updates_before_fill(TierStack& stack, const BudgetConfig& budgets,
                                     const optim::Scalars& scalars, Together& together) {
    FERRY_CHECK(!stack.is_open(), "updates are timed in memory that has contents");
    const planner::Plan& plan = stack.plan();
    NodeTeams& teams = stack.teams();
    const int64_t working = footprint_of_updates(plan);
    const int64_t wanted = bytes_of_updates(plan, working, stack.machine());
    const std::span<std::byte> arena = stack.arena();
    const Stripes stripes(arena, std::min(wanted, std::ssize(arena)), plan);
    const auto clear_stripes = [&] {
        for (int64_t i = 0; i < stripes.count(); ++i) clear(stripes.at(i), teams.all());
    };
    for (int64_t i = 0; i < stripes.count(); ++i) stack.pool().touch(stripes.at(i), teams);
    clear_stripes();  // a program's own memory holds whatever it held
    const int64_t left = left_of_budget(budgets, stack.pool().reserved_bytes());
    const UpdateRates found = time_updates(teams, as_left_now(stack.machine(), left), scalars, plan,
                                           working, arena, together);
    clear_stripes();
    return found;
}

void set_updates(const UpdateRates& rates, cost::Measurements& measured) {
    measured.dram_bytes_per_s = rates.bytes_per_s;
    measured.update_overhead_s = rates.overhead_s;
    measured.out_of_place = rates.out_of_place;
}

double time_device_updates(const Bench& on, const optim::Scalars& scalars) {
    const auto largest = std::ranges::max_element(on.plan.buffers, {}, [&](const auto& b) {
        const bool lists = &b == &on.plan.buffers[static_cast<size_t>(planner::Class::lists)];
        return b.tier == swap::Tier::device && !lists ? b.bytes * b.count : 0;
    });
    const StateFormat& kept = on.plan.state;
    const int64_t weight = size_of(on.plan.compute);
    const int64_t count =
        round_down(largest->bytes * largest->count / bytes_of_element(on.plan), kMomentBlock);
    std::byte* state = on.device.memory().data() + largest->offset;
    struct Update {
        optim::Span span;
        const optim::Scalars& scalars;
        Stream& stream;
    } update{state_span(on.plan.state, count, state, state), scalars,
             on.device.stream(StreamKind::compute)};
    optim::Span& span = update.span;
    span.weight = state + kept.bytes(count);
    span.weight_type = on.plan.compute;
    if (kept.split) span.weight_in = static_cast<const uint16_t*>(span.weight);
    span.gradient = state + kept.bytes(count) + count * weight;
    span.gradient_type = on.plan.wire;
    const Job job{[](void* context, uint64_t) {
                      const Update& u = *static_cast<const Update*>(context);
                      optim::cuda::update(u.span, u.scalars, u.stream.native());
                  },
                  &update};
    const auto time = [&] {
        return seconds_on(update.stream, on.executor, 20,
                          [&](int64_t) { update.stream.launch(job); });
    };
    time();
    return static_cast<double>(update_bytes_as_asked(on.plan, count)) /
           std::min({time(), time(), time()});
}

}  // namespace ferry::train
