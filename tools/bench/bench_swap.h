// Measures the swap path without a model: `ferry bench swap`.
#pragma once

#include <string>
#include <vector>

#include "bench_rows.h"
#include "tools/machine/io_load.h"
#include "train/prediction/rehearsal.h"

namespace ferry::tools {

struct SwapBench {
    Config config{};  // budgets.nvme are filled in: directories of the benchmark's own
    train::RehearsalOptions rehearsal{};
    std::vector<std::string> paths{};
    std::vector<train::Pass> passes{};
    bool all_passes = false;  // asked for by name: one with nothing to move is refused
    int pairs = 3;
    bool fio = false;      // beside it; else beside plain transfers of ferry's own
    double seconds = 1.5;  // a slice of the other side
    bool draws = false;    // the last pass of the last kind, as it went
};

struct SwapResult {
    std::vector<BenchRow> rows{};
    std::string picture{};  // SVG; empty: none
};

// A row a kind of pass: its GB/s to and from NVMe, beside those of plain transfers in the same
// directions, taken in turns; without paths the updates' GB/s in memory. Ends early, with what it
// has, when interrupted. Throws Error.
SwapResult measure_swap(const SwapBench& bench);

const char* name_of(train::Pass pass);

}  // namespace ferry::tools
