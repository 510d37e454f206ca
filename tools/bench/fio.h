// Runs fio as the other side of a comparison.
#pragma once

#include <string>
#include <vector>
#include "tools/machine/io_load.h"

namespace ferry::tools {

// The shortest slice in which its CPU time can be sampled.
constexpr double kLeastFioSeconds = 0.2;

struct FioJob {
    std::vector<std::string> files{};  // exist and are written; dealt out to the jobs
    AccessPattern access{};
    int64_t block_bytes = kMiB;
    int depth = 32;  // requests that each job has under way
    int jobs = 1;
    bool direct = true;
    double seconds = 1.5;
};

// The flags given to fio besides the job, for a table's caption.
std::string fio_flags();
// "fio-3.33". Throws usage, naming the package, where fio cannot be run.
std::string fio_version();

// Blocks. The CPU time is that of fio's whole process, workers of io_uring in the kernel included,
// sampled while its jobs ran. fio's own figure has its jobs' threads alone: less than half of it
// where the kernel hands transfers to workers (tmpfs). 0 where a short slice left too few samples.
// Throws io with what fio said. A sample of no bytes: interrupted.
Sample run_fio(const FioJob& job);

}  // namespace ferry::tools
