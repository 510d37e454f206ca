#include "layouts_report.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <array>
#include <limits>

#include "cost/measurements.h"
#include "ferry/error.h"
#include "ferry/units.h"
#include "train/prediction/config_facts.h"

namespace ferry::tools {
namespace {

constexpr size_t kShown = 4;

// A GPU by its data sheet: of rates three quarters of what that promises, of products in 16 bits
// three fifths.
struct Gpu {
    const char* name;
    double memory_bytes, flops_per_s, memory_bytes_per_s, link_bytes_per_s;
};
constexpr std::array<Gpu, 3> kGpus{{{"a100", 80e9, 312e12, 2.0e12, 300e9},
                                    {"h100", 80e9, 989e12, 3.35e12, 450e9},
                                    {"h200", 141e9, 989e12, 4.8e12, 450e9}}};
constexpr double kOfProducts = 0.6, kOfRates = 0.75, kContext = 1e9;

const Gpu& gpu_named(const std::string& name) {
    const auto found = std::ranges::find(kGpus, name, &Gpu::name);
    if (found != kGpus.end()) return *found;
    throw Error(Trouble::usage, {.what = "no such GPU is known",
                                 .where = "--gpu",
                                 .measured = name,
                                 .limit = "a100, h100 or h200",
                                 .remedy = "name one of them"});
}

double bytes_or_infinite(int64_t bytes) {
    return bytes == kUnlimited ? std::numeric_limits<double>::infinity()
                               : static_cast<double>(bytes);
}

double nvme_bytes(const Config& config) {
    double all = 0;
    for (const NvmePath& path : config.budgets.nvme) all += bytes_or_infinite(path.size_bytes);
    return all;
}

cost::Cluster cluster_of(const Config& config, const train::RankCount& count,
                         const std::string& gpu, const std::optional<Network>& network) {
    const cost::Measurements known =
        cost::default_measurements(gpu.empty() ? config.device : DeviceKind::cuda);
    cost::Cluster found{.ranks = count.ranks,
                        .on_a_host = count.on_a_host,
                        .device_bytes = bytes_or_infinite(config.budgets.device_bytes),
                        .host_bytes = bytes_or_infinite(config.budgets.host_bytes),
                        .nvme_bytes = nvme_bytes(config)};
    found.measured = cost::of_rank(known, static_cast<int>(found.here()));
    if (network) {
        found.network_bytes_per_s = network->bits_per_s / 8;
        found.latency_s = network->latency_s;
    }
    if (gpu.empty()) return found;
    const Gpu& of = gpu_named(gpu);
    found.measured.assumed_flops_per_s = kOfProducts * of.flops_per_s;
    found.device_bytes = std::min(found.device_bytes, of.memory_bytes - kContext);
    found.measured.device_bytes_per_s = kOfRates * of.memory_bytes_per_s;
    found.measured.comm_bytes_per_s = kOfRates * of.link_bytes_per_s;
    return found;
}

std::string bytes_text(double bytes) { return format_bytes(static_cast<int64_t>(bytes)); }

double parameters_of(const cost::ModelSizes& model) {
    return static_cast<double>(model.blocks) * model.block_elements +
           (model.tied ? 1 : 2) * model.table_elements;
}

}  // namespace

LayoutsReport layouts_report(const Config& config, const train::RankCount& count,
                             const std::string& gpu, const std::optional<Network>& network) {
    if (count.ranks > count.on_a_host && !network)
        throw Error(Trouble::usage,
                    {.what = "nobody says what joins the hosts",
                     .where = "--layouts",
                     .measured = fmt::format("{} ranks, {} a host", count.ranks, count.on_a_host),
                     .remedy = "give --network, such as 100Gbit"});
    LayoutsReport report{
        .model = train::model_sizes(config),
        .cluster = cluster_of(config, count, gpu, network),
        .rates = gpu.empty() ? "default rates of its device" : "data sheet of an " + gpu};
    report.layouts = cost::best_layouts(report.model, report.cluster, kShown);
    if (!report.layouts.empty()) return report;
    throw Error(
        Trouble::does_not_fit,
        {.what = "no layout of these ranks fits",
         .where = "--layouts",
         .measured = fmt::format("{:.3g} parameters, {} sequences a step on {} ranks",
                                 parameters_of(report.model), report.model.sequences, count.ranks),
         .limit = fmt::format("{} of device memory a rank, {} of host memory and {} of NVMe a host",
                              bytes_text(std::min(report.cluster.device_bytes, 1e18)),
                              bytes_text(std::min(report.cluster.host_bytes, 1e18)),
                              bytes_text(std::min(report.cluster.nvme_bytes, 1e18))),
         .remedy = "give more ranks, raise budgets.host or budgets.nvme, or set "
                   "batch.micro_batches to a multiple of the ranks"});
}

namespace {

// What the step takes where the arithmetic errs as it did at the most.
double least_of(const cost::Layout& of) { return of.seconds / cost::kArithmeticMost; }
double most_of(const cost::Layout& of) { return of.seconds / cost::kArithmeticLeast; }

}  // namespace

std::string text_of(const LayoutsReport& report) {
    const cost::Cluster& cluster = report.cluster;
    std::string text = fmt::format(
        "{:.3g} parameters, {} sequences of {} tokens a step, on {} ranks of which a host has {}: "
        "the best layouts, by arithmetic and the {}\n\n"
        "  {:>6} {:>8} {:>8} {:>4} {:>11} {:>6} {:>9} {:>18} {:>8} {:>6} {:>9} {:>7} {:>11} "
        "{:>11} {:>11}\n",
        parameters_of(report.model), report.model.sequences, report.model.sequence, cluster.ranks,
        cluster.on_a_host, report.rates, "tensor", "pipeline", "replicas", "zero", "micro-batch",
        "state", "s a step", "or, as it errs", "computes", "bubble", "exchanges", "updates",
        "device", "host", "NVMe");
    const auto part = [](double seconds, const cost::Layout& of) {
        return fmt::format("{:.0f}%", 100 * seconds / of.seconds);
    };
    for (const cost::Layout& l : report.layouts)
        text += fmt::format(
            "  {:>6} {:>8} {:>8} {:>4} {:>11} {:>6} {:>9.4g} {:>18} {:>8} {:>6} {:>9} {:>7} {:>11} "
            "{:>11} {:>11}\n",
            l.tensor, l.pipeline, l.replicas, l.zero_stage,
            fmt::format("{} x {}", l.micro_batches, l.micro_batch), cost::name_of(l.state),
            l.seconds, fmt::format("{:.3g} to {:.3g}", least_of(l), most_of(l)),
            part(l.compute_seconds, l), part(l.bubble_seconds, l), part(l.exchange_seconds, l),
            part(l.update_seconds, l), bytes_text(l.device_bytes), bytes_text(l.host_bytes),
            bytes_text(l.nvme_bytes));
    text += fmt::format(
        "\n  a rank sends in a step\n  {:>6} {:>8} {:>8} {:>14} {:>14} {:>14} {:>14} {:>14}\n",
        "tensor", "pipeline", "replicas", "sums", "block inputs", "state", "to its host",
        "to NVMe");
    for (const cost::Layout& l : report.layouts)
        text += fmt::format("  {:>6} {:>8} {:>8} {:>14} {:>14} {:>14} {:>14} {:>14}\n", l.tensor,
                            l.pipeline, l.replicas, bytes_text(l.tensor_bytes),
                            bytes_text(l.pipeline_bytes), bytes_text(l.zero_bytes),
                            bytes_text(l.copied_bytes), bytes_text(l.stored_bytes));
    text += fmt::format(
        "\n  The arithmetic said {:.2f}x to {:.2f}x of what recorded steps of one to four GPUs "
        "took. "
        "Of what ranks that share\n  tensors or layers take nothing was compared.\n",
        cost::kArithmeticLeast, cost::kArithmeticMost);
    const cost::Layout& best = report.layouts.front();
    text += fmt::format(
        "\n  best: parallel.tensor={} parallel.pipeline={} zero.stage={} batch.micro_batch={} "
        "batch.micro_batches={}\n",
        best.tensor, best.pipeline, best.zero_stage, best.micro_batch,
        best.micro_batches * best.replicas);
    return text;
}

nlohmann::json to_json(const LayoutsReport& report) {
    nlohmann::json all = nlohmann::json::array();
    for (const cost::Layout& l : report.layouts)
        all.push_back({{"tensor", l.tensor},
                       {"pipeline", l.pipeline},
                       {"replicas", l.replicas},
                       {"zero_stage", l.zero_stage},
                       {"micro_batch", l.micro_batch},
                       {"micro_batches", l.micro_batches},
                       {"state", cost::name_of(l.state)},
                       {"seconds", l.seconds},
                       {"least_seconds", least_of(l)},
                       {"most_seconds", most_of(l)},
                       {"compute_seconds", l.compute_seconds},
                       {"bubble_seconds", l.bubble_seconds},
                       {"exchange_seconds", l.exchange_seconds},
                       {"update_seconds", l.update_seconds},
                       {"device_bytes", l.device_bytes},
                       {"host_bytes", l.host_bytes},
                       {"nvme_bytes", l.nvme_bytes},
                       {"tensor_bytes", l.tensor_bytes},
                       {"pipeline_bytes", l.pipeline_bytes},
                       {"zero_bytes", l.zero_bytes},
                       {"copied_bytes", l.copied_bytes},
                       {"stored_bytes", l.stored_bytes}});
    return {{"parameters", parameters_of(report.model)},
            {"ranks", report.cluster.ranks},
            {"ranks_per_host", report.cluster.on_a_host},
            {"rates", report.rates},
            {"layouts", all}};
}

}  // namespace ferry::tools
