// `ferry bench`: the benchmarks, each in a file of its own; `--all` runs what planning needs of
// them.
#include <CLI/CLI.hpp>

#include "tools/commands.h"

void add_bench_command(CLI::App& app) {
    CLI::App* bench = app.add_subcommand("bench", "measure a part of ferry on this machine");
    add_all_benches(*bench);
    add_adam_bench(*bench);
    add_attention_bench(*bench);
    add_comm_bench(*bench);
    add_io_bench(*bench);
    add_kernels_bench(*bench);
    add_swap_bench(*bench);
}
