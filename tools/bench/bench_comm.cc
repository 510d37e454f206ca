#include "bench_comm.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>

namespace ferry::tools {
namespace {

class Bench {
public:
    Bench(const CommBench& bench, comm::Communicator& ranks, Executor& executor, Device& device)
        : bench_(bench), ranks_(ranks), executor_(executor), memory_(device.memory().data()) {}

    Row all_gather(int64_t bytes) {
        const int64_t part = bytes / ranks_.size();
        const comm::Gather gather{memory_ + ranks_.rank() * part, memory_, part};
        return row("all-gather", part, [&] {
            ranks_.all_gather({&gather, 1}, {.of = "benchmark's bytes"});
        });
    }
    Row exchange(int64_t bytes) {
        const int64_t part = bytes / ranks_.size();
        const comm::Exchange exchange{memory_, memory_ + round_up(bytes, 4096), part};
        return row("exchange", part, [&] {
            ranks_.exchange({&exchange, 1}, {.of = "benchmark's bytes"});
        });
    }

private:
    // `part`: bytes from one rank to another. One rank only copies; then its copies count.
    template <class Call>
    Row row(const char* name, int64_t part, Call call) {
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
    double time(Call call) {
        slowest_of(0);  // all begin together
        const Nanos start = executor_.now();
        for (int round = 0; round < bench_.rounds; ++round) call();
        finish();
        return static_cast<double>(executor_.now() - start) * 1e-9;
    }
    void finish() {
        std::atomic<uint64_t> done = 0;
        ranks_.signal(done);
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
};

double seconds_of(const Row& row) { return row.more.front().second * 1e-6; }
double bytes_of(const Row& row) { return row.value * 1e9 * seconds_of(row); }

}  // namespace

std::vector<Row> measure_comm(const CommBench& bench, comm::Communicator& ranks, Executor& executor,
                              Device& device) {
    Bench on(bench, ranks, executor, device);
    std::vector<Row> rows;
    rows.reserve(2 * bench.sizes.size());
    for (const int64_t bytes : bench.sizes) rows.push_back(on.all_gather(bytes));
    for (const int64_t bytes : bench.sizes) rows.push_back(on.exchange(bytes));
    return rows;
}

CommRates comm_rates(std::span<const Row> rows) {
    constexpr double kLeast = 1e-6;  // the least overhead that is believed, in seconds
    const auto gathers = rows.first(rows.size() / 2);
    const auto [few, many] = std::ranges::minmax_element(gathers, {}, bytes_of);
    const double slope =
        (seconds_of(*many) - seconds_of(*few)) / (bytes_of(*many) - bytes_of(*few));
    // Where times vary more than with the bytes, the line means nothing.
    if (slope <= 0) return {bytes_of(*many) / seconds_of(*many), kLeast};
    const double overhead_s = seconds_of(*few) - slope * bytes_of(*few);
    return {1 / slope, std::max(kLeast, overhead_s)};
}

}  // namespace ferry::tools
