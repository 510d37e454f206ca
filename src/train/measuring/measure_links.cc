// How fast bytes move: over the link between host and device, within each, and between ranks.
#include <algorithm>
#include <atomic>
#include <vector>

#include "measure.h"
#include "seconds_of_one.h"
#include "train/stack/device_needs.h"
#include "train/stack/seconds_of.h"

namespace ferry::train {

double time_checks(std::span<std::byte> bytes, Together& together) {
    std::vector<uint64_t> sums(static_cast<size_t>(aio::pieces_of(std::ssize(bytes))));
    const auto time = [&] { return seconds_of([&] { aio::seal(bytes, 1, sums); }); };
    double seconds = 0;
    together.run(
        [&] {
            time();
            seconds = of_three(time, together);
        },
        [&] { time(); });
    return static_cast<double>(bytes.size()) / seconds;
}

double time_copies(const Bench& on, std::span<std::byte> host, Together& together) {
    const std::span<std::byte> device = on.device.memory();
    const auto bytes = static_cast<int64_t>(std::min(device.size(), host.size()));
    constexpr int64_t kMost = 64;  // copies on their way
    Stream& stream = on.device.stream(StreamKind::d2h);
    const int64_t times = std::clamp<int64_t>(256 * kMiB / bytes, 1, kMost);
    // From one place after the other, as a step copies: the last one's may still be in the caches.
    const int64_t places = std::ssize(device) / bytes;
    int64_t next = 0;
    const auto time = [&] {
        return seconds_on(stream, on.executor, times, [&](int64_t) {
            stream.copy(host.data(), device.data() + next++ % places * bytes, bytes);
        });
    };
    double seconds = 0;
    together.run([&] { seconds = of_three(time, together); }, [&] { time(); });
    return static_cast<double>(bytes) / seconds;
}

double time_device_copies(const Bench& on, Together& together) {
    constexpr int64_t kMost = 2 * kGiB, kWidth = 4096;
    if (on.ops == nullptr) return 0;
    const int64_t half = std::min(kMost, overwritable_bytes(on.plan) / 2);
    const int64_t rows = half / (4 * kWidth);
    if (rows == 0) {
        together.run({}, {});
        return 0;
    }
    std::byte* memory = on.device.memory().data();
    struct Copy {
        ops::Ops& ops;
        ops::View from, to;
    } copy{*on.ops, ops::View::of(memory, DType::f32, rows, kWidth),
           ops::View::of(memory + rows * 4 * kWidth, DType::f32, rows, kWidth)};
    const Job job{[](void* context, uint64_t) {
                      const Copy& c = *static_cast<const Copy*>(context);
                      c.ops.copy_out(c.from, c.to);
                  },
                  &copy};
    Stream& compute = on.device.stream(StreamKind::compute);
    const double seconds = seconds_of_one(
        [&](int64_t times) {
            return seconds_on(compute, on.executor, times, [&](int64_t) { compute.launch(job); });
        },
        together);
    return 2 * static_cast<double>(rows * 4 * kWidth) / seconds;
}

void time_gathers(const Bench& on, comm::Communicator& ranks, cost::Measurements& measured) {
    zero::Partition all = on.plan.partition;
    all.rank = ranks.rank();
    all.ranks = ranks.size();
    all.sharding.weights = true;
    all.codecs = {};  // the bytes themselves are timed
    const auto first = static_cast<size_t>(std::max<int64_t>(all.stage.first, 1));
    const model::Layer& block = on.plan.layers[first];
    const planner::Buffers& b = on.plan.buffers[static_cast<size_t>(planner::Class::block_weights)];
    std::byte* whole = on.device.memory().data() + b.offset;
    constexpr comm::Topic kTopic{.of = "weights, to measure"};
    const auto best = [&](int64_t times, const auto& gather) {
        const auto time = [&](int64_t count) {
            std::atomic<uint64_t> done = 0;
            const double seconds = seconds_of([&] {
                for (int64_t i = 0; i < count; ++i) gather();
                ranks.signal(done);
                while (done.load(std::memory_order_acquire) == 0) on.executor.wait(kForever);
                ranks.check();
            });
            return seconds / static_cast<double>(count);
        };
        time(1);  // connections are made at the first exchange of a size
        return std::min({time(times), time(times), time(times)});
    };
    const double block_s = best(4, [&] {
        zero::gather_weights(ranks, all, block, on.plan.compute, nullptr, whole, kTopic);
    });
    constexpr int64_t kFew = 256;  // bytes of a rank, and of a kernel's smallest unit
    const comm::Gather few{whole + ranks.rank() * kFew, whole, kFew};
    const double few_s = best(16, [&] { ranks.all_gather({&few, 1}, kTopic); });
    const double overhead_s = std::min(few_s, block_s / 2);
    const auto bytes = static_cast<double>(zero::gathered_bytes(all, block, on.plan.compute));
    measured.comm_bytes_per_s = bytes / (block_s - overhead_s);
    measured.comm_overhead_s = overhead_s;
}

}  // namespace ferry::train
