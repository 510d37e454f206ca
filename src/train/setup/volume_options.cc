#include "volume_options.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include "ferry/error.h"

namespace ferry::train {

namespace {

// Where a path's rings run: at the node that its drives hang off, on the cores that are left to I/O
// there, if any are. Empty, and anywhere: there is one node, or none that is nearer.
std::vector<int> cores_near(const std::string& path, const Topology& machine) {
    if (machine.nodes.size() < 2) return {};
    const auto node =
        std::ranges::find(machine.nodes, node_of_path(machine, path), &NumaNode::os_index);
    if (node == machine.nodes.end()) return {};
    std::vector<int> reserved = machine.reserved;
    std::erase_if(reserved, [&](int core) { return std::ranges::count(node->cores, core) == 0; });
    return reserved.empty() ? node->cores : reserved;
}

}  // namespace

aio::VolumeOptions volume_options(const IoConfig& io, const std::vector<NvmePath>& paths,
                                  const planner::Plan& plan, const Topology& machine,
                                  std::span<std::byte> arena, uint64_t run_id) {
    aio::VolumeOptions options{.classes = plan.slot_classes,
                               .backend = io.backend,
                               .block_bytes = io.block_bytes,
                               .queue_depth = io.queue_depth,
                               .rings = io.rings,
                               .direct = io.direct,
                               .leftover = io.leftovers,
                               .run_id = run_id,
                               .registered = {arena.first(static_cast<size_t>(plan.io_bytes))},
                               .record_bytes = plan.record_bytes};
    for (const NvmePath& path : paths) {
        const bool unlimited = path.size_bytes == kUnlimited;
        options.paths.push_back({.path = path.path,
                                 .size_bytes = unlimited ? 0 : path.size_bytes,
                                 .endurance_tbw = path.endurance_tbw,
                                 .cores = cores_near(path.path, machine)});
    }
    return options;
}

void check_paths(const std::vector<NvmePath>& paths) {
    for (size_t i = 0; i < paths.size(); ++i) {
        const std::string& path = paths[i].path;
        std::error_code reason;
        if (std::filesystem::exists(path, reason)) continue;
        throw Error(Trouble::usage, {.what = "a storage path does not exist",
                                     .where = "budgets.nvme[" + std::to_string(i) + "]: " + path,
                                     .measured = reason ? reason.message() : std::strerror(ENOENT),
                                     .remedy = "create the directory, or leave the path out"});
    }
}

}  // namespace ferry::train
