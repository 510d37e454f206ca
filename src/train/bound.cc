#include "bound.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <map>

namespace ferry::train {

using planner::Op;

namespace {

double seconds_of(const std::function<void()>& work) {
    const auto start = std::chrono::steady_clock::now();
    work();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

swap::Call call_of(const swap::Task& task, std::span<std::byte> device, swap::Store& store, int64_t sequence) {
    swap::Call call{.task = &task, .step = sequence, .at = {}, .store = &store};
    for (size_t i = 0; i < swap::kPlaces; ++i) {
        if (task.places[i].kind == swap::Place::Kind::device) call.at[i] = device.data() + task.places[i].offset;
    }
    return call;
}

}  // namespace

std::array<int64_t, swap::kLanes> bytes_of(const swap::Schedule& step) {
    std::array<int64_t, swap::kLanes> bytes{};
    for (const swap::Task& task : step.tasks) bytes[static_cast<size_t>(task.lane)] += task.bytes;
    return bytes;
}

double LinkSeconds::bound() const { return std::max({compute, h2d, d2h, nvme, dram}); }

std::string LinkSeconds::binding() const {
    const std::array<std::pair<double, const char*>, 5> links{
        {{compute, "compute"}, {h2d, "h2d"}, {d2h, "d2h"}, {nvme, "nvme"}, {dram, "dram"}}};
    return std::max_element(links.begin(), links.end())->second;
}

double time_kernels(const swap::Schedule& step, swap::Kernels& kernels, std::span<std::byte> device,
                    swap::Store& store, const planner::Plan& plan, int64_t sequence) {
    // Blocks are alike; edge layers and chunks of different sizes are not.
    std::map<std::array<int64_t, 3>, double> known;
    double total = 0;
    for (const swap::Task& task : step.tasks) {
        if (task.lane != swap::Lane::compute) continue;
        const auto op = static_cast<Op>(task.op);
        const auto kind = static_cast<int64_t>(plan.layers[static_cast<size_t>(task.layer)].kind);
        const int64_t size = op == Op::round ? plan.chunks[static_cast<size_t>(task.item)].count : task.bytes;
        auto [found, is_new] = known.try_emplace({task.op, kind, size}, 0);
        if (is_new) {
            const swap::Call call = call_of(task, device, store, sequence);
            const auto work = [&] { kernels.run(call); };
            work();
            found->second = std::min({seconds_of(work), seconds_of(work), seconds_of(work)});
        }
        total += found->second;
    }
    return total;
}

double time_copy(Stream& stream, std::span<std::byte> device, std::span<std::byte> host, Executor& executor) {
    const auto bytes = static_cast<int64_t>(std::min(device.size(), host.size()));
    const int64_t repeats = std::max<int64_t>(1, 256 * kMiB / bytes);
    std::atomic<uint64_t> done = 0;
    uint64_t wanted = 0;
    const double seconds = seconds_of([&] {
        for (int64_t i = 0; i < repeats; ++i) {
            stream.copy(host.data(), device.data(), bytes);
            stream.signal(done);
            ++wanted;
            while (done.load(std::memory_order_acquire) < wanted) executor.wait(kForever);
        }
    });
    return static_cast<double>(bytes * repeats) / seconds;
}

swap::Schedule record_rewrite(const planner::Plan& plan, int64_t bytes_max) {
    planner::Recorder recorder(plan, "rewrite");
    int64_t bytes = 0;
    for (size_t c = 0; c < plan.chunks.size() && bytes < bytes_max; ++c) {
        const planner::Chunk& chunk = plan.chunks[c];
        if (!chunk.trainable || plan.objects[chunk.state].home != swap::Tier::nvme) continue;
        recorder.rewrite_state(static_cast<int64_t>(c));
        bytes += 6 * chunk.state_part_bytes();
    }
    return recorder.finish();
}

}  // namespace ferry::train
