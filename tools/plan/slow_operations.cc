#include "slow_operations.h"

#include <spdlog/fmt/fmt.h>

#include <nlohmann/json.hpp>

namespace ferry::tools {

std::string text_of(const std::vector<ops::SlowPath>& paths) {
    std::string text;
    for (const ops::SlowPath& path : paths) {
        const auto times = static_cast<double>(path.times);
        text += fmt::format("slow: {}, {}: about {:.3g} s of a step, {:.3g} the fast way; {}\n",
                            path.operation, path.shape, path.seconds * times,
                            path.fast_seconds * times, path.why);
    }
    return text.empty() ? text : text + '\n';
}

nlohmann::json to_json(const std::vector<ops::SlowPath>& paths) {
    nlohmann::json all = nlohmann::json::array();
    for (const ops::SlowPath& path : paths) {
        const auto times = static_cast<double>(path.times);
        all.push_back({{"operation", path.operation},
                       {"shape", path.shape},
                       {"why", path.why},
                       {"seconds", path.seconds * times},
                       {"fast_seconds", path.fast_seconds * times}});
    }
    return all;
}

}  // namespace ferry::tools
