// `ferry bench swap [PATH...]`: state of many parameters on host memory and drives, moved and
// updated as training does, without a model.
#include <spdlog/fmt/fmt.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <memory>

#include "bench_swap.h"
#include "commands.h"
#include "ferry/topology.h"
#include "fio.h"
#include "interrupt.h"
#include "svg.h"

namespace ferry::tools {
namespace {

struct SwapOptions {
    std::vector<std::string> paths{}, passes{};
    double millions = 64;  // of 2^20 parameters
    std::string host{}, block{}, svg{}, precision = "bf16", optimizer = "adamw", backend = "auto";
    double on_nvme = -1, compute_ms = 0, seconds = 1.5;
    int64_t chunk = 0, layers = 8;
    int depth = 32, threads = 0, pairs = 0;
    bool buffered = false, verify = true, compare_fio = false, json = false;
};

int64_t block_of(const SwapOptions& options) {
    if (options.block.empty()) return kMiB;
    const int64_t bytes = parse_bytes(options.block, "--block");
    if (bytes >= 4 * kKiB && bytes <= kSlotBytes && (bytes & (bytes - 1)) == 0) return bytes;
    throw Error(Trouble::usage, {.what = "transfers cannot have this size",
                                 .where = "--block",
                                 .measured = options.block,
                                 .limit = "a power of two from 4KiB to 16MiB"});
}

std::vector<train::Pass> passes_of(const SwapOptions& options) {
    using train::Pass;
    static const std::vector<std::pair<std::string, Pass>> kWords{{"out", Pass::swap_out},
                                                                  {"in", Pass::swap_in},
                                                                  {"optimizer", Pass::optimizer},
                                                                  {"step", Pass::step}};
    std::vector<Pass> passes;
    for (const auto& [word, pass] : kWords) {
        const auto& asked = options.passes;
        const bool wanted = asked.empty()
                                ? pass != Pass::step || options.compute_ms > 0
                                : std::find(asked.begin(), asked.end(), word) != asked.end();
        if (wanted) passes.push_back(pass);
    }
    return passes;
}

SwapBench bench_of(const SwapOptions& options) {
    SwapBench bench{.paths = options.paths,
                    .pairs = options.pairs > 0 ? options.pairs : (options.compare_fio ? 15 : 3),
                    .fio = options.compare_fio,
                    .seconds = options.seconds,
                    .svg = options.svg};
    bench.rehearsal = {.parameters = static_cast<int64_t>(options.millions * (1 << 20)),
                       .layers = options.layers,
                       .compute_seconds = options.compute_ms * 1e-3};
    Config& config = bench.config;
    config.precision = options.precision;
    config.optimizer.method = options.optimizer;
    config.threads = options.threads;
    config.swap.verify = options.verify;
    config.swap.bets = "off";
    // As a multiple of the optimizer's leaf; whatever is asked for is rounded up to it.
    config.swap.chunk_elements = options.chunk > 0 ? round_up(options.chunk, 4096) : 0;
    if (!options.paths.empty())
        config.swap.state_on_nvme = options.on_nvme >= 0 ? options.on_nvme : 1;
    if (!options.host.empty()) config.budgets.host_bytes = parse_bytes(options.host, "--host");
    config.io = {.backend = options.backend,
                 .block_bytes = block_of(options),
                 .queue_depth = options.depth,
                 .direct = !options.buffered};
    bench.passes = passes_of(options);
    return bench;
}

// What a user has to type to get these rows again.
std::string command_of(const SwapOptions& options) {
    std::string line = fmt::format("ferry bench swap {} --millions {:g} --layers {}",
                                   fmt::join(options.paths, " "), options.millions, options.layers);
    if (!options.host.empty()) line += " --host " + options.host;
    if (options.on_nvme >= 0) line += fmt::format(" --on-nvme {:g}", options.on_nvme);
    if (options.chunk > 0) line += fmt::format(" --chunk {}", options.chunk);
    if (!options.passes.empty())
        line += fmt::format(" --passes {}", fmt::join(options.passes, ","));
    if (options.compute_ms > 0) line += fmt::format(" --compute-ms {:g}", options.compute_ms);
    if (!options.block.empty()) line += " --block " + options.block;
    if (options.depth != 32) line += fmt::format(" --depth {}", options.depth);
    if (options.threads > 0) line += fmt::format(" --threads {}", options.threads);
    if (options.precision != "bf16") line += " --precision " + options.precision;
    if (options.optimizer != "adamw") line += " --optimizer " + options.optimizer;
    if (options.backend != "auto") line += " --backend " + options.backend;
    if (options.buffered) line += " --buffered";
    if (!options.verify) line += " --no-verify";
    if (options.pairs > 0) line += fmt::format(" --pairs {}", options.pairs);
    if (options.compare_fio) line += " --compare-fio";
    return line + fmt::format(" --seconds {:g}", options.seconds);
}

void run_swap(const SwapOptions& options) {
    const SwapBench bench = bench_of(options);
    if (!options.svg.empty()) check_picture_file("--svg", options.svg);
    nlohmann::json machine = machine_json();
    if (options.compare_fio) {
        machine["fio"] = fio_version();
        machine["fio_flags"] = fio_flags();
    }
    catch_interrupts();
    const std::vector<Row> rows = measure_swap(bench);
    if (options.json) {
        nlohmann::json object = rows_json(rows, command_of(options), machine);
        object["interrupted"] = interrupted();
        fmt::print("{}\n", object.dump());
    } else {
        const bool compared = !options.paths.empty();
        fmt::print("{}\n{}", machine_text(),
                   rows_table(rows, !compared             ? ""
                                    : options.compare_fio ? "fio"
                                                          : "plain"));
    }
    if (interrupted()) fmt::print(stderr, "ferry: interrupted; the files are removed\n");
    end_if_interrupted();
}

std::string is_a_number(const std::string& text) {
    return std::isnan(std::stod(text)) ? "not a number: " + text : "";
}

void add_what(CLI::App& command, SwapOptions& options) {
    command.add_option("paths", options.paths,
                       "directories on the drives; without one, all is in host memory");
    command.add_option("--millions", options.millions, "parameters, in units of 2^20")
        ->check(CLI::Range(0.001, 1048576.0))
        ->check(is_a_number)
        ->capture_default_str();
    command.add_option("--layers", options.layers, "that they are spread over")
        ->check(CLI::Range(1, 100000))
        ->capture_default_str();
    command.add_option("--host", options.host, "budget of host memory; default: unlimited");
    command
        .add_option("--on-nvme", options.on_nvme,
                    "least fraction of the optimizer state on the drives; default: 1")
        ->check(CLI::Range(0.0, 1.0));
    command
        .add_option("--compute-ms", options.compute_ms,
                    "of a step on the device: adds the row of a whole step")
        ->check(CLI::Range(0.0, 3.6e6));
    command
        .add_option("--passes", options.passes, "out, in, optimizer, step; default: all that fit")
        ->delimiter(',')
        ->allow_extra_args(false)
        ->check(CLI::IsMember({"out", "in", "optimizer", "step"}));
    command.add_option("--precision", options.precision, "of weights and gradients")
        ->check(CLI::IsMember({"bf16", "fp16", "fp32"}))
        ->capture_default_str();
    command.add_option("--optimizer", options.optimizer)
        ->check(CLI::IsMember({"adamw", "adam", "sgd", "lion", "adagrad"}))
        ->capture_default_str();
    command.add_option("--chunk", options.chunk, "elements; default: the planner's choice")
        ->check(CLI::Range(1, 1 << 30));
    command.add_option("--threads", options.threads, "of the optimizer; default: all cores")
        ->check(CLI::Range(1, 4096));
    command.add_option("--block", options.block, "largest transfer, 4KiB to 16MiB; default: 1MiB");
    command.add_option("--depth", options.depth, "transfers in flight, a path")
        ->check(CLI::Range(1, 4096))
        ->capture_default_str();
    command.add_option("--backend", options.backend, "auto, uring or posix")
        ->check(CLI::IsMember({"auto", "uring", "posix"}))
        ->capture_default_str();
    command.add_flag("--buffered,!--direct", options.buffered, "through the page cache");
    command.add_flag("!--no-verify", options.verify, "leave the checksums out");
}

}  // namespace
}  // namespace ferry::tools

void add_swap_bench(CLI::App& bench) {
    using namespace ferry::tools;
    const auto options = std::make_shared<SwapOptions>();
    CLI::App* command = bench.add_subcommand(
        "swap", "state moved and updated over the tiers, without a model; own files only");
    add_what(*command, *options);
    command->add_flag("--compare-fio", options->compare_fio,
                      "beside fio, in turns; else beside plain transfers of ferry's own");
    command
        ->add_option("--pairs", options->pairs,
                     "passes of each kind, each beside a slice of the other side; default: 3, with "
                     "fio 15")
        ->check(CLI::Range(1, 100000));
    command->add_option("--seconds", options->seconds, "a slice of the other side")
        ->check(CLI::Range(0.01, 3600.0))
        ->capture_default_str();
    command->add_option("--svg", options->svg, "write the last pass as it went to this file (SVG)");
    command->add_flag("--json", options->json, "one JSON object on standard output");
    command->footer(
        "GB/s to and from the drives; ratio: ferry / the other side in the same directions,\n"
        "the median over pairs. nvme read and write, h2d, d2h: GB/s of the last pass; overlap:\n"
        "seconds that all lanes were busy, over those that passed. % of bound: the longest of\n"
        "compute, the drives' own time and the update's in memory, over the time it took.\n"
        "The tiers are host memory and the drives: the device is a pause, keeps no state, and its\n"
        "steps do not bet.\n"
        "Ctrl-C ends with what is known so far; a second one kills. The files, in\n"
        "PATH/ferry-bench and PATH/ferry-bench-plain, are removed at the end, whatever the end "
        "is.");
    command->callback([options] { run_swap(*options); });
}
