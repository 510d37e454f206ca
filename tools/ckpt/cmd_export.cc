// `ferry export CONFIG WEIGHTS DIR`: weights that a run wrote, as a directory that transformers
// loads.
#include <CLI/CLI.hpp>
#include <memory>

#include "copy_progress.h"
#include "export_options.h"
#include "ferry/config.h"
#include "tools/commands.h"

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

namespace {

struct ExportCommand {
    std::string config{}, weights{};
    std::vector<std::string> overrides{};
    train::ExportOptions exported{};
};

}  // namespace
}  // namespace ferry::tools

void add_export_command(CLI::App& app) {
    using namespace ferry::tools;
    const auto options = std::make_shared<ExportCommand>();
    CLI::App* command = app.add_subcommand(
        "export", "turn the weights of a run into a directory that transformers loads");
    command->add_option("config", options->config, "the run's configuration")->required();
    command->add_option("weights", options->weights, "what `ferry train --weights-out` wrote")
        ->required();
    command->add_option("--set", options->overrides, "override a key, as for the run")
        ->allow_extra_args(false)
        ->option_text("KEY=VALUE ...");
    add_export_options(*command, "directory", options->exported);
    command->footer("Example: ferry export my.json weights.safetensors TUNED");
    command->callback([options] {
        const ferry::Config config = ferry::load_config(options->config, options->overrides);
        const ferry::train::ExportDirectory directory(options->exported.directory, config);
        const auto executor = ferry::make_thread_executor();
        CopyProgress progress("export " + options->weights, *executor);
        ferry::train::export_weights(options->weights, config, options->exported, directory,
                                     [&](int64_t bytes, int64_t of) { progress.at(bytes, of); });
    });
}
