// `ferry bench swap [PATH...]`: state of many parameters on a device, host memory and drives, moved
// and updated as training does, without a model.
#include <spdlog/fmt/fmt.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <memory>

#include "bench_swap.h"
#include "ferry/optim.h"
#include "fio.h"
#include "number_options.h"
#include "tools/commands.h"
#include "tools/output/json_line.h"
#include "tools/output/output.h"
#include "tools/output/svg.h"
#include "tools/process/interrupt.h"
#include "topology/topology.h"
#include "word_option.h"

namespace ferry::tools {
namespace {

// No matrices are here.
constexpr config::Words<train::Pass, 4> kPassWords{{{train::Pass::swap_out, "out"},
                                                    {train::Pass::swap_in, "in"},
                                                    {train::Pass::optimizer, "optimizer"},
                                                    {train::Pass::step, "step"}}};

struct SwapOptions {
    std::vector<std::string> paths{};
    std::vector<train::Pass> passes{};
    double millions = 64;  // of 2^20 parameters
    std::string host{}, block{}, svg{}, gpu_memory{};
    DeviceKind device = DeviceKind::cpu;
    DType precision = DType::bf16;
    optim::Method optimizer = optim::Method::adamw;
    aio::BackendKind backend = aio::BackendKind::automatic;
    double on_device = 0, compute_ms = 0, seconds = 1.5;
    std::optional<double> on_nvme{};  // none: all that the device does not keep
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
                                 .limit = "a power of two from 4KiB to 16MiB",
                                 .remedy = "give one of these, or leave --block out"});
}

// 0: the planner's choice.
std::optional<int64_t> chunk_of(const SwapOptions& options) {
    if (options.chunk == 0) return std::nullopt;
    if (options.chunk % optim::kLeaf == 0) return options.chunk;
    throw Error(Trouble::usage,
                {.what = "chunks cannot have this size",
                 .where = "--chunk",
                 .measured = fmt::format("{} elements", options.chunk),
                 .limit = fmt::format("multiples of {}", optim::kLeaf),
                 .remedy = fmt::format("give {}", round_up(options.chunk, optim::kLeaf))});
}

std::vector<train::Pass> passes_of(const SwapOptions& options) {
    std::vector<train::Pass> passes;
    for (const auto& [pass, word] : kPassWords) {
        const bool wanted = options.passes.empty()
                                ? pass != train::Pass::step || options.compute_ms > 0
                                : std::ranges::count(options.passes, pass) > 0;
        if (wanted) passes.push_back(pass);
    }
    return passes;
}

// The least share of the optimizer state on the drives: all that the device is not to keep.
double stored_part(const SwapOptions& options) {
    if (!options.on_nvme) return 1 - options.on_device;
    constexpr double kRounding = 1e-9;
    if (options.on_device + *options.on_nvme <= 1 + kRounding) return *options.on_nvme;
    throw Error(Trouble::usage,
                {.what = "more than all of the optimizer state is asked for",
                 .where = "--on-device, --on-nvme",
                 .measured = fmt::format("{:g} + {:g}", options.on_device, *options.on_nvme),
                 .limit = "1",
                 .remedy = "lower one of them, or leave --on-nvme out: then the drives get what "
                           "the device does not"});
}

// Refuses options that need drives where there are none.
void check_drives(const SwapOptions& options) {
    if (!options.paths.empty()) return;
    for (const auto& [option, asked] : {std::pair{"--on-nvme", options.on_nvme.value_or(0) > 0},
                                        {"--compare-fio", options.compare_fio}}) {
        if (asked)
            throw Error(Trouble::usage, {.what = "without a path all is in memory",
                                         .where = option,
                                         .remedy = "name a directory on a drive"});
    }
}

SwapBench bench_of(const SwapOptions& options) {
    SwapBench bench{.paths = options.paths,
                    .pairs = options.pairs > 0 ? options.pairs : (options.compare_fio ? 15 : 3),
                    .fio = options.compare_fio,
                    .seconds = options.seconds,
                    .draws = !options.svg.empty()};
    bench.rehearsal = {.parameters = static_cast<int64_t>(options.millions * (1 << 20)),
                       .layers = options.layers,
                       .compute_seconds = options.compute_ms * 1e-3,
                       .measures = true};
    Config& config = bench.config;
    config.precision = options.precision;
    config.optimizer.method = options.optimizer;
    if (options.threads > 0) config.threads = options.threads;
    config.swap.verify = options.verify;
    config.swap.speculate = Speculate::off;
    config.swap.chunk_elements = chunk_of(options);
    config.device = options.device;
    config.swap.state_on_device = options.on_device;
    if (!options.gpu_memory.empty())
        config.budgets.device_bytes = parse_bytes(options.gpu_memory, "--gpu-memory");
    if (!options.paths.empty()) config.swap.state_on_nvme = stored_part(options);
    if (!options.host.empty()) config.budgets.host_bytes = parse_bytes(options.host, "--host");
    config.io = {.backend = options.backend,
                 .block_bytes = block_of(options),
                 .queue_depth = options.depth,
                 .direct = !options.buffered};
    bench.passes = passes_of(options);
    bench.all_passes = !options.passes.empty();
    return bench;
}

// The command that gives these rows again.
std::string command_of(const SwapOptions& options) {
    std::string line = fmt::format("ferry bench swap {} --millions {:g} --layers {}",
                                   fmt::join(options.paths, " "), options.millions, options.layers);
    if (options.device != DeviceKind::cpu)
        line += " --device " + spelled(kDeviceWords, options.device);
    if (!options.gpu_memory.empty()) line += " --gpu-memory " + options.gpu_memory;
    if (options.on_device > 0) line += fmt::format(" --on-device {:g}", options.on_device);
    if (!options.host.empty()) line += " --host " + options.host;
    if (options.on_nvme) line += fmt::format(" --on-nvme {:g}", *options.on_nvme);
    if (options.chunk > 0) line += fmt::format(" --chunk {}", options.chunk);
    std::vector<std::string> passes;
    passes.reserve(options.passes.size());
    for (const train::Pass pass : options.passes) passes.push_back(spelled(kPassWords, pass));
    if (!passes.empty()) line += fmt::format(" --passes {}", fmt::join(passes, ","));
    if (options.compute_ms > 0) line += fmt::format(" --compute-ms {:g}", options.compute_ms);
    if (!options.block.empty()) line += " --block " + options.block;
    if (options.depth != 32) line += fmt::format(" --depth {}", options.depth);
    if (options.threads > 0) line += fmt::format(" --threads {}", options.threads);
    if (options.precision != DType::bf16)
        line += " --precision " + spelled(kTypeWords, options.precision);
    if (options.optimizer != optim::Method::adamw)
        line += " --optimizer " + spelled(kMethodWords, options.optimizer);
    if (options.backend != aio::BackendKind::automatic)
        line += " --backend " + spelled(kBackendWords, options.backend);
    if (options.buffered) line += " --buffered";
    if (!options.verify) line += " --no-verify";
    if (options.pairs > 0) line += fmt::format(" --pairs {}", options.pairs);
    if (options.compare_fio) line += " --compare-fio";
    return line + fmt::format(" --seconds {:g}", options.seconds);
}

// The configuration's keys are this command's options, and what else the planner and the volume
// advise is said in them; longer texts first.
std::string in_options(std::string text) {
    static const std::vector<std::pair<std::string, std::string>> kOptions{
        {", or lower batch.micro_batch or batch.sequence", ""},  // there are none
        {"or correct the model's shape", "or lower --millions"},
        {"add a path to budgets.nvme", "name a directory on a drive"},
        {"with a path in budgets.nvme for the rest",
         "with a directory on a drive for the rest, or lower --millions"},
        {"or give the path a smaller size", "or lower --millions"},
        {", or add a path", ", name another directory, or lower --millions"},
        {"model, ", "--millions, "},
        {"the model's state", "the state"},
        {"the model has", "there are"},
        {"budgets.device", "--gpu-memory"},
        {"budgets.host", "--host"},
        {"swap.state_on_device", "--on-device"},
        {"swap.chunk_elements", "--chunk"}};
    for (const auto& [key, option] : kOptions) {
        for (size_t at = text.find(key); at != std::string::npos; at = text.find(key, at)) {
            text.replace(at, key.size(), option);
            at += option.size();
        }
    }
    return text;
}

SwapResult measure(const SwapBench& bench) {
    try {
        return measure_swap(bench);
    } catch (const Error& error) {
        Problem problem = error.problem();
        problem.what = in_options(problem.what);
        problem.where = in_options(problem.where);
        problem.remedy = in_options(problem.remedy);
        throw Error(error.trouble(), std::move(problem));
    }
}

void run_swap(const SwapOptions& options) {
    check_drives(options);
    const SwapBench bench = bench_of(options);
    if (!options.svg.empty()) check_picture_file("--svg", options.svg);
    nlohmann::json machine = machine_json();
    if (options.compare_fio) {
        machine["fio"] = fio_version();
        machine["fio_flags"] = fio_flags();
    }
    catch_interrupts();
    const auto [rows, picture] = measure(bench);
    if (options.json) {
        nlohmann::json object = rows_json(rows, command_of(options), machine);
        object["interrupted"] = interrupted();
        print("{}", json_line(object));
    } else {
        const bool compared = !options.paths.empty();
        print("{}\n{}", machine_text(),
              rows_table(rows, !compared             ? ""
                               : options.compare_fio ? "fio"
                                                     : "plain"));
    }
    if (!picture.empty()) write_picture("--svg", options.svg, picture);
    if (interrupted()) std::fputs("ferry: interrupted; the files are removed\n", stderr);
    end_if_interrupted();
}

void add_what(CLI::App& command, SwapOptions& options) {
    command.add_option("paths", options.paths,
                       "directories on the drives; without one, all is in memory");
    command.add_option("--millions", options.millions, "parameters, in units of 2^20")
        ->check(number_within(0.001, 1048576.0))
        ->capture_default_str();
    command.add_option("--layers", options.layers, "that they are spread over")
        ->check(CLI::Range(1, 100000))
        ->capture_default_str();
    add_word_option(command, "--device", options.device, kDeviceWords,
                    "cpu: the host's processors; cuda: its GPU");
    command.add_option("--gpu-memory", options.gpu_memory,
                       "budget of the device's memory, also of the cpu's; default: on cuda all "
                       "there is, on cpu what its buffers take, or with state there no limit");
    command
        .add_option("--on-device", options.on_device,
                    "fraction of the optimizer state that the device keeps and updates")
        ->check(number_within(0.0, 1.0))
        ->capture_default_str();
    command.add_option("--host", options.host, "budget of host memory; default: unlimited");
    command
        .add_option("--on-nvme", options.on_nvme,
                    "least fraction of the optimizer state on the drives; default: what "
                    "--on-device leaves")
        ->check(number_within(0.0, 1.0));
    command
        .add_option("--compute-ms", options.compute_ms,
                    "that the device computes in a step: adds the row of a whole step")
        ->check(number_within(0.0, 3.6e6));
    command
        .add_option_function<std::vector<std::string>>(
            "--passes",
            [&options](const std::vector<std::string>& words) {
                for (const std::string& word : words)
                    options.passes.push_back(value_of(kPassWords, word));
            },
            "of out, in, optimizer, step, with commas; default: all that fit")
        ->delimiter(',')
        ->allow_extra_args(false)
        ->check(one_of(kPassWords));
    add_word_option(command, "--precision", options.precision, kTypeWords,
                    "of weights and gradients");
    add_word_option(command, "--optimizer", options.optimizer, kMethodWords, "of the updates");
    command.add_option("--chunk", options.chunk, "elements; default: the planner's choice")
        ->check(CLI::Range(1, 1 << 30));
    command.add_option("--threads", options.threads, "of the optimizer; default: all cores")
        ->check(CLI::Range(1, 4096));
    command.add_option("--block", options.block, "largest transfer, 4KiB to 16MiB; default: 1MiB");
    command.add_option("--depth", options.depth, "transfers in flight, a path")
        ->check(CLI::Range(1, 4096))
        ->capture_default_str();
    add_word_option(command, "--backend", options.backend, kBackendWords, "auto, uring or posix");
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
        ->check(number_within(0.01, 3600.0))
        ->capture_default_str();
    command->add_option("--svg", options->svg, "write the last pass as it went to this file (SVG)");
    command->add_flag("--json", options->json, "one JSON object on standard output");
    command->footer(
        "GB/s to and from the drives; ratio: ferry / the other side in the same directions,\n"
        "the median over pairs. nvme read and write, h2d, d2h: GB/s of the last pass; dram: of "
        "its\n"
        "updates in host memory; overlap: seconds that all lanes were busy, over those that\n"
        "passed. x of bound: the longest of\n"
        "compute, copies of one direction, the drives' own time and the updates' in memory, each\n"
        "alone, over the time it took.\n"
        "The tiers are the device's memory, the host's and the drives. What the device keeps it\n"
        "updates itself, and copies to and from it are real; what else it would compute is a\n"
        "pause of its compute stream. Steps do not speculate.\n"
        "Ctrl-C ends with what is known so far; a second one kills. The files, in\n"
        "PATH/ferry-bench and PATH/ferry-bench-plain, are removed at the end, whatever the end "
        "is.\n"
        "Example: ferry bench swap /mnt/nvme0 --compute-ms 200 --svg step.svg");
    command->callback([options] { run_swap(*options); });
}
