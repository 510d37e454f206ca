// How a command refuses what it was given.
#pragma once

#include <string>
#include <utility>

#include "ferry/error.h"

namespace ferry::tools {

[[noreturn]] inline void refuse(std::string what, std::string where, std::string measured,
                                std::string remedy) {
    throw Error(Trouble::usage, {.what = std::move(what),
                                 .where = std::move(where),
                                 .measured = std::move(measured),
                                 .remedy = std::move(remedy)});
}

}  // namespace ferry::tools
