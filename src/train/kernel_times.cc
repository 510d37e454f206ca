#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "measure.h"
#include "predict.h"

namespace ferry::train {

using planner::Op;

bool is_timed(const swap::Task& task) {
    return task.lane == swap::Lane::compute && !is_update(task);
}

namespace {

// The kernels of several sizes, in elements and in bytes.
bool is_of_chunk(Op op) { return op == Op::round || op == Op::cut || op == Op::sum; }
bool is_of_bytes(Op op) { return op == Op::zero || op == Op::add; }

}  // namespace

KernelTimes::Kind kind_of(const swap::Task& task, const planner::Plan& plan) {
    const auto layer = static_cast<int64_t>(plan.layers[static_cast<size_t>(task.layer)].kind);
    const auto op = static_cast<Op>(task.op);
    if (is_of_chunk(op)) return {task.op, layer, plan.chunks[static_cast<size_t>(task.item)].count};
    if (is_of_bytes(op)) return {task.op, layer, task.bytes};
    return {task.op, layer, task.flags};
}

std::string KernelTimes::name_of(const Kind& kind) {
    static constexpr std::array kLayers{"embedding", "block", "head"};
    const auto op = static_cast<Op>(kind[0]);
    const std::string name =
        fmt::format("{}, {}", planner::name_of(op), kLayers.at(static_cast<size_t>(kind[1])));
    if (is_of_chunk(op)) return fmt::format("{}, {} elements", name, kind[2]);
    if (is_of_bytes(op)) return fmt::format("{}, {}", name, format_bytes(kind[2]));
    std::string flags;
    if (op == Op::backward && (kind[2] & planner::kNeedsDx) == 0) flags += ", of weights alone";
    if ((kind[2] & planner::kAttentionKept) != 0) flags += ", attention kept";
    return name + flags;
}

namespace {

bool is_backward(const KernelTimes::Kind& kind) {
    return kind[0] == static_cast<int64_t>(Op::backward);
}

// The same block's backward with its attention kept where it was not, and the reverse.
KernelTimes::Kind other_backward(KernelTimes::Kind kind) {
    kind[2] ^= planner::kAttentionKept;
    return kind;
}

// The time to go by: of this kind, or of one that differs in its size alone, where the size is a
// number of bytes or elements, or in whether attention is kept.
std::map<KernelTimes::Kind, double>::const_iterator nearest(const KernelTimes& times,
                                                            const KernelTimes::Kind& kind) {
    const auto exact = times.seconds.find(kind);
    const auto op = static_cast<Op>(kind[0]);
    const bool scales = is_of_chunk(op) || is_of_bytes(op);
    if (exact != times.seconds.end()) return exact;
    if (is_backward(kind) && times.attention_s > 0) return times.seconds.find(other_backward(kind));
    if (!scales) return exact;
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

double KernelTimes::of(const swap::Task& task, const planner::Plan& plan) const {
    const Kind kind = kind_of(task, plan);
    const auto known = nearest(*this, kind);
    FERRY_CHECK(known != seconds.end(), "a kernel that was not measured");
    if (known->first == kind) return known->second;
    if (is_backward(kind)) {
        const bool kept = (kind[2] & planner::kAttentionKept) != 0;
        return std::max(0.0, known->second + (kept ? -attention_s : attention_s));
    }
    return known->second * static_cast<double>(kind[2]) / static_cast<double>(known->first[2]);
}

bool KernelTimes::covers(const swap::Schedule& step, const planner::Plan& plan) const {
    return std::all_of(step.tasks.begin(), step.tasks.end(), [&](const swap::Task& task) {
        return !is_timed(task) || nearest(*this, kind_of(task, plan)) != seconds.end();
    });
}

double KernelTimes::sum(const swap::Schedule& step, const planner::Plan& plan) const {
    double total = 0;
    for (const swap::Task& task : step.tasks) total += is_timed(task) ? of(task, plan) : 0;
    return total;
}

double KernelTimes::attention_of(const swap::Task& backward, const planner::Plan& plan) const {
    const Kind kind = kind_of(backward, plan);
    const auto one = seconds.find(kind), other = seconds.find(other_backward(kind));
    if (one == seconds.end() || other == seconds.end()) return attention_s;
    const bool kept = (kind[2] & planner::kAttentionKept) != 0;
    return std::max(0.0, (kept ? -1 : 1) * (one->second - other->second));
}

}  // namespace ferry::train
