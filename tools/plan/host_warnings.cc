#include "host_warnings.h"

#include <spdlog/fmt/fmt.h>

#include "base/log.h"
#include "cost/traffic.h"
#include "tools/train/run_table.h"

namespace ferry::tools {
namespace {

// Of a group whose ranks are not on one host.
void warn_of_groups(const planner::Plan& plan, const train::RankCount& count) {
    const int tensor = plan.partition.slices;
    if (tensor == 1 || count.on_a_host % tensor == 0) return;
    log_warn(
        fmt::format("parallel.tensor {} does not divide the {} rank{} of a host: some groups span "
                    "hosts, and up to {} "
                    "of each of their ranks cross the network in a step",
                    tensor, count.on_a_host, count.on_a_host == 1 ? "" : "s",
                    format_bytes(kernel_bytes(plan).bytes)));
}

// Of hosts that the configuration cuts otherwise than the plan.
void warn_of_other_hosts(const planner::Plan& plan, const Config& config,
                         const train::RankCount& count) {
    const int each = config.zero.ranks_per_host;
    const zero::Partition& partition = plan.partition;
    if (each == count.on_a_host || count.on_a_host == count.ranks ||
        !(partition.two_levels() || partition.keeps_second_shards()))
        return;
    const cost::CommTraffic moved = cost::comm_traffic(plan.layers, partition, plan.compute,
                                                       plan.wire, zero::Exchanged::gradients);
    const int parts = count.on_a_host / each;
    const std::string so =
        count.on_a_host % each != 0
            ? fmt::format(
                  "up to {} of a rank's that was to stay in a host crosses the network in "
                  "a step",
                  format_bytes(static_cast<int64_t>(moved.in_host)))
        : partition.two_levels()
            ? fmt::format("a host sends {} sums of its gradients where one would do", parts)
            : fmt::format("a host keeps {} second shards where one would do", parts);
    log_warn(
        fmt::format("zero.ranks_per_host is {}, and this plan has {} rank{} on a host: {}; set "
                    "it to the ranks that each host has, or plan with --ranks-per-host {}",
                    each, count.on_a_host, count.on_a_host == 1 ? "" : "s", so, each));
}

}  // namespace

void warn_of_hosts(const planner::Plan& plan, const Config& config, const train::RankCount& count) {
    warn_of_groups(plan, count);
    warn_of_other_hosts(plan, config, count);
}

}  // namespace ferry::tools
