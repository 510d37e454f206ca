#include "planning_measurements.h"

#include <spdlog/fmt/fmt.h>
#include <sys/stat.h>

#include <algorithm>

#include "base/files.h"
#include "base/log.h"

namespace ferry::train {

std::vector<cost::Path> assumed_paths(DeviceKind device, const std::vector<NvmePath>& nvme) {
    constexpr int64_t kMemory = 0;  // no drive has this number
    // A file in memory takes one writer at a time, and a server has cores for several.
    const int64_t writers = device == DeviceKind::cuda ? 4 : 1;
    const cost::Measurements known = cost::default_measurements(device);
    std::vector<cost::Path> paths;
    for (const NvmePath& path : nvme) {
        struct stat status {};
        const bool in_memory = is_memory(path.path);
        const bool here = stat(path.path.c_str(), &status) == 0;
        const int64_t drive = in_memory ? kMemory : static_cast<int64_t>(status.st_dev);
        paths.push_back(
            {.bytes_per_s = in_memory ? known.dram_bytes_per_s / 10 : known.nvme_bytes_per_s,
             .drive = here ? drive : -1,
             .in_memory = in_memory,
             .at_once = in_memory ? writers : 1,
             .size_bytes = path.size_bytes});
    }
    return paths;
}

cost::Measurements assumed_measurements(DeviceKind device, const std::vector<NvmePath>& nvme) {
    const cost::Measurements found = cost::default_measurements(device);
    const cost::Drive drive = cost::one_drive(assumed_paths(device, nvme));
    return drive.bytes_per_s > 0 ? cost::with_drive(found, drive) : found;
}

double dram_per_stored_byte(const Config& config) {
    return cost::one_drive(assumed_paths(config.device, config.budgets.nvme)).dram_per_byte;
}

cost::Measurements planning_measurements(const planner::PlanRequest& request,
                                         const cost::Measurements* known, int local_ranks) {
    const cost::Measurements assumed =
        cost::of_rank(assumed_measurements(request.device, request.budgets.nvme), local_ranks);
    return known ? cost::known_or(cost::of_rank(*known, local_ranks), assumed) : assumed;
}

std::string_view default_machine_name(const Config& config) {
    return config.device == DeviceKind::cuda ? "server with a GPU" : "small machine";
}

void log_planned_by(const cost::Measurements* known, const Config& config) {
    if (known) return log_info("planned by the measurements of this machine's file");
    log_info("planned by the defaults of a " + std::string(default_machine_name(config)) +
             "; `ferry bench --all --save FILE` measures this one's, --machine FILE plans by them");
}

std::string unlike_assumed(const Config& config, const cost::Measurements& measured,
                           int local_ranks) {
    constexpr double kFar = 2;
    const cost::Measurements assumed =
        cost::of_rank(assumed_measurements(config.device, config.budgets.nvme), local_ranks);
    std::string found;
    const auto compare = [&found](std::string_view link, double is, double was) {
        if (is == 0 || (is < kFar * was && was < kFar * is)) return;
        found += fmt::format("{}{} {:.3g} GB/s instead of {:.3g}", found.empty() ? "" : ", ", link,
                             is / 1e9, was / 1e9);
    };
    compare("storage", measured.nvme_bytes_per_s, assumed.nvme_bytes_per_s);
    compare("copies", measured.copy_bytes_per_s, assumed.copy_bytes_per_s);
    compare("updates", measured.dram_bytes_per_s, assumed.dram_bytes_per_s);
    return found;
}

void log_unlike_assumed(const Config& config, const cost::Measurements& measured, int local_ranks) {
    const std::string found = unlike_assumed(config, measured, local_ranks);
    if (config.device != DeviceKind::cuda || found.empty()) return;
    log_info("this machine is far from what the run was planned by: " + found +
             "; `ferry bench --all --save FILE --config CONFIG`, then --machine FILE, plans by "
             "what it does");
}

}  // namespace ferry::train
