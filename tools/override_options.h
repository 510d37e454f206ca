// Keys of the configuration on the command line.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

namespace ferry::tools {

// --set, with `help`, and --gpu-memory, which is short for one of its keys. `overrides` gets both
// as "key=value" and must live as long as the command.
inline std::vector<CLI::Option*> add_overrides(CLI::App& command,
                                               std::vector<std::string>& overrides,
                                               const std::string& help) {
    using Given = std::vector<std::string>;
    const auto keep = [&overrides](const Given& given) {
        overrides.insert(overrides.end(), given.begin(), given.end());
    };
    const auto keep_memory = [&overrides](const std::string& size) {
        overrides.push_back("budgets.device=" + size);
    };
    return {command.add_option_function<Given>("--set", keep, help)->allow_extra_args(false),
            command.add_option_function<std::string>(
                "--gpu-memory", keep_memory,
                "cap of what the GPU may hold, as --set budgets.device=16GiB")};
}

}  // namespace ferry::tools
