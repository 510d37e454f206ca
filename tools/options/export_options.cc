#include "export_options.h"

#include <CLI/CLI.hpp>

#include "ferry/dtype.h"
#include "ferry/units.h"

namespace ferry::tools {

void add_export_options(CLI::App& command, const std::string& name, train::ExportOptions& options) {
    const bool positional = !name.starts_with("-");
    CLI::Option* directory =
        command
            .add_option(name, options.directory,
                        positional
                            ? "new directory: config.json, weights, tokenizer"
                            : "write the final weights as a Hugging Face model to a new directory")
            ->required(positional);
    CLI::Option* type = command.add_option_function<std::string>(
        "--export-type",
        [&options](const std::string& text) {
            options.type = dtype_from_name(text);
            if (!options.type)
                throw CLI::ValidationError("--export-type", text + " is none of fp32, bf16, fp16");
        },
        "type of the exported weights: fp32, bf16, fp16 (default: what the run computes in)");
    CLI::Option* size = command.add_option_function<std::string>(
        "--shard-size",
        [&options](const std::string& text) {
            options.shard_bytes = parse_bytes(text, "--shard-size");
            if (options.shard_bytes < 1)
                throw CLI::ValidationError("--shard-size", text + " is no size of a file");
        },
        "largest file of exported weights (default 5GB)");
    for (CLI::Option* option : {type, size}) option->needs(directory);
}

}  // namespace ferry::tools
