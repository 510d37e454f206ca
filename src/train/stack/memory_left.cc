#include "memory_left.h"

#include <algorithm>
#include <string>
#include <vector>

#include "base/files.h"
#include "base/log.h"
#include "checkpoint/file_writer.h"
#include "ferry/error.h"
#include "ferry/units.h"

namespace ferry::train {

namespace {

// Threads' stacks, BLAS's buffers, schedules: measured below 16 MiB with two threads.
constexpr int64_t kStillToCome = 32 * kMiB;

// The most bytes of the plan's storage that lie on paths that are memory themselves.
int64_t stored_in_memory(const std::vector<NvmePath>& paths, const planner::Plan& plan) {
    int64_t bytes = 0;
    for (const NvmePath& path : paths) {
        if (!is_memory(path.path)) continue;
        bytes += std::min(path.size_bytes, plan.nvme_bytes);
    }
    return std::min(bytes, plan.nvme_bytes);
}

int64_t on_device_in_memory(const planner::Plan& plan, const Device& device) {
    return device.kind() == DeviceKind::cpu ? plan.device_bytes : 0;
}

// Below 0: the plan takes more than there is.
int64_t left_beside(const planner::Plan& plan, const BudgetConfig& budgets, const Topology& machine,
                    const Device& device) {
    return machine.memory_left_bytes - kStillToCome - on_device_in_memory(plan, device) -
           plan.host_bytes - stored_in_memory(budgets.nvme, plan);
}

}  // namespace

planner::Plan within_memory(planner::Plan plan, const BudgetConfig& budgets,
                            const Topology& machine, const Device& device, int64_t beside) {
    for (const NvmePath& path : budgets.nvme) {
        if (is_memory(path.path))
            log_warn_of_run(path.path +
                            " is memory (tmpfs): what is stored there is host memory, beside "
                            "budgets.host");
    }
    require_memory(plan, budgets, machine, device, beside);
    return plan;
}

void require_memory(const planner::Plan& plan, const BudgetConfig& budgets, const Topology& machine,
                    const Device& device, int64_t beside) {
    const int64_t on_device = on_device_in_memory(plan, device);
    const int64_t on_tmpfs = stored_in_memory(budgets.nvme, plan);
    const int64_t bytes = on_device + plan.host_bytes + on_tmpfs;
    // The process is already counted as it is; what it is still to take beside its arenas is not.
    const int64_t to_come = kStillToCome + beside;
    const int64_t left = std::max<int64_t>(machine.memory_left_bytes - to_come, 0);
    if (bytes <= left) return;
    throw Error(Trouble::does_not_fit,
                {.what = "this machine has less memory than the budgets allow the run to take",
                 .where = "budgets.device, budgets.host",
                 .measured = format_bytes(on_device) + " for the CPU device, " +
                             format_bytes(plan.host_bytes) + " for the host tier and " +
                             format_bytes(on_tmpfs) + " on tmpfs",
                 .limit = std::to_string(left) + " bytes (" + format_bytes(left) + "): of " +
                          format_bytes(machine.memory_limit_bytes) +
                          " installed or allowed to this container, what is not in use, and " +
                          format_bytes(to_come) + " for threads and libraries" +
                          (beside > 0 ? " and to write checkpoints" : ""),
                 .remedy = "lower budgets.device and budgets.host until their sum fits, with a "
                           "path in budgets.nvme for the rest; or end other processes"});
}

int64_t memory_to_save(const Config& config) {
    return config.checkpoint.dir.empty() ? 0 : checkpoint::FileWriter::kLeastMemory;
}

int64_t memory_for_reading(const planner::Plan& plan, const BudgetConfig& budgets,
                           const Topology& machine, const Device& device) {
    return std::max<int64_t>(left_beside(plan, budgets, machine, device), 0);
}

int64_t memory_beside(const planner::Plan& plan, const BudgetConfig& budgets,
                      const Topology& machine, const Device& device) {
    // The kernel's, of what is written meanwhile, and the blocks that it is written from.
    constexpr int64_t kPagesOfFiles = kGiB;
    const int64_t left = left_beside(plan, budgets, machine, device) - kPagesOfFiles;
    return std::max<int64_t>(std::min(left, budgets.host_bytes - plan.host_bytes), 0);
}

int64_t left_of_budget(const BudgetConfig& budgets, int64_t reserved) {
    return std::max<int64_t>(budgets.host_bytes - reserved, 0);
}

Topology as_left_now(Topology machine, int64_t of_budget) {
    const Topology now = discover_topology();
    // One of several processes has its part of the limit, and the same of what is left.
    const int64_t processes = std::max<int64_t>(
        now.memory_limit_bytes / std::max<int64_t>(machine.memory_limit_bytes, 1), 1);
    const int64_t left = std::max<int64_t>(now.memory_left_bytes / processes - kStillToCome, 0);
    machine.memory_left_bytes = std::min(left, of_budget);
    return machine;
}

}  // namespace ferry::train
