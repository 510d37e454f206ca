// Measures what ranks give to each other: `ferry bench comm`.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "bench_rows.h"
#include "comm/comm.h"
#include "cost/measurements.h"
#include "ferry/config.h"
#include "ferry/device.h"

namespace ferry::tools {

struct CommBench {
    std::vector<int64_t> sizes{};  // bytes of what is gathered, of all ranks together
    int rounds = 20;               // operations in a row, of which the time is taken
    int repeats = 5;               // how often that is timed; the median counts
    ParallelConfig groups{};       // that the ranks are cut into, as those of a run
    int ranks_per_host = 1;        // neighbours that are a host, as zero.ranks_per_host says
};

// A row for each size: bus bandwidth as nccl-tests defines it, the bytes that enter a rank from
// others over the slowest rank's time. The same on every rank.
struct CommRows {
    // Among the ranks that share state and gradients.
    std::vector<BenchRow> all_gather{}, exchange{}, exchange_in_kernel{};
    std::vector<BenchRow> with_tensors{}, with_sequences{};  // exchanges in a kernel; may be none
    std::vector<BenchRow> in_host{}, across_hosts{};         // exchanges; may be none
    std::vector<BenchRow> all() const;
};
CommRows measure_comm(const CommBench& bench, comm::Communicator& ranks, Executor& executor,
                      Device& device);

// The rates that planning uses: lines through the shortest and the longest, among the ranks that
// share state of the all-gathers.
cost::Measurements comm_rates(const CommRows& rows);

}  // namespace ferry::tools
