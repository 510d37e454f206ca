#include "network.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <nlohmann/json.hpp>
#include <numeric>
#include <utility>

#include "base/text.h"
#include "config/words.h"
#include "cost/layout_seconds.h"
#include "ferry/error.h"
#include "ferry/units.h"
#include "train/setup/from_config.h"
#include "train/step/momentum_schedule.h"

namespace ferry::tools {
namespace {

using Unit = std::pair<std::string_view, double>;
constexpr std::array<Unit, 4> kRates{{{"Gbit", 1e9}, {"Mbit", 1e6}, {"Kbit", 1e3}, {"bit", 1}}};
constexpr std::array<Unit, 4> kTimes{{{"us", 1e-6}, {"ms", 1e-3}, {"ns", 1e-9}, {"s", 1}}};

// A number and its unit; below `least` it is refused.
double quantity(const std::string& text, std::span<const Unit> units, double least,
                const char* option, const char* example) {
    double number = 0;
    const char* end = text.data() + text.size();
    const auto read = std::from_chars(text.data(), end, number);
    if (read.ec == std::errc()) {
        for (const auto& [unit, size] : units) {
            if (std::string_view(read.ptr, end) == unit && number * size >= least &&
                number * size <= 1e18)
                return number * size;
        }
    }
    throw Error(Trouble::usage, {.what = "not a number with a unit, or out of range",
                                 .where = option,
                                 .measured = text,
                                 .remedy = std::string("write it as ") + example});
}

// Signs are of momentum: no key of the gradients has them.
std::string_view word_of(CodecKind kind) {
    return kind == CodecKind::sign ? "signs" : config::word_of(config::kGradientCodecs, kind);
}

// What the ranks of a host do among themselves first.
struct Hosts {
    int each = 1;
    bool keep = false;  // second shards
};
// What they can do; none: hosts have one each, or all, or groups of their own.
std::optional<Hosts> hosts_of(const Config& config, const train::RankCount& count) {
    const ParallelConfig& p = config.parallel;
    const int each = count.on_a_host;
    if (p.tensor > 1 || p.pipeline > 1 || each == 1 || each >= count.ranks ||
        count.ranks % each != 0)
        return std::nullopt;
    return Hosts{.each = each, .keep = config.zero.stage == 3};
}

CodecStep step_with(const CompressConfig& codecs, const Hosts& hosts, Config config,
                    const train::RankCount& count, const std::optional<MachineFile>& machine,
                    const Network& network, cost::Measurements measured) {
    const bool signs = codecs.gradients == CodecKind::sign;
    config.zero.compress = codecs;
    config.zero.ranks_per_host = hosts.each;
    config.zero.second_shard = hosts.keep ? SecondShard::host : SecondShard::none;
    if (signs) config.zero.compress.gradients = CodecKind::none;
    const auto predictor = predictor_for(config, count, machine, false);
    plan_by(machine, config, *predictor);
    predictor->choose_schedule(over(network, count, config, predictor->planned_by()));
    const planner::Plan plan = predictor->plan(train::request_of(config));
    const FoundMeasurements found = measurements_for(config, *predictor, plan, machine);
    // What all have in common is measured once, so that two steps differ by the codecs alone.
    for (const auto& [kind, seconds] : found.measurements.kernels.seconds) {
        if (cost::row_of(static_cast<cost::Op>(kind[0])).of_codecs)
            measured.kernels.seconds[kind] = seconds;
        else
            measured.kernels.seconds.try_emplace(kind, seconds);
    }
    if (signs && measured.momentum_bytes_per_s == 0)
        measured.momentum_bytes_per_s = found.measurements.momentum_bytes_per_s;
    const train::Prediction step = predictor->predict(
        train::request_of(config), plan, over(network, count, config, std::move(measured)),
        signs ? train::Exchanged::momentum : train::Exchanged::gradients);
    const auto comm = std::ranges::find(step.links, cost::Link::comm, &train::LinkPrediction::link);
    return {.gradients = codecs.gradients,
            .weights = codecs.weights,
            .ranks_per_host = hosts.each,
            .second_shards = hosts.keep,
            .sent_bytes = comm == step.links.end() ? 0 : comm->bytes,
            .seconds = step.step_seconds};
}

}  // namespace

Network network_from(const std::string& rate, const std::string& latency) {
    return {.bits_per_s = quantity(rate, kRates, 1, "--network", "10Gbit"),
            .latency_s = quantity(latency, kTimes, 0, "--network-latency", "50us")};
}

cost::Measurements over(const Network& network, const train::RankCount& count, const Config& config,
                        cost::Measurements measured) {
    const ParallelConfig& groups = config.parallel;
    const double of_a_rank = network.bits_per_s / 8 / count.on_a_host;
    const double inside_rate = cost::comm_rate(measured);
    // Between `ranks`, of which a host has `here`.
    const auto rate = [&](int ranks, int here) {
        return cost::mean_rate(ranks, here, inside_rate, of_a_rank);
    };
    const double latency = network.latency_s, overhead = measured.comm_overhead_s;
    const auto group_rate = [&](int ranks, int here) {
        return cost::GroupRate{rate(ranks, here), overhead + (here < ranks ? latency : 0)};
    };
    // Neighbours share tensors; of every so many of them one shares a sequence. A host may begin
    // within a group.
    const int tensors_here = std::gcd(groups.tensor, count.on_a_host);
    if (groups.tensor > 1) measured.with_slices = group_rate(groups.tensor, tensors_here);
    if (groups.sequence > 1) {
        const int both_here = std::gcd(groups.tensor * groups.sequence, count.on_a_host);
        measured.with_sequence =
            group_rate(groups.sequence, std::max(1, both_here / groups.tensor));
    }
    // Stages are runs of neighbours. Where a host has several of them, ranks of one cross at a
    // time.
    const int of_a_stage = count.ranks / groups.pipeline;
    if (groups.pipeline > 1 && count.ranks > count.on_a_host) {
        const int at_once = std::min(of_a_stage, count.on_a_host);
        measured.between_stages = {network.bits_per_s / 8 / at_once, overhead + latency};
    }
    // State and gradients are exchanged by ranks that have the same slice of the tensors of a
    // stage.
    const int sharers = of_a_stage / groups.tensor;
    measured.comm_bytes_per_s =
        rate(sharers, std::clamp(count.on_a_host / groups.tensor, 1, sharers));
    if (of_a_stage > count.on_a_host && sharers > 1) measured.comm_overhead_s += latency;
    // The configuration's hosts may span several of the plan's, or be parts of one.
    const int each = config.zero.ranks_per_host;
    if (each > 1 && each < count.ranks) {
        const int alike = count.ranks / each;
        measured.in_host = group_rate(each, std::gcd(each, count.on_a_host));
        measured.across_hosts = group_rate(alike, std::clamp(count.on_a_host / each, 1, alike));
    }
    return measured;
}

const CodecStep& NetworkReport::best() const {
    return *std::ranges::min_element(steps, {}, &CodecStep::seconds);
}

const OtherOptimizer* NetworkReport::best_other() const {
    const OtherOptimizer* fastest = nullptr;
    double least_s = best().seconds;
    for (const OtherOptimizer& other : others) {
        if (!other.mean_s || *other.mean_s >= least_s) continue;
        fastest = &other;
        least_s = *other.mean_s;
    }
    return fastest;
}

NetworkReport network_report(const Config& config, const train::RankCount& count,
                             const std::optional<MachineFile>& machine, const Network& network,
                             const cost::Measurements& measured) {
    NetworkReport report{.network = network, .count = count};
    const bool sends = optim::sends_momentum(config.optimizer.method);
    const std::optional<Hosts> can = hosts_of(config, count);
    const bool gathers = config.zero.stage == 3;
    for (const CodecKind weights : {CodecKind::none, CodecKind::int8}) {
        if (weights != CodecKind::none && !gathers) continue;
        for (const CodecKind gradients :
             {CodecKind::none, CodecKind::int8, CodecKind::int4, CodecKind::sign}) {
            const bool takes = (gradients == CodecKind::sign) == sends;
            if (gradients != CodecKind::none && !takes) continue;
            const CompressConfig codecs{gradients, weights, config.zero.compress.block};
            const auto add = [&](const Hosts& hosts) {
                report.steps.push_back(
                    step_with(codecs, hosts, config, count, machine, network, measured));
            };
            add({});
            const bool coded = gradients == CodecKind::int8 || gradients == CodecKind::int4;
            if (can && (coded || can->keep)) add(*can);
        }
    }
    return report;
}

namespace {

// Of the run's steps, where those that exchange gradients take `gradients_s`. A local step sends
// nothing: it is counted as one of momentum, which is no less.
double mean_of(const Config& config, double gradients_s, double momentum_s) {
    const auto steps = train::MomentumSchedule(config.optimizer).of_each(config.steps);
    const auto in_full = steps[static_cast<size_t>(zero::Exchanged::gradients)];
    const auto rest = config.steps - in_full;
    return (static_cast<double>(in_full) * gradients_s + static_cast<double>(rest) * momentum_s) /
           static_cast<double>(config.steps);
}

}  // namespace

void add_others(NetworkReport& report, std::vector<OtherOptimizer> others,
                const std::optional<MachineFile>& machine, const cost::Measurements& measured) {
    for (OtherOptimizer& other : others) {
        if (!other.config) continue;
        try {
            const NetworkReport its =
                network_report(*other.config, report.count, machine, report.network, measured);
            double least_s = 0;
            for (const CodecStep& step : its.steps) {
                if (step.gradients != CodecKind::sign) continue;
                other.steps.push_back(step);
                // Its steps in full gather weights as this one does.
                const auto in_full = std::ranges::find_if(its.steps, [&](const CodecStep& one) {
                    return one.gradients == CodecKind::none && one.weights == step.weights &&
                           one.second_shards == step.second_shards;
                });
                const double mean_s = mean_of(*other.config, in_full->seconds, step.seconds);
                if (other.mean_s && mean_s >= least_s) continue;
                other.mean_s = least_s = mean_s;
            }
        } catch (const Error& error) {
            if (error.trouble() != Trouble::usage && error.trouble() != Trouble::does_not_fit)
                throw;
            other.why = error.problem().what;
        }
    }
    report.others = std::move(others);
}

namespace {

// The keys beside the gradients' codec, as a command line sets them.
std::string keys_of(const CodecStep& step) {
    std::string text = fmt::format("zero.compress.weights={}", word_of(step.weights));
    if (step.ranks_per_host > 1)
        text += fmt::format(" zero.ranks_per_host={}", step.ranks_per_host);
    if (step.second_shards) text += " zero.second_shard=host";
    return text;
}

std::string hosts_text(const CodecStep& step) {
    const bool combines = step.gradients == CodecKind::int8 || step.gradients == CodecKind::int4;
    if (step.ranks_per_host == 1) return "-";
    if (!step.second_shards) return "combine";
    return combines ? "combine, second shard" : "second shard";
}

}  // namespace

namespace {

// Those of another optimizer, which the run would have to be started with.
std::string text_of(const OtherOptimizer& other, double uncoded_s) {
    const std::string_view name = optim::name_of(other.method);
    if (!other.why.empty())
        return fmt::format("  another optimizer, {}: refused, {}\n", name, one_line(other.why));
    std::string text;
    for (const CodecStep& step : other.steps)
        text += fmt::format(
            "  {:<10} {:<8} {:<14} {:>12} {:>10.4f} {:>7.2f}x  another optimizer, {}\n",
            word_of(step.gradients), word_of(step.weights), hosts_text(step),
            format_bytes(step.sent_bytes), step.seconds, uncoded_s / step.seconds, name);
    if (!other.mean_s) return text;
    const int64_t in_full =
        train::MomentumSchedule(other.config->optimizer)
            .of_each(other.config->steps)[static_cast<size_t>(zero::Exchanged::gradients)];
    return text + fmt::format("  {:<33} {:>13} {:>10.4f} {:>7.2f}x  {}, {} step{} in full\n",
                              "mean of the run", "", *other.mean_s, uncoded_s / *other.mean_s, name,
                              in_full, in_full == 1 ? "" : "s");
}

// What is faster than every codec of the configuration's own optimizer.
std::string text_of_best_other(const NetworkReport& report) {
    if (report.others.empty()) return "";
    // Every row is of a step that exchanges.
    const bool local = std::ranges::any_of(report.others, [](const OtherOptimizer& other) {
        return other.method == optim::Method::zeroone_adam && other.mean_s;
    });
    const std::string_view without = local ? "; 0/1 Adam's local steps are left out" : "";
    const OtherOptimizer* other = report.best_other();
    if (!other)
        return fmt::format("  best of all: the same, no other optimizer is faster over the run{}\n",
                           without);
    return fmt::format(
        "  best of all: optimizer.method={}, {:.4f} s a step over the run; it is "
        "another optimizer, with a loss of its own{}\n",
        optim::name_of(other->method), *other->mean_s, without);
}

}  // namespace

std::string text_of(const NetworkReport& report) {
    std::string text = fmt::format(
        "a step over {:g} Gbit/s between hosts, {} ranks, {} a host:\n\n  {:<10} {:<8} {:<14} "
        "{:>12} {:>10} {:>8}\n",
        report.network.bits_per_s * 1e-9, report.count.ranks, report.count.on_a_host, "gradients",
        "weights", "hosts", "sent", "s a step", "faster");
    const double uncoded = report.steps.front().seconds;
    for (const CodecStep& step : report.steps)
        text += fmt::format("  {:<10} {:<8} {:<14} {:>12} {:>10.4f} {:>7.2f}x\n",
                            word_of(step.gradients), word_of(step.weights), hosts_text(step),
                            format_bytes(step.sent_bytes), step.seconds, uncoded / step.seconds);
    for (const OtherOptimizer& other : report.others) text += text_of(other, uncoded);
    const CodecStep& best = report.best();
    if (best.gradients == CodecKind::sign)
        return text + fmt::format("  best: momentum as signs, with {}\n\n", keys_of(best));
    return text +
           fmt::format("  best: zero.compress.gradients={} {}\n", word_of(best.gradients),
                       keys_of(best)) +
           text_of_best_other(report) + "\n";
}

nlohmann::json to_json(const NetworkReport& report) {
    const auto one = [](const CodecStep& step) -> nlohmann::json {
        return {{"gradients", word_of(step.gradients)},  {"weights", word_of(step.weights)},
                {"ranks_per_host", step.ranks_per_host}, {"second_shards", step.second_shards},
                {"sent_bytes", step.sent_bytes},         {"seconds", step.seconds}};
    };
    nlohmann::json steps = nlohmann::json::array();
    for (const CodecStep& step : report.steps) steps.push_back(one(step));
    nlohmann::json others = nlohmann::json::array();
    for (const OtherOptimizer& other : report.others) {
        nlohmann::json its = nlohmann::json::array();
        for (const CodecStep& step : other.steps) its.push_back(one(step));
        others.push_back(
            {{"optimizer", optim::name_of(other.method)},
             {"steps", its},
             {"mean_step_seconds", other.mean_s ? nlohmann::json(*other.mean_s) : nlohmann::json()},
             {"refused", other.why.empty() ? nlohmann::json() : nlohmann::json(other.why)}});
    }
    const OtherOptimizer* const other = report.best_other();
    return {{"bits_per_s", report.network.bits_per_s},
            {"latency_s", report.network.latency_s},
            {"ranks", report.count.ranks},
            {"ranks_per_host", report.count.on_a_host},
            {"steps", steps},
            {"other_optimizers", others},
            {"best_other_optimizer",
             other ? nlohmann::json(optim::name_of(other->method)) : nlohmann::json()},
            {"best", one(report.best())}};
}

}  // namespace ferry::tools
