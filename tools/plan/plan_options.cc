#include "plan_options.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>

#include "ferry/error.h"

namespace ferry::tools {
namespace {

// Of --hosts, which --ranks-per-host may repeat.
int ranks_per_host_of_hosts(const PlanOptions& options) {
    const int ranks = options.count.ranks, each = options.count.on_a_host;
    const bool divides = ranks % options.hosts == 0;
    if (divides && (each == 0 || each == ranks / options.hosts)) return ranks / options.hosts;
    throw Error(Trouble::usage,
                {.what = divides ? "--hosts and --ranks-per-host disagree"
                                 : "the hosts do not have as many ranks each",
                 .where = "--hosts",
                 .measured = fmt::format("{} ranks, {} hosts{}", ranks, options.hosts,
                                         each > 0 ? fmt::format(", {} a host", each) : ""),
                 .limit = divides ? fmt::format("{} a host", ranks / options.hosts)
                                  : "a divisor of the ranks",
                 .remedy = divides ? "give one of them" : "change --ranks or --hosts"});
}

// Where --ranks-per-host says nothing, as the configuration has it: 0 where that says nothing too.
int ranks_per_host_of(const PlanOptions& options, const Config& config) {
    if (options.hosts > 0) return ranks_per_host_of_hosts(options);
    if (options.count.on_a_host > 0) return options.count.on_a_host;
    // Fewer ranks fill one host in part.
    if (const std::optional<int>& given = config.budgets.ranks_per_host)
        return std::min(*given, options.count.ranks);
    const bool joined = options.layouts || !options.network.empty();
    const int each = config.zero.ranks_per_host;
    return joined && each > 1 ? std::min(each, options.count.ranks) : 0;
}

}  // namespace

train::RankCount count_of(const PlanOptions& options, const Config& config) {
    train::RankCount count = options.count;
    count.on_a_host = ranks_per_host_of(options, config);
    if (options.network.empty()) return on_hosts(count);
    if (count.on_a_host == 0) count.on_a_host = 1;
    count = on_hosts(count);
    if (count.on_a_host == count.ranks) {
        const bool of_a_key = options.count.on_a_host == 0 && !config.budgets.ranks_per_host &&
                              config.zero.ranks_per_host > 1;
        throw Error(Trouble::usage,
                    {.what = "no network joins the ranks of one host",
                     .where = "--network",
                     .measured = fmt::format("{} rank{}, {} a host{}", count.ranks,
                                             count.ranks == 1 ? "" : "s", count.on_a_host,
                                             of_a_key ? " by zero.ranks_per_host" : ""),
                     .remedy = "give more --ranks, or say with --ranks-per-host or "
                               "budgets.ranks_per_host how many each of several hosts has"});
    }
    return count;
}

std::optional<Network> network_of(const PlanOptions& options) {
    if (options.network.empty()) return std::nullopt;
    return network_from(options.network, options.network_latency);
}

void add_plan_options(CLI::App& command, PlanOptions& options) {
    command.add_option("config", options.config, "JSON configuration (docs/configuration.md)")
        ->required();
    add_overrides(command, options.overrides, "override a key: --set budgets.host=64MiB");
    CLI::Option* machine =
        command.add_option("--machine", options.machine,
                           "a machine file (docs/machine.md): what it knows is not measured");
    command.add_option("--ranks", options.count.ranks, "plan one of so many ranks")
        ->check(CLI::Range(1, 1 << 16));
    command
        .add_option("--ranks-per-host", options.count.on_a_host,
                    "neighbouring ranks on each host, which share its budgets and its network; "
                    "those of zero.ranks_per_host exchange among themselves first (default: "
                    "budgets.ranks_per_host, else all; with --network also "
                    "zero.ranks_per_host, else 1)")
        ->check(CLI::Range(1, 1 << 16));
    command
        .add_option("--hosts", options.hosts,
                    "hosts that have those ranks, as many each: in place of --ranks-per-host")
        ->check(CLI::Range(1, 1 << 16));
    CLI::Option* here =
        command
            .add_option("--ranks-here", options.count.here,
                        "how many ranks compute on this machine at the same time, where it stands "
                        "for several hosts (default, and at the least: those of one)")
            ->check(CLI::Range(1, 1 << 10));
    CLI::Option* svg =
        command.add_option("--svg", options.svg, "write the step's timeline to this file (SVG)");
    CLI::Option* pattern_svg =
        command.add_option("--pattern-svg", options.pattern_svg,
                           "write a picture of attention.pattern's blocks to this file (SVG)");
    CLI::Option* longest =
        command.add_flag("--longest-sequence", options.longest,
                         "say how long a sequence fits the budgets, all else as it is");
    CLI::Option* network = command.add_option(
        "--network", options.network,
        "a step with each codec where hosts are joined by this rate, such as 10Gbit; with "
        "--no-prediction the choice of parallel.schedule alone goes by it");
    command
        .add_option("--network-latency", options.network_latency,
                    "what an exchange between hosts takes longer, such as 50us")
        ->needs(network);
    CLI::Option* layouts = command.add_flag(
        "--layouts", options.layouts,
        "nothing but the best ways for so many ranks to share tensors, sequences, layers and "
        "state, by arithmetic");
    command
        .add_option("--gpu", options.gpu, "the GPU that --layouts reckons with: a100, h100 or h200")
        ->needs(layouts);
    command
        .add_flag("!--no-prediction", options.prediction,
                  "only where everything goes: measure nothing, predict nothing")
        ->excludes(svg)
        ->excludes(layouts);
    CLI::Option* schedule = command.add_flag("--schedule", options.schedule,
                                             "the learning rate over the steps as well");
    // It plans no single layout, and its rates are those of a device or a data sheet.
    for (CLI::Option* other : {machine, here, svg, pattern_svg, longest, schedule})
        layouts->excludes(other);
    command.add_flag("--json", options.json,
                     "one JSON object; with --schedule the rates of at most 10,000 steps, evenly "
                     "spaced, and those steps");
    command.footer("Example: ferry plan my.json --set budgets.device=20GiB --svg step.svg");
}

}  // namespace ferry::tools
