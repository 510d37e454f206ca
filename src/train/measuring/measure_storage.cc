#include <algorithm>

#include "base/cpu_time.h"
#include "measure.h"
#include "planner/recording/recorder.h"
#include "planning_measurements.h"

namespace ferry::train {
namespace {

// Objects on storage, read and written again until `most_bytes` have moved.
struct Rewritten {
    int64_t bytes = 0;
    double seconds = 0, cpu_s = 0;
};
Rewritten rewrite(const planner::Plan& plan, int64_t most_bytes, swap::Store& store,
                  Executor& executor) {
    Rewritten done;
    planner::Recorder recorder(plan, "rewrite");
    const auto move = [&](swap::ObjectId object, planner::Class through) {
        if (object == swap::kNoObject || plan.objects[object].home != swap::Tier::nvme) return;
        recorder.move(object, through, planner::Recorder::Move::both);
        done.bytes += 2 * plan.objects[object].bytes;
    };
    for (size_t c = 0; c < plan.chunks.size() && done.bytes < most_bytes; ++c) {
        move(plan.chunks[c].state, planner::Class::state_staging);
        move(plan.chunks[c].weight, planner::Class::weight_staging);
    }
    if (done.bytes == 0) return done;
    const swap::Schedule schedule = recorder.finish();
    const Nanos start = executor.now();
    const double cpu_start_s = process_cpu_seconds();
    store.append(schedule, 0, 0);
    store.drain();
    done.seconds = static_cast<double>(executor.now() - start) * 1e-9;
    done.cpu_s = process_cpu_seconds() - cpu_start_s;
    return done;
}

}  // namespace

void time_storage(const Config& config, const planner::Plan& plan, swap::Store& store,
                  Executor& executor, cost::Measurements& measured) {
    // Drives have caches and moods: of a large state 2 GiB, of a small one no more than a part.
    const int64_t most = std::clamp(plan.nvme_bytes / 16, 256 * kMiB, 2 * kGiB);
    Rewritten done = rewrite(plan, most, store, executor);
    if (done.bytes == 0) return;
    // Memory moves that in a blink, in much of which the first chunks come and the last ones go.
    constexpr double kSteadyS = 0.5;
    if (done.seconds < kSteadyS && done.bytes >= most) {
        const auto steady = static_cast<double>(done.bytes) * kSteadyS / done.seconds;
        done = rewrite(plan, static_cast<int64_t>(steady), store, executor);
    }
    const auto moved = static_cast<double>(done.bytes);
    measured.storage_of = cost::Of::rank;
    measured.nvme_bytes_per_s = moved / done.seconds;
    const double checks_s = plan.verify ? moved / 2 / measured.check_bytes_per_s : 0;
    measured.cores_per_nvme_byte = std::max(0.0, done.cpu_s - checks_s) / moved;
    measured.dram_per_nvme_byte = dram_per_stored_byte(config);
}

}  // namespace ferry::train
