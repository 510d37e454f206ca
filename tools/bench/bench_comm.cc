#include "bench_comm.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <span>

#include "train/setup/rank_share.h"

namespace ferry::tools {
namespace {

// Of one kind of groups: every rank is in one, and all groups are timed at once.
class Bench {
public:
    Bench(const CommBench& bench, comm::Communicator& ranks, const std::vector<int>& members,
          Executor& executor, Device& device)
        : bench_(bench),
          ranks_(ranks),
          own_group_(std::ssize(members) < ranks.size() ? ranks.group(members) : nullptr),
          group_(own_group_ ? *own_group_ : ranks),
          executor_(executor),
          memory_(device.memory().data()),
          compute_(device.stream(StreamKind::compute)),
          in_kernel_(comm::make_stream_exchange(device, executor, ranks.group(members))) {}

    BenchRow all_gather(int64_t bytes) {
        const int64_t part = bytes / group_.size();
        const comm::Gather gather{memory_ + group_.rank() * part, memory_, part};
        return row("all-gather", part, [&] {
            for_rounds([&] { group_.all_gather({&gather, 1}, kTopic); });
            finish(group_);
        });
    }
    BenchRow exchange(const std::string& name, int64_t bytes) {
        const int64_t part = bytes / group_.size();
        const comm::Exchange exchange{
            .to = memory_, .from = memory_ + round_up(bytes, 4096), .bytes = part};
        return row(name, part, [&] {
            for_rounds([&] { group_.exchange({&exchange, 1}, kTopic); });
            finish(group_);
        });
    }
    // One after the other in the compute stream, as those of a block's ranks.
    BenchRow exchange_in_kernel(const std::string& name, int64_t bytes) {
        const int64_t part = bytes / group_.size();
        struct Kernel {
            Bench& bench;
            comm::Exchange parts;
            void run() {
                bench.for_rounds([&] { bench.in_kernel_->exchange(parts, kTopic); });
            }
        };
        Kernel kernel{*this,
                      {.to = memory_, .from = memory_ + round_up(bytes, 4096), .bytes = part}};
        return row(name, part, [&] {
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
    BenchRow row(const std::string& name, int64_t part, const Call& call) {
        std::vector<double> seconds;
        for (int repeat = -1; repeat < bench_.repeats; ++repeat) {  // the first is not counted
            const double slowest = slowest_of(time(call));
            if (repeat >= 0) seconds.push_back(slowest);
        }
        const double once = median(seconds) / bench_.rounds;
        const int others = std::max(group_.size() - 1, 1);
        return {.name = fmt::format("{} {}", name, format_bytes(part * group_.size())),
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
    std::unique_ptr<comm::Communicator> own_group_;
    comm::Communicator& group_;
    Executor& executor_;
    std::byte* memory_;
    Stream& compute_;
    std::unique_ptr<comm::StreamExchange> in_kernel_;
};

double seconds_of(const BenchRow& row) { return row.more.front().second * 1e-6; }
double bytes_of(const BenchRow& row) { return row.value * 1e9 * seconds_of(row); }

// The line through the shortest and the longest of the rows.
cost::GroupRate line_through(std::span<const BenchRow> rows) {
    constexpr double kLeast = 1e-6;  // the least overhead that is believed, in seconds
    const auto [few, many] = std::ranges::minmax_element(rows, {}, bytes_of);
    const double slope =
        (seconds_of(*many) - seconds_of(*few)) / (bytes_of(*many) - bytes_of(*few));
    // Where times vary more than with the bytes, the line means nothing.
    if (slope <= 0) return {bytes_of(*many) / seconds_of(*many), kLeast};
    const double overhead_s = seconds_of(*few) - slope * bytes_of(*few);
    return {1 / slope, std::max(kLeast, overhead_s)};
}

}  // namespace

std::vector<BenchRow> CommRows::all() const {
    std::vector<BenchRow> rows;
    for (const auto* part : {&all_gather, &exchange, &exchange_in_kernel, &with_tensors,
                             &with_sequences, &in_host, &across_hosts})
        rows.insert(rows.end(), part->begin(), part->end());
    return rows;
}

CommRows measure_comm(const CommBench& bench, comm::Communicator& ranks, Executor& executor,
                      Device& device) {
    Config config;
    config.parallel = bench.groups;
    config.zero.ranks_per_host = bench.ranks_per_host;
    const train::World world =
        train::world_of(config, ranks.rank(), ranks.size(), ranks.local_size());
    CommRows rows;
    const auto in_kernels = [&](Bench& on, const std::string& name) {
        std::vector<BenchRow> of_sizes;
        of_sizes.reserve(bench.sizes.size());
        for (const int64_t bytes : bench.sizes)
            of_sizes.push_back(on.exchange_in_kernel(name, bytes));
        return of_sizes;
    };
    const auto exchanges = [&](Bench& on, const std::string& name) {
        std::vector<BenchRow> of_sizes;
        of_sizes.reserve(bench.sizes.size());
        for (const int64_t bytes : bench.sizes) of_sizes.push_back(on.exchange(name, bytes));
        return of_sizes;
    };
    Bench on(bench, ranks, world.with_slice(), executor, device);
    for (const int64_t bytes : bench.sizes) rows.all_gather.push_back(on.all_gather(bytes));
    rows.exchange = exchanges(on, "exchange");
    rows.exchange_in_kernel = in_kernels(on, "exchange in a kernel");
    if (world.tensor > 1) {
        Bench with_tensors(bench, ranks, world.with_tensors(), executor, device);
        rows.with_tensors =
            in_kernels(with_tensors, fmt::format("tensors over {}: exchange", world.tensor));
    }
    if (world.sequence > 1) {
        Bench with_sequences(bench, ranks, world.with_sequences(), executor, device);
        rows.with_sequences =
            in_kernels(with_sequences, fmt::format("sequences over {}: exchange", world.sequence));
    }
    if (const int here = world.host_ranks; here > 1) {
        Bench inside(bench, ranks, comm::run_of(ranks.rank(), here), executor, device);
        rows.in_host = exchanges(inside, fmt::format("hosts of {}: exchange in a host", here));
        Bench across(bench, ranks, comm::across_runs(ranks.rank(), here, ranks.size()), executor,
                     device);
        rows.across_hosts =
            exchanges(across, fmt::format("hosts of {}: exchange between hosts", here));
    }
    return rows;
}

cost::Measurements comm_rates(const CommRows& rows) {
    const cost::GroupRate among_all = line_through(rows.all_gather);
    cost::Measurements found{.comm_bytes_per_s = among_all.bytes_per_s,
                             .comm_overhead_s = among_all.overhead_s};
    if (!rows.with_sequences.empty()) found.with_sequence = line_through(rows.with_sequences);
    if (!rows.with_tensors.empty()) found.with_slices = line_through(rows.with_tensors);
    if (!rows.in_host.empty()) found.in_host = line_through(rows.in_host);
    if (!rows.across_hosts.empty()) found.across_hosts = line_through(rows.across_hosts);
    return found;
}

}  // namespace ferry::tools
