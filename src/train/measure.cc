#include "measure.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <map>

namespace ferry::train {

using planner::Op;

namespace {

template <class Work>
double seconds_of(const Work& work) {
    const auto start = std::chrono::steady_clock::now();
    work();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

swap::Call call_of(const swap::Task& task, std::span<std::byte> device, swap::Store& store,
                   int64_t sequence) {
    swap::Call call{.task = &task, .step = sequence, .at = {}, .store = &store};
    for (size_t i = 0; i < swap::kPlaces; ++i) {
        if (task.places[i].kind == swap::Place::Kind::device)
            call.at[i] = device.data() + task.places[i].offset;
    }
    return call;
}

}  // namespace

void fill_buffers(const planner::Plan& plan, std::span<std::byte> device, int64_t vocab) {
    for (size_t c = 0; c < planner::kClasses; ++c) {
        const planner::Buffers& b = plan.buffers[c];
        if (b.tier != swap::Tier::device) continue;
        const bool tokens = static_cast<planner::Class>(c) == planner::Class::tokens;
        const auto count = static_cast<size_t>(b.bytes * b.count / 4);
        auto* words = reinterpret_cast<uint32_t*>(device.data() + b.offset);
        for (size_t i = 0; i < count; ++i) {
            const auto noise = static_cast<uint32_t>((i + 1) * 2654435761U >> 16);
            const uint32_t half = 0x3c80U | (noise & 0x807fU);  // +-0.016 to 0.031, as bf16
            words[i] = tokens ? noise % static_cast<uint32_t>(vocab) : half << 16 | half;
        }
    }
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
        const int64_t size =
            op == Op::round ? plan.chunks[static_cast<size_t>(task.item)].count : task.bytes;
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

double time_copies(Stream& stream, std::span<std::byte> device, std::span<std::byte> host,
                   Executor& executor) {
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

double time_updates(Team& team, const optim::Scalars& scalars, const planner::Plan& plan,
                    std::span<std::byte> state, std::span<std::byte> weight,
                    std::span<std::byte> gradient) {
    auto* p = reinterpret_cast<float*>(state.data());
    const int64_t count = plan.chunk_elements;
    const optim::Span span{.count = count,
                           .gradient = gradient.data(),
                           .gradient_type = plan.wire,
                           .p_in = p,
                           .m_in = p + count,
                           .v_in = p + 2 * count,
                           .p = p,
                           .m = p + count,
                           .v = p + 2 * count,
                           .weight = weight.data(),
                           .weight_type = plan.compute};
    std::fill_n(p, 3 * count, 0.F);
    double best = seconds_of([&] { optim::update(team, span, scalars); });
    for (int i = 0; i < 5; ++i) {
        best = std::min(best, seconds_of([&] { optim::update(team, span, scalars); }));
    }
    return static_cast<double>(count * (24 + size_of(plan.wire) + size_of(plan.compute))) / best;
}

double time_storage(const planner::Plan& plan, swap::Store& store, Executor& executor) {
    planner::Recorder recorder(plan, "rewrite");
    int64_t bytes = 0;
    for (size_t c = 0; c < plan.chunks.size() && bytes < 256 * kMiB; ++c) {
        const planner::Chunk& chunk = plan.chunks[c];
        if (!chunk.trainable || plan.objects[chunk.state].home != swap::Tier::nvme) continue;
        recorder.rewrite_state(static_cast<int64_t>(c));
        bytes += 6 * chunk.state_part_bytes();
    }
    if (bytes == 0) return 0;
    const swap::Schedule rewrite = recorder.finish();
    const Nanos start = executor.now();
    store.append(rewrite, 0);
    store.drain();
    return static_cast<double>(bytes) / (static_cast<double>(executor.now() - start) * 1e-9);
}

}  // namespace ferry::train
