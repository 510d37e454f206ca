// `mpirun -n N ferry bench comm`: bytes between ranks.
#include <spdlog/fmt/fmt.h>
#include <spdlog/fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>

#include "bench_comm.h"
#include "number_options.h"
#include "tools/commands.h"
#include "tools/machine/machine_writing.h"
#include "tools/output/json_line.h"
#include "tools/output/output.h"
#include "word_option.h"

namespace ferry::tools {
namespace {

struct CommBenchOptions {
    std::vector<std::string> sizes{"1MiB", "16MiB", "64MiB", "256MiB"};
    DeviceKind device = DeviceKind::cpu;
    int rounds = 20, repeats = 5, tensor = 1, sequence = 1, ranks_per_host = 1;
    double timeout_seconds = 60;
    std::string save{};
    bool json = false;
};

std::vector<int64_t> bytes_of(const std::vector<std::string>& sizes) {
    std::vector<int64_t> bytes;
    for (const std::string& size : sizes) {
        bytes.push_back(parse_bytes(size, "--sizes"));
        if (bytes.back() > 0) continue;
        throw Error(Trouble::usage, {.what = "nothing to measure",
                                     .where = "--sizes",
                                     .measured = size,
                                     .remedy = "give a size above 0, such as 16MiB"});
    }
    return bytes;
}

std::string command_of(const CommBenchOptions& options, int ranks) {
    const std::string start = ranks > 1 ? fmt::format("mpirun -n {} ", ranks) : "";
    std::string line =
        fmt::format("{}ferry bench comm --device {} --sizes {} --rounds {} --repeats {}", start,
                    spelled(kDeviceWords, options.device), fmt::join(options.sizes, ","),
                    options.rounds, options.repeats);
    if (options.tensor > 1) line += fmt::format(" --tensor {}", options.tensor);
    if (options.sequence > 1) line += fmt::format(" --sequence {}", options.sequence);
    if (options.ranks_per_host > 1)
        line += fmt::format(" --ranks-per-host {}", options.ranks_per_host);
    return line;
}

// Before anything is measured; the first rank writes the file.
void check_save(const std::string& file, const std::vector<int64_t>& sizes,
                comm::Communicator& ranks) {
    if (ranks.size() == 1)
        throw Error(Trouble::usage, {.what = "one rank has nobody to exchange anything with",
                                     .where = "--save",
                                     .remedy = "mpirun -n N ferry bench comm --save " + file});
    if (std::ranges::min(sizes) == std::ranges::max(sizes))
        throw Error(Trouble::usage, {.what = "the measurements of a machine file need two sizes",
                                     .where = "--sizes",
                                     .remedy = "give two that differ, such as 16MiB,256MiB"});
    if (ranks.rank() != 0) return;
    try {
        check_machine_file(file);
    } catch (const Error& error) {
        ranks.abandon(error.what());
        throw;
    }
}

void run_comm(const CommBenchOptions& options) {
    const CommBench bench{bytes_of(options.sizes),
                          options.rounds,
                          options.repeats,
                          {.sequence = options.sequence, .tensor = options.tensor},
                          options.ranks_per_host};
    const comm::CommOptions timeout{.timeout_seconds = options.timeout_seconds};
    const auto executor = make_thread_executor();
    auto ranks =
        comm::launched_as_rank() ? comm::make_mpi(*executor, timeout) : comm::make_solo(*executor);
    if (!options.save.empty()) check_save(options.save, bench.sizes, *ranks);
    const int gpu = options.device == DeviceKind::cuda ? comm::gpu_of_rank(*ranks, *executor) : 0;
    const auto device = Device::open(options.device, *executor, gpu);
    // Twice the largest, for an exchange.
    const int64_t most = *std::ranges::max_element(bench.sizes);
    device->reserve(2 * round_up(most, 4096));
    if (options.device == DeviceKind::cuda)
        ranks = comm::make_nccl(*device, *executor, std::move(ranks), timeout);
    const CommRows measured = measure_comm(bench, *ranks, *executor, *device);
    if (ranks->rank() != 0) return;
    if (!options.save.empty()) {
        MeasurementsOf of;
        of.count = {ranks->size(), ranks->local_size()};
        of.groups = bench.groups;
        of.ranks_per_host = bench.ranks_per_host;
        of.by = ranks->kind();
        save_comm(options.save, of, comm_rates(measured));
    }
    const std::vector<Row> rows = measured.all();
    nlohmann::json machine = machine_json();
    machine["ranks"] = ranks->size();
    machine["ranks_on_this_machine"] = ranks->local_size();
    machine["by"] = ranks->kind();
    if (options.json) {
        print("{}", json_line(rows_json(rows, command_of(options, ranks->size()), machine)));
    } else {
        print("{}\n{} ranks by {}\n{}", machine_text(), ranks->size(), ranks->kind(),
              rows_table(rows, ""));
    }
}

}  // namespace
}  // namespace ferry::tools

void add_comm_bench(CLI::App& bench) {
    using namespace ferry::tools;
    const auto options = std::make_shared<CommBenchOptions>();
    CLI::App* command = bench.add_subcommand(
        "comm", "all-gather and exchange between the ranks that mpirun starts");
    command
        ->add_option("--sizes", options->sizes,
                     "bytes of all ranks together, with commas; default: 1MiB,16MiB,64MiB,256MiB")
        ->delimiter(',')
        ->allow_extra_args(false);
    add_word_option(*command, "--device", options->device, kDeviceWords,
                    "cpu: host memory by MPI; cuda: NCCL");
    command->add_option("--rounds", options->rounds, "operations in a row")
        ->check(CLI::Range(1, 200))
        ->capture_default_str();
    command->add_option("--repeats", options->repeats, "of that; the median counts")
        ->check(CLI::Range(1, 1000))
        ->capture_default_str();
    command
        ->add_option("--tensor", options->tensor,
                     "neighbours that share tensors, as parallel.tensor of a run")
        ->check(CLI::Range(1, 64))
        ->capture_default_str();
    command
        ->add_option("--sequence", options->sequence,
                     "of ranks with the same tensors those that share sequences")
        ->check(CLI::Range(1, 64))
        ->capture_default_str();
    command
        ->add_option("--ranks-per-host", options->ranks_per_host,
                     "neighbouring ranks of each host, as zero.ranks_per_host of a run: with 2 or "
                     "more what they exchange inside it, and between hosts, is measured as well")
        ->check(CLI::Range(1, 1024))
        ->capture_default_str();
    command->add_option("--timeout", options->timeout_seconds, "seconds, of one operation")
        ->check(number_within(0.1, 1e6))
        ->capture_default_str();
    command->add_option(
        "--save", options->save,
        "write the measurements of these ranks (docs/machine.md) for plan and train");
    command->add_flag("--json", options->json, "one JSON object on standard output");
    command->footer(
        "GB/s: bus bandwidth as nccl-tests defines it, bytes that a rank takes from others over\n"
        "the slowest rank's time; of one rank alone, its copies. The first rank prints.\n"
        "Example: mpirun --bind-to none -n 2 ferry bench comm --device cuda --save machine.json");
    command->callback([options] { run_comm(*options); });
}
