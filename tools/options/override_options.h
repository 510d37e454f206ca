// Keys of the configuration on the command line.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "ferry/config.h"
#include "ferry/error.h"

namespace ferry::tools {

// The values of --set and --gpu-memory.
struct Overrides {
    std::vector<std::string> keys{};  // from both, as "key=value"
    std::string gpu_memory{};         // empty: not given

    // The configuration that they went into; throws usage where a GPU is capped and none computes.
    Config checked(Config config) const {
        if (gpu_memory.empty() || config.device != DeviceKind::cpu) return config;
        throw Error(Trouble::usage,
                    {.what = "a GPU's memory is capped, and the processors compute",
                     .where = "--gpu-memory " + gpu_memory,
                     .measured = "device " + std::string(name_of(config.device)),
                     .remedy = "set device to cuda; or, to cap what the processors' own tier "
                               "holds, say --set budgets.device=" +
                               gpu_memory});
    }
};

// --set, with `help`, and --gpu-memory, which is short for one of its keys. `overrides` must live
// as long as the command. Several keys behind one --set: command_line.h makes one of each.
inline std::vector<CLI::Option*> add_overrides(CLI::App& command, Overrides& overrides,
                                               const std::string& help) {
    using Given = std::vector<std::string>;
    const auto keep = [&overrides](const Given& given) {
        overrides.keys.insert(overrides.keys.end(), given.begin(), given.end());
    };
    const auto keep_memory = [&overrides](const std::string& size) {
        overrides.keys.push_back("budgets.device=" + size);
        overrides.gpu_memory = size;
    };
    return {command.add_option_function<Given>("--set", keep, help)
                ->allow_extra_args(false)
                ->option_text("KEY=VALUE ..."),
            command.add_option_function<std::string>(
                "--gpu-memory", keep_memory,
                "cap of what the GPU may hold, as --set budgets.device=16GiB")};
}

}  // namespace ferry::tools
