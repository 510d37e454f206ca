// The measurements that a configuration is planned by: the machine file's, and measured where it
// has none.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "machine_file.h"
#include "train/prediction/predictor.h"

namespace ferry::tools {

struct FoundMeasurements {
    cost::Measurements measurements{};
    std::vector<double> path_rates{};     // bytes/s, mixed, of each path of the configuration
    std::vector<std::string> measured{};  // a line each: what was measured just now
    int ranks_at_once = 1;                // that were timed at the same time
    std::string at_once{};                // the same in words, just now; empty: one
    std::vector<std::string> assumed{};   // and what nobody knows of a machine that is not here
    std::string missing{};                // why there is no prediction; empty: nothing is missing
};

// The counts of --ranks and --ranks-per-host, where 0 on a host means all. Throws usage.
train::RankCount on_hosts(train::RankCount given);

// A predictor for the configuration's device; where it is not here, for the file's. `says_so`: it
// warns of that, as the first of a command's does.
std::unique_ptr<train::Predictor> predictor_for(const Config& config, const train::RankCount& count,
                                                const std::optional<MachineFile>& file,
                                                bool says_so = true);

// The key by which a machine file knows the measurements.
MeasurementsOf what_is_measured(const train::Predictor& predictor);

// Measures for a few seconds what the file does not know of: kernels and links on memory of its
// own, and each path in a directory of its own there. A path that cannot be measured is `missing`
// where the plan needs it.
FoundMeasurements measurements_for(const Config& config, train::Predictor& predictor,
                                   const planner::Plan& plan,
                                   const std::optional<MachineFile>& file);

// Refuses what measurements_for() would refuse behind the choice of a schedule, which may take a
// while: that this machine has not the memory to measure what the file does not know. Nothing where
// there is no choice.
void require_memory_to_measure(const train::Predictor& predictor,
                               const std::optional<MachineFile>& file);

// Plans from here on are weighed with what the file knows, as those of `ferry train --machine` are.
// Returns by which, in words: without a file, or where it does not know, the defaults.
std::string plan_by(const std::optional<MachineFile>& file, const Config& config,
                    train::Predictor& predictor);

// The file's alone, of one rank. Throws usage, saying what it lacks and how to measure that.
cost::Measurements known_measurements(const Config& config, const train::RankCount& count,
                                      const MachineFile& file);

}  // namespace ferry::tools
