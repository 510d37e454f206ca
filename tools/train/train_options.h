// What `ferry train` was asked.
#pragma once

#include <CLI/CLI.hpp>
#include <optional>
#include <string>

#include "tools/options/override_options.h"
#include "train/saving/export.h"

namespace ferry::tools {

struct TrainOptions {
    std::string config{};
    Overrides overrides{};
    std::string weights_out{}, trace{}, machine{};
    train::ExportOptions exported{};
    bool json = false;
    bool bound = true;
    std::optional<std::string> resume{};  // "": with nothing behind it
};

void add_train_options(CLI::App& command, TrainOptions& options);

}  // namespace ferry::tools
