// `ferry bench adam`: the optimizer's speed on this machine, beside a loop written by hand.
#include <spdlog/fmt/fmt.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "adam_deepspeed.h"
#include "adam_plain.h"
#include "base/log.h"
#include "base/text.h"
#include "bench_adam.h"
#include "ferry/error.h"
#include "number_options.h"
#include "tools/commands.h"
#include "tools/output/json_line.h"
#include "tools/output/output.h"
#include "topology/topology.h"
#include "word_option.h"

namespace ferry::tools {
namespace {

constexpr config::Words<DType, 2> kWeightWords{{{DType::bf16, "bf16"}, {DType::f16, "fp16"}}};
constexpr config::Words<DType, 3> kGradientWords{
    {{DType::bf16, "bf16"}, {DType::f16, "fp16"}, {DType::f32, "fp32"}}};
constexpr config::Words<StateFormat, 5> kFormatWords{
    {{{.moment_type = MomentType::bf16}, "bf16-moments"},
     {{.moment_type = MomentType::int8}, "int8-moments"},
     {{.split = true}, "split"},
     {{.moment_type = MomentType::bf16, .split = true}, "split-bf16-moments"},
     {{.moment_type = MomentType::int8, .split = true}, "split-int8-moments"}}};

struct AdamOptions {
    double millions = 32;  // of 2^20 elements
    std::vector<int> threads{};
    std::vector<DType> gradients{DType::bf16, DType::f32};
    std::vector<optim::Method> methods{optim::Method::adamw};
    std::vector<StateFormat> formats{};
    std::vector<std::string> targets{};  // Highway's names, and "all"
    DType weight = DType::bf16;
    std::string deepspeed{};
    int pairs = 15;
    bool in_place_only = false, json = false;
};

// "all" stands for every one of them.
std::vector<std::string> known_targets(const std::vector<std::string>& words) {
    const std::vector<std::string> known = optim::supported_targets();
    std::vector<std::string> out;
    for (const std::string& word : words) {
        if (word == "all") {
            out.insert(out.end(), known.begin(), known.end());
        } else if (std::find(known.begin(), known.end(), word) != known.end()) {
            out.push_back(word);
        } else {
            std::string all;
            for (const std::string& one : known) all += one + ", ";
            throw Error(Trouble::usage, {.what = "nothing of that name can be measured here",
                                         .where = "--target",
                                         .measured = in_quotes(word),
                                         .limit = all + "all",
                                         .remedy = "name some of these"});
        }
    }
    return out;
}

// At most a thread a core: ferry's team would start no more, and the loop by hand would pay for
// threads that only wait for each other.
std::vector<int> thread_counts(const std::vector<int>& wished, int cores) {
    if (wished.empty()) return cores > 1 ? std::vector{1, cores} : std::vector{1};
    std::vector<int> counts;
    for (const int threads : wished) {
        if (threads > cores) {
            log_warn(fmt::format("--threads {}: this process has {} cores; measured on {} threads",
                                 threads, cores, cores));
        }
        const int count = std::min(threads, cores);
        if (std::find(counts.begin(), counts.end(), count) == counts.end()) counts.push_back(count);
    }
    return counts;
}

void need_memory(const AdamBench& what, int64_t left) {
    const int64_t bytes = bytes_of(what);
    constexpr int64_t kForThreads = 64 * kMiB;
    const int64_t limit = std::max<int64_t>(left - kForThreads, 0);
    if (bytes <= limit) return;
    throw Error(Trouble::does_not_fit,
                {.what = "the benchmark's arrays do not fit this machine's memory",
                 .where = "--millions",
                 .measured = std::to_string(bytes) + " B",
                 .limit = std::to_string(limit) + " B, what is left of it",
                 .remedy = what.out_of_place ? "measure fewer elements, or only --in-place"
                                             : "measure fewer elements"});
}

AdamBench bench_of(const AdamOptions& options) {
    AdamBench what;
    what.count = static_cast<int64_t>(options.millions * (1 << 20));
    const Topology machine = discover_topology();
    what.threads = thread_counts(options.threads, machine.cores());
    what.weight_type = options.weight;
    what.pairs = options.pairs;
    what.out_of_place = !options.in_place_only;
    need_memory(what, machine.memory_left_bytes);
    what.targets = known_targets(options.targets);
    what.gradient_types = options.gradients;
    for (const optim::Method method : options.methods) {
        if (method != optim::Method::adamw) what.methods.push_back(method);
    }
    what.formats = options.formats;
    return what;
}

// The words a user typed, so that a table says how to get it again.
std::string command_of(const AdamOptions& options) {
    std::string line = "ferry bench adam --millions " + CLI::detail::to_string(options.millions);
    for (const int threads : options.threads) line += " --threads " + std::to_string(threads);
    for (const DType gradient : options.gradients)
        line += " --gradient " + spelled(kGradientWords, gradient);
    line += " --weight " + spelled(kWeightWords, options.weight);
    for (const optim::Method method : options.methods)
        line += " --method " + spelled(kMethodWords, method);
    for (const std::string& target : options.targets) line += " --target " + target;
    for (const StateFormat& format : options.formats)
        line += " --format " + spelled(kFormatWords, format);
    line += " --pairs " + std::to_string(options.pairs);
    if (options.in_place_only) line += " --in-place";
    if (!options.deepspeed.empty()) line += " --deepspeed=" + options.deepspeed;
    return line;
}

void run_adam(const AdamOptions& options) {
    const AdamBench what = bench_of(options);
    AdamRows measured = measure_adam(what);
    std::vector<Row>& rows = measured.rows;
    if (!options.deepspeed.empty()) {
        const auto more = compare_deepspeed(what, measured, options.deepspeed);
        rows.insert(rows.end(), more.begin(), more.end());
    }
    if (!options.json) return print("{}", rows_table(rows, "by hand"));
    nlohmann::json machine = machine_json();
    machine["target"] = optim::current_target();
    machine["by_hand"] = plain_kind() ? plain_kind() : "none";
    print("{}", json_line(rows_json(rows, command_of(options), machine)));
}

}  // namespace
}  // namespace ferry::tools

void add_adam_bench(CLI::App& bench) {
    using namespace ferry::tools;
    const auto options = std::make_shared<AdamOptions>();
    CLI::App* command = bench.add_subcommand("adam", "the optimizer beside a hand-written loop");
    command
        ->add_option("--millions", options->millions,
                     "elements, in units of 2^20 (30 B each; 18 B with --in-place)")
        ->check(number_within(0.001, 65536))
        ->capture_default_str();
    command->add_option("--threads", options->threads, "thread counts; default: 1 and all cores")
        ->check(CLI::Range(1, 4096));
    add_words_option(*command, "--gradient", options->gradients, kGradientWords,
                     "types of gradients: bf16, fp16, fp32 or all")
        ->default_str("[bf16,fp32]");
    add_word_option(*command, "--weight", options->weight, kWeightWords,
                    "type of the weight written");
    add_words_option(*command, "--method", options->methods, kMethodWords,
                     "besides adamw: adam, sgd, lion, adagrad or all; without a loop by hand");
    add_words_option(
        *command, "--format", options->formats, kFormatWords,
        "how the state is kept besides fp32: bf16-moments, int8-moments, "
        "split, split-bf16-moments, split-int8-moments or all; without a loop by hand");
    command->add_option("--target", options->targets,
                        "SIMD targets besides the best: a name of Highway's, or all");
    command->add_option("--pairs", options->pairs, "measurements of each side, in turns")
        ->check(CLI::Range(1, 100000))
        ->capture_default_str();
    command->add_flag("--in-place", options->in_place_only, "leave the out-of-place rows out");
    command->add_flag("--deepspeed{bench/adam_deepspeed.py}", options->deepspeed,
                      "DeepSpeed's CPU-Adam, unscale and cast too, where python3 can import it; "
                      "--deepspeed=SCRIPT where that is not the script's path");
    command->add_flag("--json", options->json, "one JSON object on standard output");
    command->footer(
        "ns/param, medians; ratio: by hand / ferry, the median over pairs, its least and its "
        "most;\n"
        "triad: bytes that the pass must move a second, against a streaming triad's.\n"
        "Example: ferry bench adam --threads 1 --threads 16 --in-place");
    command->callback([options] { run_adam(*options); });
}
