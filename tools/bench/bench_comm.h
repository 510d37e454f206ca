// Measures what ranks give to each other: `ferry bench comm`.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "bench_rows.h"
#include "comm/comm.h"
#include "ferry/device.h"
#include "tools/machine/machine_file.h"

namespace ferry::tools {

struct CommBench {
    std::vector<int64_t> sizes{};  // bytes of what is gathered, of all ranks together
    int rounds = 20;               // operations in a row, of which the time is taken
    int repeats = 5;               // how often that is timed; the median counts
};

// Rows of all-gather, exchange, and exchange within a kernel, at every size: bus bandwidth as
// nccl-tests defines it, the bytes that enter a rank from others over the slowest rank's time. The
// same on every rank.
std::vector<Row> measure_comm(const CommBench& bench, comm::Communicator& ranks, Executor& executor,
                              Device& device);

// The rates that planning uses: the line through the shortest and the longest all-gather of these
// rows.
CommRates comm_rates(std::span<const Row> rows);

}  // namespace ferry::tools
