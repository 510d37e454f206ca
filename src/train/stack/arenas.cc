#include "arenas.h"

#include "base/log.h"
#include "ferry/units.h"

namespace ferry::train {
namespace {

// The prefix of the host arena that copies use before the state stands.
size_t buffers_of_arena(const planner::Plan& plan) {
    const int64_t bytes = round_up(plan.io_bytes, pinned_mem::Pool::kPartBytes);
    return static_cast<size_t>(std::min(bytes, plan.host_bytes));
}

}  // namespace

std::span<std::byte> reserve_arenas(const planner::Plan& plan, Device& device, NodeTeams& teams,
                                    pinned_mem::Pool& pool, StartUp& start_up,
                                    const std::string& name) {
    device.reserve(plan.device_bytes);
    start_up.next();
    const bool touched_behind = device.kind() == DeviceKind::cuda;
    const auto buffers = static_cast<int64_t>(buffers_of_arena(plan));
    const int64_t now = touched_behind ? buffers : plan.host_bytes;
    const auto arena = pool.reserve(name, plan.host_bytes, now, teams);
    start_up.done("host memory, touched", now);
    pool.lock_for(device, arena.first(buffers_of_arena(plan)), teams.all());
    start_up.done("buffers, page-locked", plan.io_bytes);
    return arena;
}

std::future<void> lock_homes(const planner::Plan& plan, Device& device, pinned_mem::Pool& pool,
                             std::span<std::byte> arena) {
    if (device.kind() == DeviceKind::cpu) return std::async(std::launch::deferred, [] {});
    return pool.lock_behind(device, arena.subspan(buffers_of_arena(plan)));
}

void check_device_memory(Device& device, const planner::Plan& plan, int64_t budget) {
    const int64_t overhead = device.overhead_bytes(), held = overhead + std::ssize(device.memory());
    log_info("the GPU's memory: " + format_bytes(held) + " held by this process, " +
             format_bytes(overhead) + " of it context, kernels and libraries (" +
             format_bytes(plan.device_overhead_bytes) + " planned)");
    if (held <= budget) return;
    throw Error(Trouble::does_not_fit,
                {.what = "the GPU's libraries took more memory than planned for",
                 .where = "budgets.device",
                 .measured = format_bytes(held) + " held by this process",
                 .limit = format_bytes(budget) + ", " + format_bytes(held - budget) + " missing",
                 .remedy = "set budgets.device to " + std::to_string(held) + " or more"});
}

Reserved reserved_by(Device& device, const pinned_mem::Pool& pool, const aio::Volume* volume) {
    return {.device_bytes = std::ssize(device.memory()),
            .device_overhead_bytes = device.overhead_bytes(),
            .host_bytes = pool.reserved_bytes(),
            .nvme_bytes = volume ? volume->reserved_bytes() : 0,
            .nvme_peak_bytes = volume ? volume->peak_bytes() : 0};
}

}  // namespace ferry::train
