#include "train_options.h"

#include "tools/options/export_options.h"

namespace ferry::tools {

void add_train_options(CLI::App& command, TrainOptions& options) {
    // Required, which is seen to below: behind a bare --resume it is taken for that one's.
    command.add_option("config", options.config, "JSON configuration (docs/configuration.md)")
        ->option_text("REQUIRED");
    add_overrides(command, options.overrides, "override a key: --set budgets.host=64MiB");
    command.add_option("--weights-out", options.weights_out,
                       "write the final fp32 weights (safetensors)");
    add_export_options(command, "--export", options.exported);
    command.add_option("--trace", options.trace,
                       "write what each lane did when, and beside it what was planned (Chrome "
                       "trace: ui.perfetto.dev); of several ranks each, rank 1 to FILE.1");
    command.add_option(
        "--machine", options.machine,
        "a machine file (docs/machine.md): bound and prediction by its measurements, "
        "nothing is measured");
    command
        .add_option_function<std::string>(
            "--resume", [&options](const std::string& from) { options.resume = from; },
            "go on from a checkpoint (docs/checkpoints.md): from DIR, which is one or holds some; "
            "`latest` is the newest in checkpoint.dir. Alone it is that as well, or with "
            "checkpoint.durable_steps the last durable step, at most two before the last that the "
            "run finished")
        ->expected(0, 1)
        ->option_text("[DIR|latest]");
    command.add_flag("--json", options.json, "one JSON object a step on standard output");
    command.add_flag_callback(
        "--no-bound", [&options] { options.bound = false; },
        "do not measure the lower bound of a step first");
    command.footer(
        "Ctrl-C ends the run after its step, with the summary and exit code 0; a second one kills "
        "it.\n"
        "Exit codes: 0 done, 1 a bug in ferry, 2 configuration or usage, 3 does not fit a budget,\n"
        "            4 I/O failed or bytes are corrupt, 5 loss or gradient not finite,\n"
        "            6 another rank was lost\n"
        "Several ranks: mpirun --bind-to none -n N ferry train CONFIG, or srun; the first one\n"
        "prints. Ctrl-C there is mpirun's, which kills ranks a second later: SIGUSR1 to mpirun, "
        "or\n"
        "Ctrl-C of `ferry launch`, ends them all after their step.\n"
        "Example: ferry train my.json --set model.path=DIR --export TUNED");
}

}  // namespace ferry::tools
