// The options of a command that writes a model's directory.
#pragma once

#include <string>

#include "ferry/export.h"

namespace CLI {  // NOLINT(readability-identifier-naming): not ours
class App;
}

namespace ferry::tools {

// `name`: how the directory is given, such as --export; a positional one is required.
void add_export_options(CLI::App& command, const std::string& name, train::ExportOptions& options);

}  // namespace ferry::tools
