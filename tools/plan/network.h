// A network between the hosts of a run that is planned, and a step over it with each codec.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "tools/machine/find_measurements.h"

namespace ferry::tools {

struct Network {
    double bits_per_s = 0;  // of a host, each way
    double latency_s = 0;   // of an operation, beside what it takes inside a host
};
// "10Gbit" or "250Mbit", and "50us" or "1ms". Throws usage.
Network network_from(const std::string& rate, const std::string& latency);

// The measurements with its hosts that far apart. The ranks of a host share its link; what comes
// from ranks of the same host takes as long as before, and is added. Groups that share tensors,
// groups that share sequences, the hosts of zero.ranks_per_host and what stands alike in them have
// a rate each: as before where all of it is on one of the plan's hosts.
cost::Measurements over(const Network& network, const train::RankCount& count, const Config& config,
                        cost::Measurements measured);

struct CodecStep {
    CodecKind gradients = CodecKind::none;  // sign: momentum instead
    CodecKind weights = CodecKind::none;
    int ranks_per_host = 1;      // that exchange among themselves first: zero.ranks_per_host
    bool second_shards = false;  // zero.second_shard
    int64_t sent_bytes = 0;      // by a rank
    double seconds = 0;
};
// The same model and run with an optimizer that sends momentum as signs.
struct OtherOptimizer {
    optim::Method method = optim::Method::onebit_adam;
    std::optional<Config> config{};  // none: refused
    std::string why{};               // it is
    std::vector<CodecStep> steps{};  // uncoded weights first
    std::optional<double> mean_s{};  // of the run's steps with the fastest of these
};
struct NetworkReport {
    Network network{};
    train::RankCount count{};
    std::vector<CodecStep> steps{};  // uncoded first
    std::vector<OtherOptimizer> others{};
    const CodecStep& best() const;  // of `steps`
    // The other whose run's mean step is faster than that of `best`; null: none.
    const OtherOptimizer* best_other() const;
};

// Plans and predicts the configuration with every codec that its optimizer and stage take, and
// where hosts have several ranks also with what these can do among themselves first; the rest as
// `measured`, within a host.
NetworkReport network_report(const Config& config, const train::RankCount& count,
                             const std::optional<MachineFile>& machine, const Network& network,
                             const cost::Measurements& measured);
// Plans and predicts each of `others` that has a configuration; what then refuses it is its `why`.
void add_others(NetworkReport& report, std::vector<OtherOptimizer> others,
                const std::optional<MachineFile>& machine, const cost::Measurements& measured);
std::string text_of(const NetworkReport& report);
nlohmann::json to_json(const NetworkReport& report);

}  // namespace ferry::tools
