// What a launcher sets in every rank's environment.
#pragma once

#include <optional>

#include "comm/comm.h"

namespace ferry::comm {

// How many ranks it has started; nothing where there is no launcher.
std::optional<int> launched_ranks();

}  // namespace ferry::comm
