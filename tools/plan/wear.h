// The bytes that a run writes to its drives, and how much of their lives that is.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <utility>
#include <vector>

#include "ferry/config.h"
#include "train/prediction/predictor.h"

namespace ferry::tools {

struct PathWear {
    std::string path{};
    double run_bytes = 0;
    double share = 0;  // fraction of endurance_tbw that the run writes; 0: unknown
    double rolled_back_run_bytes = 0,
           rolled_back_share = 0;  // were every speculative update rolled back
};

// A change that lowers what the most worn drive loses, and to what: found by planning again with
// it.
struct WearAdvice {
    std::vector<std::pair<std::string, std::string>> set{};  // keys and values, as --set takes them
    std::string note{};
    double share = 0;
};

// By all ranks of a host: its drives are theirs together. What opening a path writes to try it out
// is not planned.
struct Wear {
    int ranks = 1;                // on this host
    int64_t step_bytes = 0;       // bytes that the schedule of a step writes
    int64_t step_note_bytes = 0;  // headers, and the map of durable steps
    double run_bytes = 0;         // every slot once, then every step
    // Were every step's speculative updates rolled back, which writes what the rollback restores as
    // well; 0: the plan does not speculate.
    int64_t rolled_back_step_bytes = 0;
    double rolled_back_run_bytes = 0;
    bool counts_on_rollback =
        false;  // it speculates even where clipping rolls every one back: that is warned of
    std::vector<PathWear> paths{};
    std::vector<WearAdvice> advice{};  // where a drive loses more than a tenth of its life
};

// `path_rates`: of each path, relative; empty where they are not known: all alike.
Wear wear_of(const Config& config, const train::Predictor& predictor, const planner::Plan& plan,
             const train::RankCount& count, const std::vector<double>& path_rates);
std::string text_of(const Wear& wear, const Config& config);
nlohmann::json to_json(const Wear& wear);

}  // namespace ferry::tools
