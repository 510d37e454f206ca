// `ferry export CONFIG WEIGHTS DIR`: weights that a run wrote, as a directory that transformers
// loads.
#include <CLI/CLI.hpp>
#include <memory>

#include "ferry/config.h"
#include "tools/commands.h"
#include "tools/options/export_options.h"
#include "tools/output/copy_progress.h"

namespace ferry::tools {

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
