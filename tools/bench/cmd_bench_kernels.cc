// `ferry bench kernels`: every operation of a step, timed as the engine calls it.
#include <spdlog/fmt/fmt.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <optional>

#include "bench_rows.h"
#include "tools/commands.h"
#include "tools/options/override_options.h"
#include "tools/output/json_line.h"
#include "tools/output/output.h"
#include "tools/output/writable.h"
#include "tools/process/child_process.h"
#include "train/prediction/kernel_profile.h"
#include "word_option.h"

namespace ferry::tools {
namespace {

struct KernelsOptions {
    std::string model{}, config{}, tune{};
    std::optional<DeviceKind> device{};  // none: the configuration's
    DType precision = DType::bf16;
    int64_t sequence = 0, micro_batch = 0;
    int rounds = 5;
    Overrides overrides{};
    bool json = false;
};

Config config_for(const KernelsOptions& options) {
    std::vector<std::string> overrides;
    const auto set = [&](const char* key, const std::string& value) {
        overrides.push_back(std::string(key) + "=" + value);
    };
    if (options.sequence > 0) set("batch.sequence", std::to_string(options.sequence));
    if (options.micro_batch > 0) set("batch.micro_batch", std::to_string(options.micro_batch));
    if (options.device) set("device", spelled(kDeviceWords, *options.device));
    overrides.insert(overrides.end(), options.overrides.keys.begin(), options.overrides.keys.end());
    if (!options.config.empty())
        return options.overrides.checked(load_config(options.config, overrides));
    const nlohmann::json config = {
        {"model", {{"path", options.model}, {"load", false}}},
        {"batch", {{"sequence", 2048}, {"micro_batch", 1}, {"micro_batches", 1}}},
        {"data", {{"tokens", "none"}}},  // a required key; nothing reads it
        {"precision", spelled(kTypeWords, options.precision)},
        {"steps", 1},
        {"optimizer", {{"method", "adamw"}}}};
    return options.overrides.checked(parse_config(config.dump(), "--model", overrides));
}

// The group of operations that a call's time counts for.
const char* group_of(const ops::OpCall& call) {
    const auto begins = [&](const char* with) { return call.name.rfind(with, 0) == 0; };
    if (begins("product")) return "products";
    if (begins("attention")) return "attention";
    if (begins("update")) return "updates of the state";
    return "rows and everything else";
}

class Report {
public:
    explicit Report(const train::KernelProfile& profile) : profile_(profile) {
        for (const train::ProfiledOp& op : profile.ops) {
            step_s_ += seconds_of(op);
            if (op.call.launches >= 0)
                launches_ += static_cast<double>(op.call.launches * op.calls);
        }
    }

    std::vector<BenchRow> rows() const {
        std::vector<BenchRow> rows;
        rows.reserve(profile_.ops.size());
        for (const train::ProfiledOp& op : profile_.ops) rows.push_back(row_of(op));
        for (const char* group :
             {"products", "attention", "rows and everything else", "updates of the state"})
            add_group(group, rows);
        rows.push_back({.name = "total: a step",
                        .value = step_s_ * 1e3,
                        .unit = "ms",
                        .more = {{"% of step", 100}}});
        if (launches_ > 0) rows.back().more.emplace_back("launches", launches_);
        rows.push_back({.name = "tokens of it",
                        .value = static_cast<double>(profile_.tokens) / step_s_,
                        .unit = "per s"});
        rows.push_back({.name = "peak: a large product",
                        .value = profile_.product_flops_per_s * 1e-12,
                        .unit = "TFLOP/s"});
        rows.push_back({.name = "peak: a large copy, read and written",
                        .value = profile_.copy_bytes_per_s * 1e-9,
                        .unit = "GB/s"});
        return rows;
    }

private:
    static double seconds_of(const train::ProfiledOp& op) {
        return op.call.seconds * static_cast<double>(op.calls);
    }
    static double share(double part, double whole) { return whole > 0 ? 100 * part / whole : 0; }

    // Products and attention by their operations, everything else by its bytes.
    BenchRow row_of(const train::ProfiledOp& op) const {
        const ops::OpCall& call = op.call;
        const bool by_flops = call.flops > 0;
        const double rate = (by_flops ? call.flops : call.bytes) / call.seconds;
        BenchRow row{.name = op.kernel + ": " + call.name + ", " + call.shape,
                     .value = seconds_of(op) * 1e3,
                     .unit = "ms"};
        row.more = {{"% of step", share(seconds_of(op), step_s_)},
                    {"calls", static_cast<double>(op.calls)},
                    {"us a call", call.seconds * 1e6},
                    {by_flops ? "TFLOP/s" : "GB/s", rate * (by_flops ? 1e-12 : 1e-9)},
                    {"% of peak", share(rate, by_flops ? profile_.product_flops_per_s
                                                       : profile_.copy_bytes_per_s)}};
        if (call.launches >= 0)
            row.more.emplace_back("launches", static_cast<double>(call.launches));
        return row;
    }

    void add_group(const char* group, std::vector<BenchRow>& rows) const {
        double seconds = 0, flops = 0, bytes = 0, launches = 0;
        for (const train::ProfiledOp& op : profile_.ops) {
            if (group_of(op.call) != std::string_view(group)) continue;
            const auto calls = static_cast<double>(op.calls);
            seconds += seconds_of(op);
            flops += op.call.flops * calls;
            bytes += op.call.flops > 0 ? 0 : op.call.bytes * calls;
            launches += op.call.launches > 0 ? static_cast<double>(op.call.launches) * calls : 0;
        }
        if (seconds == 0) return;
        BenchRow row{.name = std::string("total: ") + group,
                     .value = seconds * 1e3,
                     .unit = "ms",
                     .more = {{"% of step", share(seconds, step_s_)}}};
        if (flops > 0) {
            row.more.emplace_back("TFLOP/s", flops / seconds * 1e-12);
            row.more.emplace_back("% of peak",
                                  share(flops / seconds, profile_.product_flops_per_s));
        } else {
            row.more.emplace_back("GB/s", bytes / seconds * 1e-9);
            row.more.emplace_back("% of peak", share(bytes / seconds, profile_.copy_bytes_per_s));
        }
        if (launches > 0) row.more.emplace_back("launches", launches);
        rows.push_back(std::move(row));
    }

    const train::KernelProfile& profile_;
    double step_s_ = 0, launches_ = 0;
};

std::string command_of(const KernelsOptions& o) {
    std::vector<std::string> words{"ferry", "bench", "kernels"};
    const auto add = [&](const char* name, const std::string& value) {
        words.insert(words.end(), {name, value});
    };
    if (!o.model.empty()) add("--model", o.model);
    if (!o.model.empty()) add("--precision", spelled(kTypeWords, o.precision));
    if (!o.config.empty()) add("--config", o.config);
    if (o.device) add("--device", spelled(kDeviceWords, *o.device));
    if (o.sequence > 0) add("--sequence", std::to_string(o.sequence));
    if (o.micro_batch > 0) add("--micro-batch", std::to_string(o.micro_batch));
    add("--rounds", std::to_string(o.rounds));
    if (!o.tune.empty()) add("--tune", o.tune);
    for (const std::string& one : o.overrides.keys) add("--set", one);
    return shell_line(words);
}

void run_kernels(const KernelsOptions& options) {
    if (options.model.empty() == options.config.empty())
        throw Error(Trouble::usage, {.what = "it is not said whose kernels to time",
                                     .where = "ferry bench kernels",
                                     .remedy = "give either --model or --config"});
    const Config config = config_for(options);
    const Replaceable older{.beginning = "ferry products "};
    check_writable("--tune", options.tune, older);
    ops::ProductTable tuned;
    const train::KernelProfile profile =
        train::profile_kernels(config, options.rounds, options.tune.empty() ? nullptr : &tuned);
    if (!options.tune.empty()) write_whole("--tune", options.tune, tuned.text(), older);
    const std::vector<BenchRow> rows = Report(profile).rows();
    if (options.json) {
        nlohmann::json object = rows_json(rows, command_of(options), machine_json());
        object["device"] = profile.device;
        object["attention_saved"] = profile.attention_saved;
        object["mlp_saved"] = profile.mlp_saved;
        object["projections_saved"] = profile.projections_saved;
        if (!options.tune.empty()) object["tuned_products"] = tuned.size();
        return print_text(json_line(object));
    }
    print("{}; {}\n", machine_text(), profile.device);
    print("blocks that save attention's results: {}, its products': {}, the MLP's: {}\n",
          profile.attention_saved, profile.projections_saved, profile.mlp_saved);
    print("{}", rows_table(rows, ""));
    if (!options.tune.empty()) {
        print("{} products, tuned: {}. A configuration names it as numerics.products\n",
              tuned.size(), options.tune);
    }
}

}  // namespace
}  // namespace ferry::tools

void add_kernels_bench(CLI::App& bench) {
    using namespace ferry::tools;
    const auto options = std::make_shared<KernelsOptions>();
    CLI::App* command =
        bench.add_subcommand("kernels", "every operation of a step, as the engine calls it");
    command->add_option("--model", options->model, "a Hugging Face directory; its config.json");
    command->add_option("--config", options->config, "or a configuration of ferry's");
    add_word_option(*command, "--device", options->device, kDeviceWords,
                    "cpu or cuda; default: the configuration's");
    add_word_option(*command, "--precision", options->precision, kTypeWords, "with --model");
    command->add_option("--sequence", options->sequence, "tokens; default: the configuration's")
        ->check(CLI::Range(1, 1 << 24));
    command->add_option("--micro-batch", options->micro_batch, "sequences a kernel")
        ->check(CLI::Range(1, 1 << 20));
    command->add_option("--rounds", options->rounds, "times that each kernel is timed")
        ->check(CLI::Range(1, 1000))
        ->capture_default_str();
    command->add_option("--tune", options->tune,
                        "try a GPU's algorithms for every product; write the fastest to this file");
    add_overrides(*command, options->overrides, "override a key of the configuration");
    command->add_flag("--json", options->json, "one JSON object on standard output");
    command->footer(
        "ms: of a step, the median over rounds. % of peak: products and attention by their\n"
        "operations over the rate of one large product, everything else by the bytes of its\n"
        "operands over a large copy's. launches: of one call; in totals of a step.\n"
        "The step is that of the plan: activations that its blocks save are not computed again.\n"
        "Example: ferry bench kernels --config examples/quickstart.json");
    command->callback([options] { run_kernels(*options); });
}
