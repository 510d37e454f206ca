// The subcommands of `ferry`; each adds itself, with what it does, to the program's command line.
//
// tools/ has a room for each subject:
//   bench    `ferry bench`: what it measures, and how
//   ckpt     `ferry ckpt` and `ferry export`
//   data     `ferry data`
//   launch   `ferry launch`: hosts, and what the ranks print
//   plan     `ferry plan`: prediction, pictures, wear, a network's cost
//   train    `ferry train` and `ferry eval`: ranks, resumes, the summary of a run
//   machine  the machine file, what is measured where it lacks something, and loads of storage
//   options  the words of a command line
//   output   what a command prints, and the files that it writes
//   process  signals, and programs that ferry starts
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
