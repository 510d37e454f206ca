// What `ferry plan` says of attention: its pattern, and how long a sequence fits.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>

#include "ferry/config.h"
#include "train/prediction/config_facts.h"

namespace ferry::tools {

// Says what attention computes; nothing where that is all of the causal mask.
std::string text_of(const std::optional<train::PatternShare>& share, const Config& config);
nlohmann::json to_json(const std::optional<train::PatternShare>& share, const Config& config);
// A picture of the pattern. Throws usage where there is none.
void draw_pattern(const std::string& file, const std::optional<train::PatternShare>& share,
                  const Config& config);

// Says what sequence is the longest that fits.
std::string text_of_longest(int64_t tokens, const Config& config);

}  // namespace ferry::tools
