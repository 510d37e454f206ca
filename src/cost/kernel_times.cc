#include "cost/kernel_times.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <vector>

#include "ferry/error.h"
#include "ferry/units.h"

namespace ferry::cost {

using model::Saved;

namespace {

TimedBy timed_by(const KernelTimes::Kind& kind) {
    return row_of(static_cast<Op>(kind[0])).timed_by;
}
// The kernels of several sizes: their times grow with them.
bool scales(const KernelTimes::Kind& kind) {
    return timed_by(kind) == TimedBy::elements || timed_by(kind) == TimedBy::bytes;
}
// A block's backward, which differs by what it was given and what it is to give.
bool has_flags(const KernelTimes::Kind& kind) { return timed_by(kind) == TimedBy::flags; }

bool saves(const KernelTimes::Kind& kind, Saved what) {
    return has_flags(kind) && (kind[2] & flag_of(what)) != 0;
}

}  // namespace

bool is_timed(const swap::Task& task) {
    return task.lane == swap::Lane::compute && !is_update(task);
}

bool is_update(const swap::Task& task) {
    if (task.verb != swap::Verb::kernel) return false;
    const TimedBy by = row_of(task).timed_by;
    return by == TimedBy::update || by == TimedBy::momentum;
}

bool passes(const swap::Task& task) {
    return task.lane == swap::Lane::comm && row_of(task).stage_end != StageEnd::none;
}

double bytes_of_update(const swap::Task& task, const WorkOf& work_of) {
    return is_update(task) ? static_cast<double>(row_of(task).bytes(work_of(task))) : 0;
}

KernelTimes::Kind KernelTimes::kind_of(const swap::Task& task, const WorkOf& work_of) {
    const Work work = work_of(task);
    const auto layer = static_cast<int64_t>(work.layer->kind);
    switch (row_of(task).timed_by) {
        case TimedBy::elements:
            return {task.op, layer, work.elements};
        case TimedBy::bytes:
            return {task.op, layer, task.bytes};
        case TimedBy::flags:
            return {task.op, layer, task.flags & ~kFresh};  // hardly another time
        default:
            return {task.op, layer, 0};
    }
}

std::string KernelTimes::name_of(const Kind& kind) {
    static constexpr std::array kLayers{"embedding", "block", "head"};
    const std::string name = fmt::format("{}, {}", cost::name_of(static_cast<Op>(kind[0])),
                                         kLayers.at(static_cast<size_t>(kind[1])));
    if (timed_by(kind) == TimedBy::elements) return fmt::format("{}, {} elements", name, kind[2]);
    if (timed_by(kind) == TimedBy::bytes) return fmt::format("{}, {}", name, format_bytes(kind[2]));
    std::string flags;
    if (has_flags(kind) && (kind[2] & kNeedsDx) == 0) flags += ", of weights alone";
    if (has_flags(kind) && (kind[2] & kDefers) != 0) flags += ", weights' gradients left";
    if (saves(kind, Saved::attention)) flags += ", attention saved";
    if (saves(kind, Saved::mlp)) flags += ", MLP saved";
    if (saves(kind, Saved::projections)) flags += ", projections saved";
    return name + flags;
}

namespace {

// The same block's backward with this activation saved where that one had it not, and the reverse.
KernelTimes::Kind other_backward(KernelTimes::Kind kind, Saved what) {
    kind[2] ^= flag_of(what);
    return kind;
}

// Seconds of a backward of this kind beyond one with everything saved, as far as they are known.
double again_s(const KernelTimes& times, const KernelTimes::Kind& kind) {
    double seconds = 0;
    for (const Saved what : model::kAllSaved)
        seconds += saves(kind, what) ? 0 : times.saved_s[at(what)];
    return seconds;
}

// Measured ones with other activations saved, the difference being known; the most alike first.
std::map<KernelTimes::Kind, double>::const_iterator nearest_backward(
    const KernelTimes& times, const KernelTimes::Kind& kind) {
    auto nearest = times.seconds.end();
    int least = static_cast<int>(model::kSaved) + 1;
    for (unsigned different = 1; different < 1U << model::kSaved; ++different) {
        KernelTimes::Kind other = kind;
        bool known = std::popcount(different) < least;
        for (const Saved what : model::kAllSaved) {
            if ((different >> at(what) & 1) == 0) continue;
            other = other_backward(other, what);
            known = known && times.saved_s[at(what)] > 0;
        }
        const auto found = times.seconds.find(other);
        if (!known || found == times.seconds.end()) continue;
        nearest = found;
        least = std::popcount(different);
    }
    return nearest;
}

// The time to go by: of this kind, or of one that differs in its size alone, where the size is a
// number of bytes or elements, or in what a block saves.
std::map<KernelTimes::Kind, double>::const_iterator nearest(const KernelTimes& times,
                                                            const KernelTimes::Kind& kind) {
    const auto exact = times.seconds.find(kind);
    if (exact != times.seconds.end()) return exact;
    if (has_flags(kind)) return nearest_backward(times, kind);
    if (!scales(kind)) return exact;
    auto best = times.seconds.end();
    double least = 0;
    for (auto it = times.seconds.begin(); it != times.seconds.end(); ++it) {
        const auto& [known, seconds] = *it;
        if (known[0] != kind[0] || known[2] <= 0) continue;
        const double distance =
            std::abs(std::log(static_cast<double>(known[2]) / static_cast<double>(kind[2])));
        if (best != times.seconds.end() && distance >= least) continue;
        best = it;
        least = distance;
    }
    return best;
}

}  // namespace

double KernelTimes::of(const swap::Task& task, const WorkOf& work_of) const {
    const Kind kind = kind_of(task, work_of);
    const auto known = nearest(*this, kind);
    FERRY_CHECK(known != seconds.end(), "a kernel that was not measured");
    if (known->first == kind) return known->second;
    if (has_flags(kind))
        return std::max(0.0, known->second + again_s(*this, kind) - again_s(*this, known->first));
    return known->second * static_cast<double>(kind[2]) / static_cast<double>(known->first[2]);
}

bool KernelTimes::covers(const swap::Schedule& step, const WorkOf& work_of) const {
    return std::all_of(step.tasks.begin(), step.tasks.end(), [&](const swap::Task& task) {
        return !is_timed(task) || nearest(*this, kind_of(task, work_of)) != seconds.end();
    });
}

double KernelTimes::sum(const swap::Schedule& step, const WorkOf& work_of) const {
    double total = 0;
    for (const swap::Task& task : step.tasks) total += is_timed(task) ? of(task, work_of) : 0;
    return total;
}

double KernelTimes::saved_by(Saved what, const swap::Task& backward, const WorkOf& work_of) const {
    const Kind kind = kind_of(backward, work_of);
    const auto one = seconds.find(kind), other = seconds.find(other_backward(kind, what));
    if (one == seconds.end() || other == seconds.end()) return saved_s[at(what)];
    return std::max(0.0, (saves(kind, what) ? -1 : 1) * (one->second - other->second));
}

double KernelTimes::longest(Op op, model::LayerKind layer) const {
    double found = 0;
    for (const auto& [kind, taken] : seconds) {
        if (kind[0] != static_cast<int64_t>(op) || kind[1] != static_cast<int64_t>(layer)) continue;
        double all = taken;
        for (const Saved what : model::kAllSaved) all += saves(kind, what) ? saved_s[at(what)] : 0;
        found = std::max(found, all);
    }
    return found;
}

namespace {

// Bytes that take time beside the products. An operation with products reads its operands while it
// multiplies; a micro-batch's residual stream, read and written, stands for the rest.
double bytes_beside(const OperationRow& row, const Work& work) {
    return static_cast<double>(row.flops ? 2 * work.input_bytes : row.bytes(work));
}

}  // namespace

KernelTimes assumed_times(const swap::Schedule& step, const WorkOf& work_of, int64_t tokens,
                          const model::OfSaved<double>& saved_flops, const Rates& rates) {
    KernelTimes found;
    for (const Saved what : model::kAllSaved)
        found.saved_s[at(what)] = saved_flops[at(what)] / rates.flops_per_s;
    for (const swap::Task& task : step.tasks) {
        if (!is_timed(task)) continue;
        const OperationRow& row = row_of(task);
        Work work = work_of(task);
        work.tokens = tokens;
        work.saved_flops = saved_flops;
        const double flops = row.flops ? row.flops(work) : 0;
        found.seconds[KernelTimes::kind_of(task, work_of)] =
            flops / rates.flops_per_s + bytes_beside(row, work) / rates.bytes_per_s;
    }
    return found;
}

}  // namespace ferry::cost
