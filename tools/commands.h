// The subcommands of `ferry`; each adds itself, with what it does, to the program's command line.
#pragma once

namespace CLI {  // NOLINT(readability-identifier-naming): not ours
class App;
}

void add_bench_command(CLI::App& app);
void add_ckpt_command(CLI::App& app);
void add_data_command(CLI::App& app);
void add_eval_command(CLI::App& app);
void add_export_command(CLI::App& app);
void add_launch_command(CLI::App& app);
void add_plan_command(CLI::App& app);
void add_train_command(CLI::App& app);

// Below `ferry bench`; the first is `ferry bench --all`, and what is said where nothing is asked
// for.
void add_all_benches(CLI::App& bench);
void add_adam_bench(CLI::App& bench);
void add_attention_bench(CLI::App& bench);
void add_comm_bench(CLI::App& bench);
void add_io_bench(CLI::App& bench);
void add_kernels_bench(CLI::App& bench);
void add_swap_bench(CLI::App& bench);
