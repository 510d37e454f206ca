#include "threads.h"

#include <spdlog/fmt/fmt.h>
#include <spdlog/fmt/ranges.h>
#include <algorithm>
#include <string>
#include <vector>

#include "base/log.h"
#include "ferry/error.h"

namespace ferry::train {

namespace {

std::vector<int> cores_of(const Topology& machine) {
    std::vector<int> cores;
    for (const NumaNode& node : machine.nodes)
        cores.insert(cores.end(), node.cores.begin(), node.cores.end());
    return cores;
}

}  // namespace

Topology machine_for(const Config& config) {
    Topology machine = discover_topology();
    const std::vector<int> cores = cores_of(machine);
    for (const int core : config.reserved_cores) {
        if (std::find(cores.begin(), cores.end(), core) != cores.end()) continue;
        throw Error(Trouble::usage,
                    {.what = "no such core to reserve",
                     .where = "reserved_cores",
                     .measured = std::to_string(core),
                     .limit = fmt::format("this process may run on {}", fmt::join(cores, ", ")),
                     .remedy = "name cores of that list (one processing unit stands for a core)"});
    }
    machine.reserved = config.reserved_cores;
    return machine;
}

void log_machine(const std::vector<NvmePath>& paths, const Topology& machine, const Device& device,
                 const Executor& executor) {
    if (executor.simulated()) return;
    std::string text = describe(machine);
    const auto place = [&](const std::string& what, int node) {
        text += "; " + what + (node >= 0 ? " at node " + std::to_string(node) : " at no one node");
        const auto mine = std::ranges::find(machine.nodes, node, &NumaNode::os_index);
        if (node >= 0 && mine == machine.nodes.end()) text += ", where this process has no core";
    };
    if (!machine.attached.empty()) {
        if (!device.pci_address().empty())
            place("its GPU " + device.pci_address(), node_of_device(machine, device.pci_address()));
        for (const NvmePath& path : paths) place(path.path, node_of_path(machine, path.path));
    }
    log_info(text);
}

int threads_for(std::optional<int> asked, DeviceKind device, const Topology& machine, int ranks) {
    if (asked) return *asked;
    const int left = machine.cores() - static_cast<int>(machine.reserved.size());
    // The step and NCCL's own threads start every exchange: where the team took all cores for an
    // update, one took 2 ms instead of 0.2 (decision 17).
    const bool exchanges = ranks > 1 && device == DeviceKind::cuda && machine.reserved.empty();
    return std::max(1, exchanges ? left - std::min(2, left / 4) : left);
}

std::unique_ptr<NodeTeams> make_teams(std::optional<int> asked, DeviceKind device,
                                      const Topology& machine, const Executor& executor,
                                      int ranks) {
    if (executor.simulated()) {  // one thread does everything
        Topology one = machine;
        one.nodes.resize(1);
        one.reserved.clear();
        return std::make_unique<NodeTeams>(one, 1);
    }
    auto teams = std::make_unique<NodeTeams>(machine, threads_for(asked, device, machine, ranks));
    for (int i = 0; teams->count() > 1 && i < teams->count(); ++i) {
        log_info(fmt::format("NUMA node {} of {}: {} threads update what lies there", i,
                             teams->count(), teams->team(i).threads()));
    }
    return teams;
}

swap::Parallel parallel_on(NodeTeams& teams) {
    return [&teams](int64_t count, const auto& body) { teams.all().parallel(count, body); };
}

}  // namespace ferry::train
