#include "measurements_of.h"

#include <spdlog/fmt/fmt.h>

namespace ferry::tools {

std::string text_of_ranks(const MeasurementsOf& what) {
    const auto over = [](const char* of, int ranks) {
        return ranks > 1 ? fmt::format("{} over {}, ", of, ranks) : std::string();
    };
    const std::string hosts =
        what.ranks_per_host > 1 ? fmt::format("hosts of {}, ", what.ranks_per_host) : "";
    return fmt::format("{} ranks, {} on a host, {}{}{}by {}", what.count.ranks,
                       what.count.on_a_host, over("tensors", what.groups.tensor),
                       over("sequences", what.groups.sequence), hosts, what.by);
}

}  // namespace ferry::tools
