// `ferry bench io PATH...`: what storage paths give, alone or beside fio.
#include <spdlog/fmt/fmt.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <iterator>
#include <memory>
#include <nlohmann/json.hpp>

#include "base/text.h"
#include "bench_io.h"
#include "bench_io_fio.h"
#include "fio.h"
#include "io_plot.h"
#include "number_options.h"
#include "tools/commands.h"
#include "tools/machine/machine_writing.h"
#include "tools/output/json_line.h"
#include "tools/output/output.h"
#include "tools/output/svg.h"
#include "tools/output/writable.h"
#include "tools/process/child_process.h"
#include "tools/process/interrupt.h"
#include "topology/topology.h"
#include "word_option.h"

namespace ferry::tools {
namespace {

struct IoOptions {
    std::vector<std::string> paths{}, modes{}, blocks{};
    std::vector<int> depths{};
    std::string size{}, plot{}, save{};
    aio::BackendKind backend = aio::BackendKind::automatic;
    double seconds = 0;
    int rings = 1, threads = 0, pairs = 15;
    bool buffered = false, integrity = false, compare_fio = false, json = false;
};

[[noreturn]] void bad_word(const char* option, const std::string& word, const char* limit,
                           const char* remedy) {
    throw Error(Trouble::usage, {.what = "this cannot be measured",
                                 .where = option,
                                 .measured = in_quotes(word),
                                 .limit = limit,
                                 .remedy = remedy});
}

template <class T>
void sort_and_unite(std::vector<T>& list) {
    std::sort(list.begin(), list.end());
    list.erase(std::unique(list.begin(), list.end()), list.end());
}

std::vector<AccessPattern> accesses_of(const std::vector<std::string>& words) {
    std::vector<AccessPattern> accesses;
    for (const std::string& word : words) {
        const auto access = pattern_from_name(word);
        if (!access)
            bad_word("--modes", word, "read, write, mixed, randread, randwrite, randmixed",
                     "name some of these, as in --modes read,randread; or leave it out for the "
                     "usual ones");
        if (std::find(accesses.begin(), accesses.end(), *access) == accesses.end())
            accesses.push_back(*access);
    }
    return accesses;
}

std::vector<int64_t> blocks_of(const std::vector<std::string>& words) {
    std::vector<int64_t> blocks;
    for (const std::string& word : words) {
        const int64_t bytes = parse_bytes(word, "--blocks");
        if (bytes < 4 * kKiB || bytes > kSlotBytes || (bytes & (bytes - 1)) != 0)
            bad_word("--blocks", word, "a power of two from 4KiB to 16MiB",
                     "give such sizes, as in --blocks 64KiB,1MiB");
        blocks.push_back(bytes);
    }
    sort_and_unite(blocks);
    return blocks;
}

int64_t size_of(const std::string& word) {
    const int64_t bytes = parse_bytes(word, "--size");
    if (bytes < kSlotBytes)
        bad_word("--size", word, "16MiB or more",
                 "give more, as in --size 1GiB; or leave it out for what fits");
    return bytes;
}

IoBench bench_of(const IoOptions& options) {
    const bool compare = options.compare_fio;
    const auto or_default = [](const auto& given, auto otherwise) {
        return given.empty() ? otherwise : given;
    };
    using Words = std::vector<std::string>;
    const Words modes{"read", "write", "mixed"}, all_modes{"read", "write", "mixed", "randread"};
    const Words large{"1MiB", "4MiB", "16MiB"},
        all{"4KiB", "64KiB", "256KiB", "1MiB", "4MiB", "16MiB"};
    IoBench bench{
        .paths = options.paths,
        .accesses = accesses_of(or_default(options.modes, compare ? modes : all_modes)),
        .blocks = blocks_of(or_default(options.blocks, compare ? large : all)),
        .depths = or_default(options.depths, compare ? std::vector{32} : std::vector{2, 8, 32}),
        .seconds = options.seconds,
        .rings = options.rings,
        .hashers = options.threads,
        .pairs = options.pairs,
        .backend = options.backend,
        .direct = !options.buffered,
        .integrity = options.integrity};
    sort_and_unite(bench.depths);
    if (!options.size.empty()) bench.bytes_per_path = size_of(options.size);
    if (bench.seconds == 0) bench.seconds = compare ? 1.5 : 0.5;
    if (compare && bench.seconds < kLeastFioSeconds)
        bad_word("--seconds", fmt::format("{:g}", bench.seconds),
                 "0.2 or more, beside fio, whose CPU time is sampled",
                 "give longer slices, or leave it out for 1.5");
    if (bench.hashers == 0) bench.hashers = std::clamp(discover_topology().cores() / 2, 1, 8);
    return bench;
}

// The command that gives these rows again.
std::string command_of(const IoOptions& options) {
    std::vector<std::string> words{"ferry", "bench", "io"};
    const auto add = [&](const char* name, const std::string& value) {
        words.insert(words.end(), {name, value});
    };
    const auto add_list = [&](const char* name, const auto& list) {
        if (!list.empty()) add(name, fmt::format("{}", fmt::join(list, ",")));
    };
    words.insert(words.end(), options.paths.begin(), options.paths.end());
    add_list("--modes", options.modes);
    add_list("--blocks", options.blocks);
    add_list("--depths", options.depths);
    if (!options.size.empty()) add("--size", options.size);
    if (options.seconds > 0) add("--seconds", fmt::format("{:g}", options.seconds));
    if (options.rings != 1) add("--rings", std::to_string(options.rings));
    if (options.threads != 0) add("--threads", std::to_string(options.threads));
    if (options.backend != aio::BackendKind::automatic)
        add("--backend", spelled(kBackendWords, options.backend));
    if (options.buffered) words.emplace_back("--buffered");
    if (options.integrity) words.emplace_back("--integrity");
    if (options.compare_fio) words.emplace_back("--compare-fio");
    if (options.compare_fio) add("--pairs", std::to_string(options.pairs));
    return shell_line(words);
}

std::string text_of(const std::vector<std::string>& left_out) {
    std::string text;
    for (const std::string& one : left_out) text += "left out: " + one + "\n";
    return text;
}

// Small random reads too, if asked for: their cost is that of the operations.
FioRows compare_all(IoBench bench, bool small_reads) {
    FioRows all = compare_with_fio(bench);
    if (!small_reads || interrupted() || all.ended_by) return all;
    bench.accesses = {{Direction::read, true}};
    bench.blocks = {4 * kKiB};
    bench.integrity = false;
    try {
        FioRows small = compare_with_fio(bench);
        std::move(small.rows.begin(), small.rows.end(), std::back_inserter(all.rows));
        std::move(small.left_out.begin(), small.left_out.end(), std::back_inserter(all.left_out));
        all.ended_by = std::move(small.ended_by);
    } catch (const Error& error) {
        all.ended_by = error;
    }
    return all;
}

void run_comparison(const IoOptions& options) {
    IoBench bench = bench_of(options);
    bench.integrity = true;  // a slice more of each pair
    nlohmann::json machine = machine_json();
    machine["fio"] = fio_version();
    machine["fio_flags"] = fio_flags();
    const FioRows result = compare_all(bench, options.modes.empty() && options.blocks.empty());
    if (options.json) {
        nlohmann::json object = rows_json(result.rows, command_of(options), machine);
        object["interrupted"] = interrupted();
        object["left_out"] = result.left_out;
        print("{}", json_line(object));
    } else {
        print("{}\n{}: {}\n\n{}{}", machine_text(), machine["fio"].get<std::string>(), fio_flags(),
              rows_table(result.rows, "fio"), text_of(result.left_out));
    }
    if (result.ended_by) throw Error(*result.ended_by);
}

void print_sweep(const IoOptions& options, const IoResult& result) {
    const std::vector<Row> rows = rows_of(result);
    if (options.json) {
        nlohmann::json object = rows_json(rows, command_of(options), machine_json());
        object["interrupted"] = interrupted();
        object["settings"] = settings_json(result.settings);
        object["left_out"] = result.left_out;
        return print("{}", json_line(object));
    }
    print("{}\n{}{}", machine_text(), rows_table(rows, ""), text_of(result.left_out));
    if (options.plot.empty()) print("{}", heat_maps_of(result));
    print("\n");
    for (const IoSettings& settings : result.settings) print("{}", text_of(settings));
    if (result.settings.empty() && !interrupted() && !result.ended_by)
        print("no settings: they follow from read, write and mixed together (--modes)\n");
}

void run_sweep(const IoOptions& options) {
    const IoResult result = measure_io(bench_of(options));
    print_sweep(options, result);
    // A picture that cannot be written costs no settings: these are what others go by.
    if (!options.save.empty() && !interrupted()) save_paths(options.save, result.settings);
    if (!options.plot.empty() && !result.points.empty())
        write_picture("--plot", options.plot, svg_of(result, machine_text()));
    if (result.ended_by) throw Error(*result.ended_by);
}

// A name goes into JSON, XML or fio's command line only as text.
void check_names_are_text(const std::vector<std::string>& paths) {
    for (const std::string& path : paths) {
        const auto control = [](char c) { return static_cast<unsigned char>(c) < ' ' || c == 127; };
        const bool utf8 = first_bad_byte(path) == std::string::npos;
        if (utf8 && std::none_of(path.begin(), path.end(), control)) continue;
        throw Error(Trouble::usage,
                    {.what = "the path's name is no text: it holds a control character or is not "
                             "UTF-8",
                     .where = shown(path),
                     .remedy = "give it another name; or leave out --json, --save, --plot and "
                               "--compare-fio"});
    }
}

void check_settings_can_be_known(const IoBench& bench) {
    for (const Direction direction : {Direction::read, Direction::write, Direction::mixed})
        if (std::find(bench.accesses.begin(), bench.accesses.end(), AccessPattern{direction}) ==
            bench.accesses.end())
            bad_word("--save", name_of(AccessPattern{direction}) + " is not among --modes",
                     "the settings follow from read, write and mixed together",
                     "add it to --modes, or leave --modes out");
}

void run_io(const IoOptions& options) {
    const bool names = options.json || options.compare_fio;
    if (names || !options.save.empty() || !options.plot.empty())
        check_names_are_text(options.paths);
    if (!options.save.empty()) check_settings_can_be_known(bench_of(options));
    if (!options.save.empty()) check_machine_file(options.save);
    if (!options.plot.empty()) check_picture_file("--plot", options.plot);
    check_differ("--plot", options.plot, "--save", options.save);
    catch_interrupts();
    options.compare_fio ? run_comparison(options) : run_sweep(options);
    if (interrupted()) std::fputs("ferry: interrupted; the files are removed\n", stderr);
    end_if_interrupted();
}

void add_what(CLI::App& command, IoOptions& options) {
    command.add_option("paths", options.paths, "directories on the drives")->required();
    command
        .add_option("--modes", options.modes,
                    "of read, write, mixed, randread, randwrite, randmixed, with commas")
        ->delimiter(',')
        ->allow_extra_args(false);
    command.add_option("--blocks", options.blocks, "transfer sizes, 4KiB to 16MiB, with commas")
        ->delimiter(',')
        ->allow_extra_args(false);
    command.add_option("--depths", options.depths, "transfers in flight, a ring, with commas")
        ->delimiter(',')
        ->allow_extra_args(false)
        ->check(CLI::Range(1, 4096));
    command.add_option("--size", options.size,
                       "of the files, a path, from 16MiB; default: 2GiB, or less");
    command.add_option("--seconds", options.seconds, "a point, or a slice beside fio")
        ->check(number_within(0.01, 3600));
    command.add_option("--rings,--jobs", options.rings, "rings a path; jobs of fio")
        ->check(CLI::Range(1, kRingsMax))
        ->capture_default_str();
    add_word_option(command, "--backend", options.backend, kBackendWords, "auto, uring or posix");
    command.add_flag("--buffered,!--direct", options.buffered, "through the page cache");
    command.add_flag("--integrity", options.integrity, "seal what is written, verify what is read");
    command
        .add_option("--threads", options.threads,
                    "that seal and verify; default: half the cores; 1: the one that submits")
        ->check(CLI::Range(1, 256));
}

}  // namespace
}  // namespace ferry::tools

void add_io_bench(CLI::App& bench) {
    using namespace ferry::tools;
    const auto options = std::make_shared<IoOptions>();
    CLI::App* command = bench.add_subcommand(
        "io", "bandwidth and CPU time of storage paths; only files of its own are touched");
    add_what(*command, *options);
    CLI::Option* fio = command->add_flag("--compare-fio", options->compare_fio,
                                         "beside fio, in turns, on the same files");
    command->add_option("--pairs", options->pairs, "slices of each side, with --compare-fio")
        ->check(CLI::Range(1, 100000))
        ->capture_default_str();
    command->add_option("--plot", options->plot, "write the picture to this file (SVG)")
        ->excludes(fio);
    command->add_option("--save", options->save, "write the settings found (docs/machine.md)")
        ->excludes(fio);
    command->add_flag("--json", options->json, "one JSON object on standard output");
    command->footer(
        "About a minute a path; beside fio about a minute a line of the table.\n"
        "Ctrl-C ends with what is known so far; a second one kills. The files, in\n"
        "PATH/ferry-bench, are removed at the end, whatever the end is.\n"
        "Example: ferry bench io /mnt/nvme0 --compare-fio");
    command->callback([options] { run_io(*options); });
}
