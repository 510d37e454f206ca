#include "bench_comm.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>

namespace ferry::tools {
namespace {

class Bench {
public:
    Bench(const CommBench& bench, comm::Communicator& ranks, Executor& executor, Device& device)
        : bench_(bench),
          ranks_(ranks),
          executor_(executor),
          memory_(device.memory().data()),
          compute_(device.stream(StreamKind::compute)),
          in_kernel_(comm::make_stream_exchange(
              device, executor, ranks.group(comm::across_runs(0, 1, ranks.size())))) {}

    Row all_gather(int64_t bytes) {
        const int64_t part = bytes / ranks_.size();
        const comm::Gather gather{memory_ + ranks_.rank() * part, memory_, part};
        return row("all-gather", part, [&] {
            for_rounds([&] { ranks_.all_gather({&gather, 1}, kTopic); });
            finish(ranks_);
        });
    }
    Row exchange(int64_t bytes) {
        const int64_t part = bytes / ranks_.size();
        const comm::Exchange exchange{memory_, memory_ + round_up(bytes, 4096), part};
        return row("exchange", part, [&] {
            for_rounds([&] { ranks_.exchange({&exchange, 1}, kTopic); });
            finish(ranks_);
        });
    }
    // One after the other in the compute stream, as attention's of ranks that share sequences.
    Row exchange_in_kernel(int64_t bytes) {
        const int64_t part = bytes / ranks_.size();
        struct Kernel {
            Bench& bench;
            comm::Exchange parts;
            void run() {
                bench.for_rounds([&] { bench.in_kernel_->exchange(parts, kTopic); });
            }
        };
        Kernel kernel{*this, {memory_, memory_ + round_up(bytes, 4096), part}};
        return row("exchange in a kernel", part, [&] {
            compute_.launch(
                {[](void* self, uint64_t) { static_cast<Kernel*>(self)->run(); }, &kernel});
            finish(compute_);
        });
    }

private:
    static constexpr comm::Topic kTopic{.of = "benchmark's bytes"};

    // `part`: bytes from one rank to another. One rank only copies; then its copies count. `call`
    // makes all rounds and waits for them.
    template <class Call>
    Row row(const char* name, int64_t part, const Call& call) {
        std::vector<double> seconds;
        for (int repeat = -1; repeat < bench_.repeats; ++repeat) {  // the first is not counted
            const double slowest = slowest_of(time(call));
            if (repeat >= 0) seconds.push_back(slowest);
        }
        const double once = median(seconds) / bench_.rounds;
        const int others = std::max(ranks_.size() - 1, 1);
        return {.name = fmt::format("{} {}", name, format_bytes(part * ranks_.size())),
                .value = static_cast<double>(part * others) / once * 1e-9,
                .unit = "GB/s",
                .more = {{"us", once * 1e6}}};
    }

    template <class Call>
    double time(const Call& call) {
        slowest_of(0);  // all begin together
        const Nanos start = executor_.now();
        call();
        return static_cast<double>(executor_.now() - start) * 1e-9;
    }
    template <class Call>
    void for_rounds(const Call& call) const {
        for (int round = 0; round < bench_.rounds; ++round) call();
    }
    template <class Queue>
    void finish(Queue& queue) {
        std::atomic<uint64_t> done = 0;
        queue.signal(done);
        while (done.load(std::memory_order_acquire) == 0) executor_.wait(kForever);
        ranks_.check();
    }
    double slowest_of(double seconds) {
        std::vector<double> all(static_cast<size_t>(ranks_.size()));
        comm::agree(ranks_, executor_, std::as_bytes(std::span(&seconds, 1)),
                    std::as_writable_bytes(std::span(all)), {.of = "benchmark's times"});
        return *std::ranges::max_element(all);
    }

    const CommBench& bench_;
    comm::Communicator& ranks_;
    Executor& executor_;
    std::byte* memory_;
    Stream& compute_;
    std::unique_ptr<comm::StreamExchange> in_kernel_;
};

double seconds_of(const Row& row) { return row.more.front().second * 1e-6; }
double bytes_of(const Row& row) { return row.value * 1e9 * seconds_of(row); }

}  // namespace

std::vector<Row> measure_comm(const CommBench& bench, comm::Communicator& ranks, Executor& executor,
                              Device& device) {
    Bench on(bench, ranks, executor, device);
    std::vector<Row> rows;
    rows.reserve(3 * bench.sizes.size());
    for (const int64_t bytes : bench.sizes) rows.push_back(on.all_gather(bytes));
    for (const int64_t bytes : bench.sizes) rows.push_back(on.exchange(bytes));
    for (const int64_t bytes : bench.sizes) rows.push_back(on.exchange_in_kernel(bytes));
    return rows;
}

CommRates comm_rates(std::span<const Row> rows) {
    constexpr double kLeast = 1e-6;  // the least overhead that is believed, in seconds
    const auto gathers = rows.first(rows.size() / 3);
    const auto [few, many] = std::ranges::minmax_element(gathers, {}, bytes_of);
    const double slope =
        (seconds_of(*many) - seconds_of(*few)) / (bytes_of(*many) - bytes_of(*few));
    // Where times vary more than with the bytes, the line means nothing.
    if (slope <= 0) return {bytes_of(*many) / seconds_of(*many), kLeast};
    const double overhead_s = seconds_of(*few) - slope * bytes_of(*few);
    return {1 / slope, std::max(kLeast, overhead_s)};
}

}  // namespace ferry::tools
