// A picture of a pattern of attention, from its lists of blocks.
#pragma once

#include <string>

#include "ops/block_lists.h"

namespace ferry::tools {

// A square for each block of queries (down) and keys (across), of each layout, at most four. SVG.
std::string pattern_svg(const ops::BlockLists& lists, const std::string& title,
                        const std::string& caption);

}  // namespace ferry::tools
