#include "layouts_report.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <array>
#include <limits>
#include <nlohmann/json.hpp>
#include <utility>

#include "config/words.h"
#include "cost/measurements.h"
#include "ferry/error.h"
#include "ferry/units.h"
#include "train/prediction/config_facts.h"

namespace ferry::tools {
namespace {

constexpr size_t kShown = 4;

// A GPU by its data sheet: of rates three quarters of what that promises, of products in 16 bits
// three fifths.
// Memory of its host: two sockets of eight channels, DDR4-3200 or DDR5-4800.
struct Gpu {
    const char* name;
    double memory_bytes, flops_per_s, memory_bytes_per_s, link_bytes_per_s, host_bytes_per_s;
};
constexpr std::array<Gpu, 3> kGpus{{{"a100", 80e9, 312e12, 2.0e12, 300e9, 410e9},
                                    {"h100", 80e9, 989e12, 3.35e12, 450e9, 614e9},
                                    {"h200", 141e9, 989e12, 4.8e12, 450e9, 614e9}}};
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
    // A rank's cores reach so much alone; all of a host share its memory.
    found.measured.dram_bytes_per_s =
        std::min(found.measured.dram_bytes_per_s,
                 kOfRates * of.host_bytes_per_s / static_cast<double>(found.here()));
    return found;
}

std::string bytes_text(double bytes) { return format_bytes(static_cast<int64_t>(bytes)); }

// Those that parallel.schedule has, or the one that it is.
std::vector<cost::Order> orders(const Config& config) {
    std::vector<cost::Order> found;
    for (const cost::Order order : cost::kOrders) {
        if (std::ranges::any_of(config::kPipelineSchedules, [&](const auto& word) {
                const bool chosen = config.parallel.schedule == PipelineSchedule::automatic ||
                                    config.parallel.schedule == word.value;
                return chosen && word.text == cost::name_of(order);
            }))
            found.push_back(order);
    }
    return found;
}

bool contains(const std::vector<std::string>& keys, std::string_view key) {
    return std::ranges::find(keys, key) != keys.end();
}

// What the configuration has chosen. `orders` must outlive it.
cost::FixedLayout fixed_by(const Config& config, const std::vector<std::string>& given,
                           const std::vector<cost::Order>& orders) {
    const auto if_given = [&](const char* key, std::optional<int64_t> value) {
        return contains(given, key) ? value : std::nullopt;
    };
    const ParallelConfig& p = config.parallel;
    return {.tensor = if_given("parallel.tensor", p.tensor),
            .sequence = if_given("parallel.sequence", p.sequence),
            .pipeline = if_given("parallel.pipeline", p.pipeline),
            .virtual_stages = if_given("parallel.virtual_stages", p.virtual_stages),
            .zero_stage = if_given("zero.stage", config.zero.stage),
            .orders = orders};
}

std::vector<std::string> fixed_keys(const cost::FixedLayout& fixed, const Config& config) {
    std::vector<std::string> keys;
    const auto add = [&](const char* key, const std::optional<int64_t>& value) {
        if (value) keys.push_back(fmt::format("{}={}", key, *value));
    };
    add("parallel.tensor", fixed.tensor);
    add("parallel.sequence", fixed.sequence);
    add("parallel.pipeline", fixed.pipeline);
    if (config.parallel.schedule != PipelineSchedule::automatic)
        keys.push_back(
            fmt::format("parallel.schedule={}",
                        config::word_of(config::kPipelineSchedules, config.parallel.schedule)));
    add("parallel.virtual_stages", fixed.virtual_stages);
    add("zero.stage", fixed.zero_stage);
    return keys;
}

std::vector<std::string> given_of(const std::vector<std::string>& given, const auto& belongs) {
    std::vector<std::string> found;
    std::ranges::copy_if(given, std::back_inserter(found), belongs);
    return found;
}

// What the arithmetic chooses itself.
std::vector<std::string> keys_not_used(const std::vector<std::string>& given) {
    return given_of(given, [](std::string_view key) { return key.starts_with("swap."); });
}

// What it leaves out (docs/parallelism.md, limits).
std::vector<std::string> keys_not_priced(const std::vector<std::string>& given) {
    return given_of(given, [](std::string_view key) {
        const auto of = [&](std::string_view section) { return key.starts_with(section); };
        return of("zero.compress.") || of("io.") || of("freeze") || key == "zero.second_shard" ||
               key == "parallel.sequence_order" || key == "optimizer.method";
    });
}

[[noreturn]] void refuse(const char* key, const std::string& value, const std::string& limit) {
    throw Error(Trouble::usage,
                {.what = "these ranks cannot be divided so",
                 .where = key,
                 .measured = value,
                 .limit = limit,
                 .remedy = "set it otherwise, or leave it out: --layouts then chooses"});
}

// Chosen stages that the blocks do not have; `left`: ranks that a pipeline may divide.
void require_stages(const cost::FixedLayout& fixed, const cost::ModelSizes& model, int64_t left) {
    if (!fixed.needs_stages()) return;
    const auto has = [&](cost::Order order) {
        return std::ranges::find(fixed.orders, order) != fixed.orders.end();
    };
    const bool interleaved = has(cost::Order::interleaved),
               divides = interleaved || has(cost::Order::round_robin),
               alone = interleaved && fixed.orders.size() == 1;
    const int64_t count = fixed.virtual_stages.value_or(alone ? 2 : 1);
    const std::string schedule =
        fixed.orders.size() == 1 ? cost::name_of(fixed.orders.front()) : "auto";
    const auto refuse_count = [&](const std::string& limit) {
        refuse("parallel.virtual_stages", std::to_string(count), limit);
    };
    if (count > 1 && !divides) refuse_count(fmt::format("1 with {}", schedule));
    if (count < 2 && alone) refuse_count("2 or more with interleaved");
    const bool cut = count > 1 || (divides && fixed.orders.size() == 1);  // into equal runs
    const auto fits = [&](int64_t stages) {
        return !cut || (model.blocks % stages == 0 &&
                        (model.blocks / stages) % (fixed.virtual_stages ? count : 1) == 0 &&
                        model.blocks / stages >= count);
    };
    if (fixed.pipeline) {
        const int64_t stages = *fixed.pipeline;
        if (fits(stages)) return;
        if (model.blocks % stages != 0)
            refuse("parallel.pipeline", std::to_string(stages),
                   fmt::format("a divisor of {} blocks, with virtual stages of {}", model.blocks,
                               schedule));
        refuse_count(fmt::format("a divisor of the {} blocks of a stage", model.blocks / stages));
    }
    for (int64_t stages = 2; stages <= std::min(left, model.blocks); ++stages)
        if (left % stages == 0 && fits(stages)) return;
    const std::string limit =
        fmt::format("{} blocks over a number of stages that divides {} ranks", model.blocks, left);
    if (fixed.virtual_stages.value_or(1) > 1) refuse_count(limit);
    refuse("parallel.schedule", schedule, limit);
}

// Chosen ranks that cannot be.
void require_possible(const cost::FixedLayout& fixed, const cost::ModelSizes& model,
                      const cost::Cluster& cluster) {
    int64_t left = cluster.ranks;
    std::string over;  // what has divided them already
    const auto divide = [&](const char* key, const std::optional<int64_t>& by) {
        if (!by) return;
        if (left % *by != 0) {
            const std::string limit = over.empty() ? fmt::format("a divisor of the {} ranks", left)
                                                   : fmt::format("a divisor of {}: {} ranks over{}",
                                                                 left, cluster.ranks, over);
            refuse(key, std::to_string(*by), limit);
        }
        left /= *by;
        over += fmt::format("{} {} {}", over.empty() ? "" : " and", key, *by);
    };
    divide("parallel.tensor", fixed.tensor);
    if (fixed.tensor) {
        cost::Cluster one_host = cluster;  // what spans hosts is priced
        one_host.on_a_host = cluster.ranks;
        const std::string why = cost::refusal_of_tensor(model, one_host, *fixed.tensor);
        if (!why.empty()) refuse("parallel.tensor", std::to_string(*fixed.tensor), why);
    }
    divide("parallel.sequence", fixed.sequence);
    const int64_t sequence = fixed.sequence.value_or(1), tensor = fixed.tensor.value_or(1);
    if (sequence > 1 && model.kv_heads % (tensor * sequence) != 0)
        refuse("parallel.sequence", std::to_string(sequence),
               fmt::format("a divisor of {} heads of keys", model.kv_heads) +
                   (tensor > 1 ? fmt::format(" over parallel.tensor {}", tensor) : ""));
    divide("parallel.pipeline", fixed.pipeline);
    if (fixed.pipeline.value_or(1) > model.blocks)
        refuse("parallel.pipeline", std::to_string(*fixed.pipeline),
               fmt::format("{} blocks", model.blocks));
    require_stages(fixed, model, left);
}

// Where no division of the ranks was weighed.
[[noreturn]] void refuse_batch(const LayoutsReport& report) {
    throw Error(
        Trouble::usage,
        {.what = "these ranks cannot be divided so",
         .where = "batch.micro_batches",
         .measured =
             fmt::format("{} sequences a step on {} ranks", report.model.sequences,
                         report.cluster.ranks) +
             (report.fixed.empty() ? "" : fmt::format(", with {}", fmt::join(report.fixed, " "))),
         .limit = fmt::format("a multiple of the replicas, which are {} / (tensor x "
                              "sequence x pipeline), with up to {} stages",
                              report.cluster.ranks, report.model.blocks),
         .remedy = "set it to a multiple of the ranks, or give another number of ranks"});
}

}  // namespace

std::vector<std::string> keys_of(const cost::Layout& of) {
    std::vector<std::string> keys{fmt::format("parallel.tensor={}", of.tensor),
                                  fmt::format("parallel.sequence={}", of.sequence),
                                  fmt::format("parallel.pipeline={}", of.pipeline)};
    if (of.pipeline > 1) {
        keys.push_back(fmt::format("parallel.schedule={}", cost::name_of(of.order)));
        keys.push_back(fmt::format("parallel.virtual_stages={}", of.virtual_stages));
        keys.push_back(fmt::format("swap.groups={}", of.groups));
    }
    keys.push_back(fmt::format("zero.stage={}", of.zero_stage));
    keys.push_back(fmt::format("batch.micro_batch={}", of.micro_batch));
    keys.push_back(fmt::format("batch.micro_batches={}", of.micro_batches * of.replicas));
    return keys;
}

LayoutsReport layouts_report(const Config& config, const std::vector<std::string>& given,
                             const train::RankCount& count, const std::string& gpu,
                             const std::optional<Network>& network, const RefusalOf& refusal_of) {
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
    const std::vector<cost::Order> possible = orders(config);
    const cost::FixedLayout fixed = fixed_by(config, given, possible);
    require_possible(fixed, report.model, report.cluster);
    report.fixed = fixed_keys(fixed, config);
    report.not_used = keys_not_used(given);
    report.not_priced = keys_not_priced(given);
    for (int64_t tensor = 2; tensor <= report.cluster.here(); tensor *= 2) {
        std::string why = cost::refusal_of_tensor(report.model, report.cluster, tensor);
        if (!fixed.tensor && !why.empty()) report.left_out.push_back({tensor, std::move(why)});
    }
    cost::FoundLayouts found = cost::best_layouts(report.model, report.cluster, kShown, fixed);
    report.layouts = std::move(found.best);
    report.weighed = found.weighed;
    report.set_aside = found.set_aside;
    for (const cost::Layout& layout : report.layouts)
        report.refusals.push_back(refusal_of(keys_of(layout)));
    if (!report.layouts.empty()) return report;
    if (report.weighed == 0) refuse_batch(report);
    throw Error(
        Trouble::does_not_fit,
        {.what = "no layout of these ranks fits",
         .where = "--layouts",
         .measured =
             fmt::format("{:.3g} parameters, {} sequences a step on {} ranks",
                         report.model.parameters(), report.model.sequences, count.ranks) +
             (report.fixed.empty() ? "" : fmt::format(", with {}", fmt::join(report.fixed, " "))),
         .limit = fmt::format("{} of device memory a rank, {} of host memory and {} of NVMe a host",
                              bytes_text(std::min(report.cluster.device_bytes, 1e18)),
                              bytes_text(std::min(report.cluster.host_bytes, 1e18)),
                              bytes_text(std::min(report.cluster.nvme_bytes, 1e18))),
         .remedy = std::string("give more ranks, raise budgets.host or budgets.nvme, ") +
                   (report.fixed.empty() ? "" : "leave one of these keys out, ") +
                   "or set batch.micro_batches to a multiple of the ranks"});
}

namespace {

// What the step takes where the arithmetic errs as it did at the most.
double least_of(const cost::Layout& of) { return of.seconds / cost::kArithmeticMost; }
double most_of(const cost::Layout& of) { return of.seconds / cost::kArithmeticLeast; }

std::string order_text(const cost::Layout& of) {
    if (of.pipeline == 1) return "-";
    if (of.virtual_stages == 1) return cost::name_of(of.order);
    return fmt::format("{} {}", cost::name_of(of.order), of.virtual_stages);
}

std::string batch_text(const cost::Layout& of) {
    const std::string all = fmt::format("{} x {}", of.micro_batches, of.micro_batch);
    return of.pipeline == 1 ? all : fmt::format("{} in {}", all, of.groups);
}

// What a step takes, spends its time on, and has in memory.
std::string steps_text(const LayoutsReport& report) {
    std::string text = fmt::format(
        "  {:>6} {:>8} {:>8} {:>8} {:>14} {:>4} {:>18} {:>6} {:>7} {:>9} {:>18} {:>8} {:>6} {:>9} "
        "{:>7} {:>11} {:>11} {:>11}\n",
        "tensor", "sequence", "pipeline", "replicas", "schedule", "zero", "micro-batches", "state",
        "weights", "s a step", "or, as it errs", "computes", "bubble", "exchanges", "updates",
        "device", "host", "NVMe");
    const auto part = [](double seconds, const cost::Layout& of) {
        return fmt::format("{:.0f}%", 100 * seconds / of.seconds);
    };
    for (const cost::Layout& l : report.layouts)
        text += fmt::format(
            "  {:>6} {:>8} {:>8} {:>8} {:>14} {:>4} {:>18} {:>6} {:>7} {:>9.4g} {:>18} {:>8} "
            "{:>6} {:>9} {:>7} {:>11} {:>11} {:>11}\n",
            l.tensor, l.sequence, l.pipeline, l.replicas, order_text(l), l.zero_stage,
            batch_text(l), cost::name_of(l.state), l.weights_stay ? "device" : "host", l.seconds,
            fmt::format("{:.3g} to {:.3g}", least_of(l), most_of(l)), part(l.compute_seconds, l),
            part(l.bubble_seconds, l), part(l.exchange_seconds, l), part(l.update_seconds, l),
            bytes_text(l.device_bytes), bytes_text(l.host_bytes), bytes_text(l.nvme_bytes));
    return text;
}

// By what it is, and by the link that it takes.
std::string sent_text(const LayoutsReport& report) {
    std::string text = fmt::format(
        "\n  a rank sends in a step\n  {:>6} {:>8} {:>8} {:>8} {:>12} {:>12} {:>12} {:>12} | "
        "{:>14} {:>14} | {:>12} {:>12}\n",
        "tensor", "sequence", "pipeline", "replicas", "sums", "heads", "block inputs", "state",
        "inside a host", "between hosts", "copies", "to NVMe");
    for (const cost::Layout& l : report.layouts)
        text += fmt::format(
            "  {:>6} {:>8} {:>8} {:>8} {:>12} {:>12} {:>12} {:>12} | {:>14} {:>14} | {:>12} "
            "{:>12}\n",
            l.tensor, l.sequence, l.pipeline, l.replicas, bytes_text(l.tensor_bytes),
            bytes_text(l.sequence_bytes), bytes_text(l.pipeline_bytes), bytes_text(l.zero_bytes),
            bytes_text(l.in_host_bytes()), bytes_text(l.across_hosts_bytes),
            bytes_text(l.copied_bytes), bytes_text(l.stored_bytes));
    return text;
}

// What the search did not decide, and what it did not try.
std::string bounds_text(const LayoutsReport& report) {
    std::string text;
    if (!report.fixed.empty())
        text += fmt::format("  as the configuration has them: {}\n", fmt::join(report.fixed, " "));
    if (!report.not_used.empty())
        text += fmt::format("  not used here: {}\n", fmt::join(report.not_used, ", "));
    if (!report.not_priced.empty())
        text += fmt::format("  not priced here: {}\n", fmt::join(report.not_priced, ", "));
    const int64_t ranks = report.cluster.ranks, each = report.cluster.on_a_host;
    if (ranks % each != 0 && ranks > each)
        text += fmt::format(
            "  {} ranks do not fill hosts of {}: {} are full and one has {}; all are priced as "
            "full\n",
            ranks, each, ranks / each, ranks % each);
    if (report.set_aside)
        text += fmt::format(
            "  zero.stage=0 is set aside: {:.4g} s with tensor {}, pipeline {}, less faster than "
            "the arithmetic errs, and {} of host memory a rank\n",
            report.set_aside->seconds, report.set_aside->tensor, report.set_aside->pipeline,
            bytes_text(report.set_aside->host_bytes));
    for (const LayoutsReport::LeftOut& one : report.left_out)
        text += fmt::format("  no {} ranks share tensors: {}\n", one.tensor, one.why);
    for (size_t i = 0; i < report.layouts.size(); ++i) {
        const cost::Layout& l = report.layouts[i];
        const cost::AtBound bound = cost::at_bound(l);
        if (bound.sequences)
            text += fmt::format(
                "  number {} has {} sequences a micro-batch: more than {} were not tried\n", i + 1,
                l.micro_batch, cost::kMostSequences);
        if (bound.group)
            text += fmt::format(
                "  number {} has {} micro-batches a group: more than {} were not tried, but for "
                "all in one\n",
                i + 1, l.micro_batches / l.groups, cost::kMostOfAGroup);
        if (report.cluster.on_a_host % l.tensor != 0)
            text += fmt::format(
                "  number {} has groups of {} ranks that share tensors and span hosts of {}: a "
                "rank sends up to {} of its sums over the network\n",
                i + 1, l.tensor, report.cluster.on_a_host, bytes_text(l.tensor_bytes));
    }
    return text.empty() ? text : "\n" + text;
}

}  // namespace

std::string text_of(const LayoutsReport& report) {
    const cost::Cluster& cluster = report.cluster;
    std::string text = fmt::format(
        "{:.3g} parameters, {} sequences of {} tokens a step, on {} ranks of which a host has {}: "
        "the best of {} layouts, by arithmetic and the {}\n\n",
        report.model.parameters(), report.model.sequences, report.model.sequence, cluster.ranks,
        cluster.on_a_host, report.weighed, report.rates);
    text += steps_text(report) + sent_text(report);
    text += fmt::format(
        "\n  The arithmetic said {:.2f}x to {:.2f}x of what recorded steps of one to four GPUs "
        "took, which had all\n  tensors and layers. Of 16 steps of CPU ranks that share these over "
        "a slow network it said 0.50x to 1.18x,\n  by default rates. The brackets say what a step "
        "takes "
        "where it errs as much. The simulation of `ferry plan --network`\n  said 0.85x to 1.21x "
        "(docs/parallelism.md).\n",
        cost::kOfGpusLeast, cost::kOfGpusMost);
    text += bounds_text(report);
    text += fmt::format("\n  best: {}\n", fmt::join(keys_of(report.layouts.front()), " "));
    for (size_t i = 0; i < report.refusals.size(); ++i) {
        if (report.refusals[i].empty()) continue;
        text += fmt::format("  ferry does not run {} yet: {}\n",
                            i == 0 ? "it" : fmt::format("number {}", i + 1), report.refusals[i]);
    }
    return text;
}

nlohmann::json to_json(const LayoutsReport& report) {
    nlohmann::json all = nlohmann::json::array(), left_out = nlohmann::json::array();
    for (const LayoutsReport::LeftOut& one : report.left_out)
        left_out.push_back({{"tensor", one.tensor}, {"why", one.why}});
    for (size_t i = 0; i < report.layouts.size(); ++i) {
        const cost::Layout& l = report.layouts[i];
        const cost::AtBound bound = cost::at_bound(l);
        all.push_back({{"tensor", l.tensor},
                       {"sequence", l.sequence},
                       {"pipeline", l.pipeline},
                       {"replicas", l.replicas},
                       {"schedule", cost::name_of(l.order)},
                       {"virtual_stages", l.virtual_stages},
                       {"zero_stage", l.zero_stage},
                       {"micro_batch", l.micro_batch},
                       {"micro_batches", l.micro_batches},
                       {"groups", l.groups},
                       {"state", cost::name_of(l.state)},
                       {"weights", l.weights_stay ? "device" : "host"},
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
                       {"sequence_bytes", l.sequence_bytes},
                       {"pipeline_bytes", l.pipeline_bytes},
                       {"zero_bytes", l.zero_bytes},
                       {"in_host_bytes", l.in_host_bytes()},
                       {"across_hosts_bytes", l.across_hosts_bytes},
                       {"copied_bytes", l.copied_bytes},
                       {"stored_bytes", l.stored_bytes},
                       {"most_sequences_tried", bound.sequences},
                       {"largest_group_tried", bound.group},
                       {"keys", keys_of(l)},
                       {"refused", report.refusals[i]}});
    }
    return {{"parameters", report.model.parameters()},
            {"ranks", report.cluster.ranks},
            {"ranks_per_host", report.cluster.on_a_host},
            {"rates", report.rates},
            {"weighed", report.weighed},
            {"fixed", report.fixed},
            {"not_used", report.not_used},
            {"not_priced", report.not_priced},
            {"set_aside_seconds", report.set_aside ? nlohmann::json(report.set_aside->seconds)
                                                   : nlohmann::json(nullptr)},
            {"left_out", left_out},
            {"layouts", all}};
}

}  // namespace ferry::tools
