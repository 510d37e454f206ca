// What the launcher says in the environment of every rank.
#pragma once

#include <optional>

#include "comm/comm.h"

namespace ferry::comm {

// How many ranks it has started; nothing where there is no launcher.
std::optional<int> launched_ranks();

}  // namespace ferry::comm
