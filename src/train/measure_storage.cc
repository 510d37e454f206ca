#include <algorithm>
#include <ctime>

#include "measure.h"
#include "plan_figures.h"

namespace ferry::train {
namespace {

double process_cpu_seconds() {
    timespec time{};
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);  // workers of io_uring are threads of ours
    return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

}  // namespace

void time_storage(const Config& config, const planner::Plan& plan, swap::Store& store,
                  Executor& executor, Machine& machine) {
    planner::Recorder recorder(plan, "rewrite");
    int64_t bytes = 0;
    const auto rewrite = [&](swap::ObjectId object, planner::Class through) {
        if (object == swap::kNoObject || plan.objects[object].home != swap::Tier::nvme) return;
        recorder.move(object, through, planner::Recorder::Move::both);
        bytes += 2 * plan.objects[object].bytes;
    };
    // Drives have caches and moods: of a large state 2 GiB, of a small one no more than a part.
    const int64_t most = std::clamp(plan.nvme_bytes / 16, 256 * kMiB, 2 * kGiB);
    for (size_t c = 0; c < plan.chunks.size() && bytes < most; ++c) {
        rewrite(plan.chunks[c].state, planner::Class::stage);
        rewrite(plan.chunks[c].weight, planner::Class::weight_piece);
    }
    if (bytes == 0) return;
    const swap::Schedule schedule = recorder.finish();
    const Nanos start = executor.now();
    const double cpu_start_s = process_cpu_seconds();
    store.append(schedule, 0, 0);
    store.drain();
    const auto moved = static_cast<double>(bytes);
    LinkSpeeds& links = machine.links;
    links.nvme_bytes_per_s = moved / (static_cast<double>(executor.now() - start) * 1e-9);
    const double checks_s = plan.verify ? moved / 2 / machine.check_bytes_per_s : 0;
    const double cpu_s = process_cpu_seconds() - cpu_start_s - checks_s;
    links.cores_per_nvme_byte = std::max(0.0, cpu_s) / moved;
    links.dram_per_nvme_byte = dram_per_stored_byte(config);
}

}  // namespace ferry::train
