#include "warm_up.h"

#include <algorithm>
#include <vector>

#include "planner/recording/recorder.h"
#include "planner/work.h"
#include "seconds_of.h"
#include "train/kernels/step_state.h"

namespace ferry::train {
namespace {

// One document in each sequence, as a buffer has them behind its tokens.
std::vector<int32_t> whole_documents(const model::Numerics& numerics) {
    const int64_t tokens = numerics.whole_tokens();
    std::vector<int32_t> documents(
        static_cast<size_t>(numerics.token_numbers() - 2 * numerics.tokens()));
    std::fill_n(documents.begin() + tokens, tokens,
                static_cast<int32_t>(numerics.whole_sequence()));
    std::fill(documents.begin() + 2 * tokens, documents.end(),
              static_cast<int32_t>(-numerics.part * numerics.sequence));
    return documents;
}

}  // namespace

// An operand of the compute lane is a buffer of the device, or an object that lies there for good:
// a gradient that waits for its update, and once a run is drained none does.
swap::Call call_of(const swap::Task& task, const Bench& on) {
    swap::Call call{.task = &task, .sequence = StepStates::kMeasured, .at = {}, .store = &on.store};
    std::byte* memory = on.device.memory().data();
    for (size_t i = 0; i < swap::kPlaces; ++i) {
        const swap::OperandPlace& place = task.places[i];
        if (place.kind == swap::OperandPlace::Kind::device) call.at[i] = memory + place.offset;
        if (place.kind == swap::OperandPlace::Kind::current)
            call.at[i] = memory + on.plan.objects[place.object].offset;
    }
    return call;
}

std::map<cost::KernelTimes::Kind, KernelCall> distinct_kernels(const swap::Schedule& step,
                                                               const Bench& on) {
    const cost::WorkOf work_of = planner::work_of(on.plan);
    std::map<cost::KernelTimes::Kind, KernelCall> distinct;
    for (const swap::Task& task : step.tasks) {
        if (!cost::is_timed(task)) continue;
        const swap::Call call = call_of(task, on);
        distinct.try_emplace(cost::KernelTimes::kind_of(task, work_of),
                             KernelCall{&on.kernels, call});
    }
    return distinct;
}

void fill_device(const Bench& on, std::byte* to, int64_t bytes,
                 std::span<const std::byte> pattern) {
    Stream& up = on.device.stream(StreamKind::h2d);
    const auto part = static_cast<int64_t>(pattern.size());
    for (int64_t at = 0; at < bytes; at += part) {
        seconds_on(up, on.executor, 1,
                   [&](int64_t) { up.copy(to + at, pattern.data(), std::min(part, bytes - at)); });
    }
}

void fill_documents(const Bench& on) {
    if (!on.plan.documents || on.decoder == nullptr) return;
    const std::vector<int32_t> documents = whole_documents(on.decoder->numerics());
    const planner::Buffers& b = on.plan.buffers[static_cast<size_t>(planner::Class::tokens)];
    const auto bytes = std::as_bytes(std::span(documents));
    const int64_t behind = 2 * on.plan.tokens * int64_t{sizeof(int32_t)};
    for (int64_t i = 0; i < b.count; ++i)
        fill_device(on, on.device.memory().data() + b.offset + i * b.bytes + behind,
                    std::ssize(bytes), bytes);
}

void warm_up(const swap::Schedule& step, const Bench& on) {
    fill_documents(on);
    Stream& compute = on.device.stream(StreamKind::compute);
    for (auto& [kind, work] : distinct_kernels(step, on))
        seconds_on(compute, on.executor, 1, [&](int64_t) { work.start(compute); });
    const auto update = std::ranges::find_if(step.tasks, [](const swap::Task& task) {
        return task.lane == swap::Lane::compute && cost::is_update(task);
    });
    if (update == step.tasks.end()) return;
    KernelCall work{&on.kernels, call_of(*update, on)};
    seconds_on(compute, on.executor, 1, [&](int64_t) { work.start(compute); });
}

}  // namespace ferry::train
