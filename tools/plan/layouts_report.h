// How many of a cluster's ranks should share tensors, sequences, layers and state.
#pragma once

#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "cost/layouts.h"
#include "ferry/config.h"
#include "network.h"

namespace ferry::tools {

struct LayoutsReport {
    cost::ModelSizes model{};
    cost::Cluster cluster{};
    std::string rates{};  // whose they are
    std::vector<cost::Layout> layouts{};
    std::vector<std::string> refusals{};  // of each, by the configuration's own checks; "": none
    int64_t weighed = 0;                  // layouts
    // Keys of the configuration: that every layout has, each "key=value"; that the search chooses
    // itself; and whose work and bytes the arithmetic leaves out.
    std::vector<std::string> fixed{}, not_used{}, not_priced{};
    std::optional<cost::Layout> set_aside{};  // of stage 0 (FoundLayouts)
    // Powers of two up to a host's ranks that cannot share tensors, and why.
    struct LeftOut {
        int64_t tensor = 1;
        std::string why{};
    };
    std::vector<LeftOut> left_out{};
};

// The keys of a layout, each "key=value".
std::vector<std::string> keys_of(const cost::Layout& layout);

// The best layout and three more, in the orders that parallel.schedule has. Of the keys that are
// `given`, those of `parallel` and zero.stage are taken as they are, and schedule auto as any.
// `gpu`: "h100", "h200" or "a100"; "": what the configuration's device is by default. `refusal_of`:
// a configuration with these keys more. Throws usage for another GPU and for given keys that these
// ranks cannot have, and does_not_fit where nothing fits.
using RefusalOf = std::function<std::string(const std::vector<std::string>& keys)>;
LayoutsReport layouts_report(const Config& config, const std::vector<std::string>& given,
                             const train::RankCount& count, const std::string& gpu,
                             const std::optional<Network>& network, const RefusalOf& refusal_of);
std::string text_of(const LayoutsReport& report);
nlohmann::json to_json(const LayoutsReport& report);

}  // namespace ferry::tools
