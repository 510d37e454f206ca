// How fast the team codes momentum: turns in memory of their own, as a step goes through them.
#include <algorithm>
#include <array>
#include <deque>
#include <vector>

#include "base/log.h"
#include "base/median.h"
#include "measure.h"
#include "planner/work.h"
#include "train/kernels/step_state.h"
#include "train/stack/seconds_of.h"
#include "train/step/step.h"

namespace ferry::train {
namespace {

using cost::Op;

// The largest chunk that this rank's turns have; null: there is none.
const planner::Chunk* largest_turn(const planner::Plan& plan) {
    const planner::Chunk* largest = nullptr;
    for (const planner::Chunk& chunk : plan.chunks) {
        if (!chunk.trainable || !plan.owns(chunk)) continue;
        if (!largest || chunk.count > largest->count) largest = &chunk;
    }
    return largest;
}

// Small numbers of both signs, none of them zero.
void fill(std::span<float> numbers) {
    uint32_t state = 1;
    for (float& number : numbers) {
        state = state * 1664525U + 1013904223U;
        number = (static_cast<float>(state >> 8) + 1) * 0x1p-30F * ((state & 1) != 0 ? -1 : 1);
    }
}

class Turn {
public:
    Turn(const Bench& on, const planner::Chunk& chunk)
        : on_(on),
          chunk_(chunk),
          feedback_(floats(feedback_bytes(on.plan, chunk))),
          kept_(static_cast<size_t>(kept_bytes(on.plan, chunk))),
          parts_(static_cast<size_t>(on.plan.partition.ranks * signs())),
          merged_(parts_.size()) {
        fill(feedback_);
        // Zeros, which are numbers of every type.
    }

    static int64_t bytes(const planner::Plan& plan, const planner::Chunk& chunk) {
        return feedback_bytes(plan, chunk) + 2 * kept_bytes(plan, chunk);
    }

    // Bytes, as the operations' rows count them, and the seconds of each once.
    struct Taken {
        double bytes = 0, seconds = 0;
        Taken& operator+=(const Taken& more) {
            bytes += more.bytes;
            seconds += more.seconds;
            return *this;
        }
    };
    Taken once() {
        auto* feedback = reinterpret_cast<std::byte*>(feedback_.data());
        Taken taken;
        run(Op::compress, {kept_.data(), feedback, parts_.data()}, taken);
        run(Op::merge, {parts_.data(), feedback, merged_.data()}, taken);
        // What the others merged is as this rank's.
        for (int64_t rank = 0; rank < on_.plan.partition.ranks; ++rank)
            if (rank != on_.plan.partition.rank)
                std::copy_n(merged_.begin() + on_.plan.partition.rank * signs(), signs(),
                            merged_.begin() + rank * signs());
        run(Op::average, {merged_.data(), feedback}, taken);
        return taken;
    }

private:
    static int64_t feedback_bytes(const planner::Plan& plan, const planner::Chunk& chunk) {
        return zero::feedback_bytes(chunk.count, plan.partition.ranks,
                                    plan.partition.codecs.local_steps);
    }
    static int64_t kept_bytes(const planner::Plan& plan, const planner::Chunk& chunk) {
        return plan.partition.ranks * chunk.count * size_of(plan.wire);
    }
    static std::vector<float> floats(int64_t bytes) {
        return std::vector<float>(static_cast<size_t>(bytes / 4));
    }
    int64_t signs() const { return on_.plan.partition.codecs.momentum.bytes(chunk_.count); }

    void run(Op op, const std::array<std::byte*, swap::kPlaces>& at, Taken& taken) {
        const swap::Task task{.verb = swap::Verb::kernel,
                              .lane = swap::Lane::team,
                              .op = static_cast<uint8_t>(op),
                              .layer = static_cast<int32_t>(chunk_.layer),
                              .item = static_cast<int32_t>(&chunk_ - on_.plan.chunks.data())};
        taken.bytes +=
            static_cast<double>(cost::row_of(op).bytes(planner::work_of(on_.plan, task)));
        taken.seconds += seconds_of([&] {
            on_.kernels.run(
                {.task = &task, .sequence = StepStates::kMeasured, .at = at, .store = &on_.store});
        });
    }

    const Bench& on_;
    const planner::Chunk& chunk_;
    std::vector<float> feedback_;
    std::vector<std::byte> kept_, parts_, merged_;
};

// Of all turns that a step has.
int64_t bytes_of_turns(const planner::Plan& plan) {
    int64_t bytes = 0;
    for (const planner::Chunk& chunk : plan.chunks)
        bytes += chunk.trainable && plan.owns(chunk) ? Turn::bytes(plan, chunk) : 0;
    return bytes;
}

}  // namespace

double time_momentum(const Bench& on, const Topology& machine, Together& together) {
    const planner::Chunk* chunk = on.plan.has_feedback() ? largest_turn(on.plan) : nullptr;
    if (chunk == nullptr) return 0;
    const int64_t each = Turn::bytes(on.plan, *chunk), left = machine.memory_left_bytes;
    // A step goes over all of them before it comes back to one, so that none waits in the caches
    // that the others do not fit into.
    const int64_t wanted = bytes_to_time(bytes_of_turns(on.plan), each, machine);
    std::deque<Turn> turns;
    for (int64_t bytes = each; bytes <= std::min(wanted, left); bytes += each)
        turns.emplace_back(on, *chunk);
    if (together.least(static_cast<double>(turns.size())) == 0) {
        log_warn_of_run(
            "how fast momentum is coded is not timed, for want of memory: it is taken to be "
            "as fast as updates");
        return 0;
    }
    const auto round = [&] {
        Turn::Taken all;
        for (Turn& turn : turns) all += turn.once();
        return all.bytes / all.seconds;
    };
    double rate = 0;
    together.run(
        [&] {
            round();
            const std::vector<double> rates{round(), round(), round()};
            rate = together.size() > 1 ? median(rates) : std::ranges::max(rates);
        },
        [&, next = size_t{0}]() mutable { turns[next++ % turns.size()].once(); });
    return together.least(rate);
}

swap::Schedule kernels_of_momentum(const planner::Plan& plan) {
    if (!plan.has_feedback()) return {};
    swap::Schedule step = record_step(plan, Previous::not_speculative, false, Exchanged::momentum);
    std::erase_if(step.tasks, [](const swap::Task& task) {
        return task.verb != swap::Verb::kernel || static_cast<Op>(task.op) != Op::keep;
    });
    return step;
}

}  // namespace ferry::train
