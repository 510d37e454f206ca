// Checks of several keys together: whether their values fit each other.
#pragma once

#include <map>
#include <string>
#include <string_view>

#include "ferry/config.h"

namespace ferry::config {

// The keys that the user gave, by their paths, and where: in the file, or as "--set key=value".
struct GivenKeys {
    std::string file{};
    std::map<std::string_view, std::string> keys{};

    bool contains(std::string_view key) const { return keys.contains(key); }
    // A key's place in an error: "run.json: swap.groups"; also for a key with an index or one not
    // given.
    std::string place_of(std::string_view key) const;
};

// Fills in what depends on other keys (kv_heads, head_dim, total_steps, the method's own defaults),
// then checks the values against each other.
void resolve_defaults(Config& config, const GivenKeys& given);

}  // namespace ferry::config
