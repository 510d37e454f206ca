// `ferry bench --all --save FILE`: every measurement that planning goes by, in about half a minute.
#include <spdlog/fmt/fmt.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>

#include "bench_io.h"
#include "bench_rows.h"
#include "tools/commands.h"
#include "tools/machine/find_measurements.h"
#include "tools/machine/machine_writing.h"
#include "tools/options/override_options.h"
#include "tools/output/json_line.h"
#include "tools/output/output.h"
#include "tools/process/child_process.h"
#include "tools/process/interrupt.h"
#include "train/setup/from_config.h"

namespace ferry::tools {
namespace {

struct AllOptions {
    bool all = false, json = false;
    std::string save{}, config{};
    Overrides overrides{};
    std::vector<std::string> paths{};
    train::RankCount count{.ranks = 1, .on_a_host = 0};  // on_a_host 0: all of them
};

[[noreturn]] void nothing_asked() {
    throw Error(Trouble::usage,
                {.what = "it is not said what to measure",
                 .where = "ferry bench",
                 .remedy = "name a benchmark (adam, comm, io, kernels, swap), or give --all; "
                           "`ferry bench --help` lists them"});
}

// Without a configuration: links need some model's buffers, and its kernels say nothing.
Config stand_in() {
    Config config;
    config.model = {.hidden = 512,
                    .layers = 2,
                    .heads = 8,
                    .kv_heads = 8,
                    .head_dim = 64,
                    .intermediate = 1408,
                    .vocab = 4096};
    config.batch = {.sequence = 128, .micro_batch = 1, .micro_batches = 1};
    config.precision = DType::bf16;
    config.swap.chunk_elements = kMiB;
    return config;
}

class AllBenches {
public:
    explicit AllBenches(const AllOptions& options)
        : options_(options),
          config_(options.config.empty() ? stand_in()
                                         : options.overrides.checked(load_config(
                                               options.config, options.overrides.keys))),
          paths_(options.paths) {
        for (const NvmePath& path : config_.budgets.nvme) {
            const bool named = std::find(paths_.begin(), paths_.end(), path.path) != paths_.end();
            if (!named) paths_.push_back(path.path);
        }
    }

    void run() {
        measure_links();
        if (!paths_.empty() && !interrupted()) measure_paths();
        print();
    }

private:
    void measure_links() {
        const train::RankCount count = on_hosts(options_.count);
        const auto predictor = train::Predictor::make(config_, count);
        require_memory_to_measure(*predictor, {});
        cost::Measurements measurements = predictor->measure(
            predictor->plan(train::request_of(config_)), train::Predictor::Memory::of_machine);
        if (options_.config.empty()) measurements.kernels.seconds.clear();
        add("update of the optimizer", measurements.dram_bytes_per_s);
        rows_.push_back({.name = "overhead of an update",
                         .value = measurements.update_overhead_s * 1e6,
                         .unit = "us"});
        rows_.push_back({.name = "an update out of place, in place",
                         .value = measurements.out_of_place,
                         .unit = "x"});
        add("update by the device", measurements.device_bytes_per_s);
        if (measurements.device_copy_bytes_per_s > 0)
            add("copies within the device", measurements.device_copy_bytes_per_s);
        add("checksums, one thread", measurements.check_bytes_per_s);
        add("copies from the device", measurements.copy_bytes_per_s);
        if (measurements.product_flops_per_s > 0)
            rows_.push_back({.name = "a large product",
                             .value = measurements.product_flops_per_s * 1e-9,
                             .unit = "GFLOP/s"});
        for (const auto& [kind, seconds] : measurements.kernels.seconds) {
            rows_.push_back({.name = "kernel: " + cost::KernelTimes::name_of(kind),
                             .value = seconds * 1e3,
                             .unit = "ms"});
        }
        if (options_.save.empty()) return;
        MeasurementsOf what = what_is_measured(*predictor);
        what.at_once = predictor->measured_at_once();
        save_measurements(options_.save, what, measurements);
    }

    void measure_paths() {
        const IoResult result = measure_io({.paths = paths_,
                                            .accesses = {{Direction::read, false},
                                                         {Direction::write, false},
                                                         {Direction::mixed, false}},
                                            .blocks = {256 * kKiB, kMiB, 4 * kMiB},
                                            .depths = {8, 32},
                                            .bytes_per_path = 0,
                                            .seconds = 0.3});
        for (const IoSettings& path : result.settings) {
            add(path.path + ": read", path.read.gb_per_s() * 1e9);
            add(path.path + ": write", path.write.gb_per_s() * 1e9);
            add(path.path + ": mixed", path.mixed.gb_per_s() * 1e9);
        }
        if (!options_.save.empty() && !interrupted()) save_paths(options_.save, result.settings);
        if (result.ended_by) throw Error(*result.ended_by);
    }

    void add(std::string name, double bytes_per_s) {
        rows_.push_back({.name = std::move(name), .value = bytes_per_s * 1e-9, .unit = "GB/s"});
    }

    std::string command() const {
        std::vector<std::string> words{"ferry", "bench", "--all"};
        const auto add = [&](const char* name, const std::string& value) {
            words.insert(words.end(), {name, value});
        };
        if (!options_.config.empty()) add("--config", options_.config);
        for (const std::string& one : options_.overrides.keys) add("--set", one);
        for (const std::string& path : options_.paths) add("--path", path);
        if (options_.count.ranks > 1) add("--ranks", std::to_string(options_.count.ranks));
        if (options_.count.on_a_host > 0)
            add("--ranks-per-host", std::to_string(options_.count.on_a_host));
        return shell_line(words);
    }

    void print() const {
        if (options_.json) {
            nlohmann::json object = rows_json(rows_, command(), machine_json());
            object["interrupted"] = interrupted();
            return tools::print("{}", json_line(object));
        }
        tools::print("{}\n{}", machine_text(), rows_table(rows_, ""));
        if (paths_.empty()) tools::print("no storage was measured: give --path or --config\n");
    }

    const AllOptions& options_;
    const Config config_;
    std::vector<std::string> paths_;
    std::vector<Row> rows_{};
};

void run_all(const AllOptions& options) {
    if (!options.all) nothing_asked();
    if (!options.save.empty()) check_machine_file(options.save);
    catch_interrupts();
    AllBenches(options).run();
    end_if_interrupted();
}

}  // namespace
}  // namespace ferry::tools

void add_all_benches(CLI::App& bench) {
    using namespace ferry::tools;
    const auto options = std::make_shared<AllOptions>();
    bench.require_subcommand(0, 1);
    CLI::Option* all = bench.add_flag("--all", options->all, "what planning needs, of everything");
    bench
        .add_option("--save", options->save,
                    "with --all: write the measurements (docs/machine.md) for plan and train")
        ->needs(all);
    CLI::Option* config = bench
                              .add_option("--config", options->config,
                                          "with --all: this model's kernels too, its paths")
                              ->needs(all);
    CLI::Option* ranks =
        bench.add_option("--ranks", options->count.ranks, "with --config: as one of so many ranks")
            ->needs(config)
            ->check(CLI::Range(1, 1 << 16));
    bench
        .add_option("--ranks-per-host", options->count.on_a_host,
                    "neighbouring ranks on each host, which share its cores, memory and drives "
                    "(default: all)")
        ->needs(ranks)
        ->check(CLI::Range(1, 1 << 16));
    for (CLI::Option* option :
         add_overrides(bench, options->overrides, "with --config: override a key of it"))
        option->needs(config);
    bench.add_option("--path", options->paths, "with --all: a directory on a drive")
        ->needs(all)
        ->allow_extra_args(false);
    bench.add_flag("--json", options->json, "with --all: one JSON object on standard output")
        ->needs(all);
    bench.footer("Example: ferry bench --all --config my.json --save machine.json");
    bench.callback([options, &bench] {
        if (bench.get_subcommands().empty()) run_all(*options);
    });
}
