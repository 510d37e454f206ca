// `ferry plan CONFIG`: where everything would go, what a step would take, and the learning rate
// over the steps, without training.
#include <spdlog/fmt/fmt.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <exception>
#include <memory>
#include <nlohmann/json.hpp>

#include "base/log.h"
#include "base/text.h"
#include "checkpoint_cost.h"
#include "cost/traffic.h"
#include "ferry/config.h"
#include "ferry/optim.h"
#include "ferry/train.h"
#include "layouts_report.h"
#include "network.h"
#include "pattern_picture.h"
#include "phases.h"
#include "pipeline_report.h"
#include "prediction_report.h"
#include "timeline_picture.h"
#include "tools/commands.h"
#include "tools/machine/machine_text.h"
#include "tools/options/override_options.h"
#include "tools/output/json_line.h"
#include "tools/output/output.h"
#include "tools/output/svg.h"
#include "tools/train/run_table.h"
#include "train/prediction/config_facts.h"
#include "train/prediction/kernel_profile.h"
#include "train/prediction/predictor.h"
#include "train/setup/from_config.h"
#include "train/setup/rank_share.h"
#include "train/setup/stages.h"
#include "wear.h"

namespace ferry::tools {
namespace {

struct PlanOptions {
    std::string config{};
    Overrides overrides{};
    std::string machine{}, svg{}, pattern_svg{}, network{}, network_latency = "0us", gpu{};
    train::RankCount count{.ranks = 1, .on_a_host = 0};  // on_a_host 0: all of them
    int hosts = 0;                                       // 0: by on_a_host
    bool schedule = false, json = false, prediction = true, longest = false, layouts = false;
};

// At most about 25 steps: the first and the last, evenly spaced ones, and where the rate turns.
std::vector<int64_t> steps_shown(const Config& config, const optim::LrSchedule& schedule) {
    constexpr int64_t kLines = 24;
    const int64_t last = std::max<int64_t>(1, config.steps);
    std::vector<int64_t> steps{1};
    for (int64_t i = 1; i <= kLines; ++i) steps.push_back(std::max<int64_t>(1, last * i / kLines));
    std::vector<int64_t> turns{schedule.warmup_steps};
    if (schedule.kind == optim::Decay::wsd)
        turns.push_back(schedule.total_steps - schedule.decay_steps);
    for (const int64_t turn : turns) {
        if (turn >= 1 && turn <= last) steps.push_back(turn);
    }
    std::sort(steps.begin(), steps.end());
    steps.erase(std::unique(steps.begin(), steps.end()), steps.end());
    return steps;
}

void print_schedule(const Config& config, const optim::LrSchedule& schedule) {
    constexpr double kWidth = 50;
    print("learning rate, {} from {:g} over {} steps\n\n", optim::name_of(schedule.kind),
          schedule.peak, config.steps);
    print("  {:>9} {:>11}\n", "step", "lr");
    for (const int64_t step : steps_shown(config, schedule)) {
        const double lr = optim::learning_rate(schedule, step);
        const double part = schedule.peak > 0 ? lr / schedule.peak : 0;
        const auto bar = static_cast<size_t>(std::lround(kWidth * std::clamp(part, 0.0, 1.0)));
        print("  {:>9} {:>11.4e} {}\n", step, lr, std::string(bar, '#'));
    }
}

// Every step of an ordinary run; of a long one every k-th, and the last.
std::vector<int64_t> steps_listed(int64_t last) {
    constexpr int64_t kMost = 10000;
    const int64_t every = last <= kMost ? 1 : last / (kMost - 1) + 1;
    std::vector<int64_t> steps;
    for (int64_t i = 0; i <= (last - 1) / every; ++i) steps.push_back(1 + i * every);
    if (steps.back() != last) steps.push_back(last);
    return steps;
}

nlohmann::json schedule_json(const Config& config, const optim::LrSchedule& schedule) {
    const std::vector<int64_t> steps = steps_listed(config.steps);
    nlohmann::json rates = nlohmann::json::array();
    for (const int64_t step : steps) rates.push_back(optim::learning_rate(schedule, step));
    return {{"kind", optim::name_of(schedule.kind)},
            {"peak", schedule.peak},
            {"step", steps},
            {"lr", rates}};
}

PredictionReport prediction_of(const std::optional<MachineFile>& machine, const Config& config,
                               train::Predictor& predictor, const planner::Plan& plan,
                               const std::optional<Network>& network) {
    PredictionReport report{.found = measurements_for(config, predictor, plan, machine)};
    if (!report.found.missing.empty()) return report;
    report.in_a_host = report.found.measurements;
    if (network)
        report.found.measurements = over(*network, predictor.count(), config, report.in_a_host);
    report.prediction =
        predictor.predict(train::request_of(config), plan, report.found.measurements);
    report.what_if = what_if(config, predictor, plan, report.found.measurements);
    return report;
}

// Operations that do not go the fast way on this GPU, a line each.
std::string text_of(const std::vector<ops::SlowPath>& paths) {
    std::string text;
    for (const ops::SlowPath& path : paths) {
        const auto times = static_cast<double>(path.times);
        text += fmt::format("slow: {}, {}: about {:.3g} s of a step, {:.3g} the fast way; {}\n",
                            path.operation, path.shape, path.seconds * times,
                            path.fast_seconds * times, path.why);
    }
    return text.empty() ? text : text + '\n';
}

nlohmann::json to_json(const std::vector<ops::SlowPath>& paths) {
    nlohmann::json all = nlohmann::json::array();
    for (const ops::SlowPath& path : paths) {
        const auto times = static_cast<double>(path.times);
        all.push_back({{"operation", path.operation},
                       {"shape", path.shape},
                       {"why", path.why},
                       {"seconds", path.seconds * times},
                       {"fast_seconds", path.fast_seconds * times}});
    }
    return all;
}

// Says what attention computes; nothing where that is all of the causal mask.
std::string text_of(const std::optional<train::PatternShare>& share, const Config& config) {
    const std::string documents = config.data.isolate_documents ? "documents isolated" : "";
    if (!share) return documents.empty() ? "" : "attention: " + documents + "\n\n";
    const std::string layouts =
        share->layouts > 1 ? fmt::format(", {} layouts a layer", share->layouts) : "";
    return fmt::format(
        "attention: {} in {} layer{}, blocks of {} tokens{}: {:.1f} % of the causal "
        "mask's pairs, {:.1f} % of its blocks{}\n\n",
        share->name, share->layers, share->layers == 1 ? "" : "s", share->block, layouts,
        100 * share->pairs, 100 * share->blocks, documents.empty() ? "" : "; " + documents);
}

nlohmann::json to_json(const std::optional<train::PatternShare>& share, const Config& config) {
    nlohmann::json attention = {{"pattern", "dense"},
                                {"documents_isolated", config.data.isolate_documents}};
    if (!share) return attention;
    attention["pattern"] = share->name;
    attention["block"] = share->block;
    attention["layers"] = share->layers;
    attention["layouts"] = share->layouts;
    attention["pairs"] = share->pairs;
    attention["blocks"] = share->blocks;
    return attention;
}

// Says what sequence is the longest that fits.
std::string text_of_longest(int64_t tokens, const Config& config) {
    const int ranks = config.parallel.sequence;
    const std::string batch = fmt::format(
        "{} x {} of them a step{}", config.batch.micro_batches, config.batch.micro_batch,
        ranks > 1 ? fmt::format(", over {} ranks each", ranks) : "");
    if (tokens == 0)
        return fmt::format("longest sequence: none of {} tokens fits, {}\n\n", train::kSequenceUnit,
                           batch);
    return fmt::format("longest sequence that fits: {}{} tokens, {}\n\n", tokens,
                       tokens == train::kSequenceMost ? " or more" : "", batch);
}

void draw_pattern(const std::string& file, const std::optional<train::PatternShare>& share,
                  const Config& config) {
    if (!share) {
        throw Error(Trouble::usage,
                    {.what = "there is no pattern to draw",
                     .where = "--pattern-svg",
                     .measured = "attention.pattern is dense",
                     .remedy = "set attention.pattern, or leave --pattern-svg out"});
    }
    write_picture(
        "--pattern-svg", file,
        pattern_svg(*share->lists, share->name,
                    fmt::format("{} tokens in blocks of {}, {:.1f} % of the causal mask",
                                config.batch.sequence, share->block, 100 * share->blocks)));
}

// Of --hosts, which --ranks-per-host may repeat.
int ranks_per_host_of_hosts(const PlanOptions& options) {
    const int ranks = options.count.ranks, each = options.count.on_a_host;
    const bool divides = ranks % options.hosts == 0;
    if (divides && (each == 0 || each == ranks / options.hosts)) return ranks / options.hosts;
    throw Error(Trouble::usage,
                {.what = divides ? "--hosts and --ranks-per-host disagree"
                                 : "the hosts do not have as many ranks each",
                 .where = "--hosts",
                 .measured = fmt::format("{} ranks, {} hosts{}", ranks, options.hosts,
                                         each > 0 ? fmt::format(", {} a host", each) : ""),
                 .limit = divides ? fmt::format("{} a host", ranks / options.hosts)
                                  : "a divisor of the ranks",
                 .remedy = divides ? "give one of them" : "change --ranks or --hosts"});
}

// Where --ranks-per-host says nothing, as the configuration has it: 0 where that says nothing too.
int ranks_per_host_of(const PlanOptions& options, const Config& config) {
    if (options.hosts > 0) return ranks_per_host_of_hosts(options);
    if (options.count.on_a_host > 0) return options.count.on_a_host;
    // Fewer ranks fill one host in part.
    if (const std::optional<int>& given = config.budgets.ranks_per_host)
        return std::min(*given, options.count.ranks);
    const bool joined = options.layouts || !options.network.empty();
    const int each = config.zero.ranks_per_host;
    return joined && each > 1 ? std::min(each, options.count.ranks) : 0;
}

// With --network, one rank a host unless something says more.
train::RankCount count_of(const PlanOptions& options, const Config& config) {
    train::RankCount count = options.count;
    count.on_a_host = ranks_per_host_of(options, config);
    if (options.network.empty()) return on_hosts(count);
    if (count.on_a_host == 0) count.on_a_host = 1;
    count = on_hosts(count);
    if (count.on_a_host == count.ranks) {
        const bool of_a_key = options.count.on_a_host == 0 && !config.budgets.ranks_per_host &&
                              config.zero.ranks_per_host > 1;
        throw Error(Trouble::usage,
                    {.what = "no network joins the ranks of one host",
                     .where = "--network",
                     .measured = fmt::format("{} rank{}, {} a host{}", count.ranks,
                                             count.ranks == 1 ? "" : "s", count.on_a_host,
                                             of_a_key ? " by zero.ranks_per_host" : ""),
                     .remedy = "give more --ranks, or say with --ranks-per-host or "
                               "budgets.ranks_per_host how many each of several hosts has"});
    }
    return count;
}

std::optional<Network> network_of(const PlanOptions& options) {
    if (options.network.empty()) return std::nullopt;
    return network_from(options.network, options.network_latency);
}

// A step to draw.
void require_step(const PredictionReport& report) {
    if (report.found.missing.empty()) return;
    throw Error(Trouble::usage, {.what = "there is no step to draw: a measurement is missing",
                                 .where = "--svg",
                                 .measured = report.found.missing,
                                 .remedy = "mend that, give a machine file that has the "
                                           "measurement (--machine), or leave --svg out"});
}

// Of a group whose ranks are not on one host.
void warn_of_hosts(const planner::Plan& plan, const train::RankCount& count) {
    const int tensor = plan.partition.slices;
    if (tensor == 1 || count.on_a_host % tensor == 0) return;
    log_warn(
        fmt::format("parallel.tensor {} does not divide the {} rank{} of a host: some groups span "
                    "hosts, and up to {} "
                    "of each of their ranks cross the network in a step",
                    tensor, count.on_a_host, count.on_a_host == 1 ? "" : "s",
                    format_bytes(kernel_bytes(plan).bytes)));
}

// Of hosts that the configuration cuts otherwise than the plan.
void warn_of_other_hosts(const planner::Plan& plan, const Config& config,
                         const train::RankCount& count) {
    const int each = config.zero.ranks_per_host;
    const zero::Partition& partition = plan.partition;
    if (each == count.on_a_host || count.on_a_host == count.ranks ||
        !(partition.two_levels() || partition.keeps_second_shards()))
        return;
    const cost::CommTraffic moved = cost::comm_traffic(plan.layers, partition, plan.compute,
                                                       plan.wire, zero::Exchanged::gradients);
    const int parts = count.on_a_host / each;
    const std::string so =
        count.on_a_host % each != 0
            ? fmt::format(
                  "up to {} of a rank's that was to stay in a host crosses the network in "
                  "a step",
                  format_bytes(static_cast<int64_t>(moved.in_host)))
        : partition.two_levels()
            ? fmt::format("a host sends {} sums of its gradients where one would do", parts)
            : fmt::format("a host keeps {} second shards where one would do", parts);
    log_warn(
        fmt::format("zero.ranks_per_host is {}, and this plan has {} rank{} on a host: {}; set "
                    "it to the ranks that each host has, or plan with --ranks-per-host {}",
                    each, count.on_a_host, count.on_a_host == 1 ? "" : "s", so, each));
}

// The configuration with these keys more, or what refuses it. It has been warned of already.
struct Changed {
    std::optional<Config> config{};
    std::string why{};
};
Changed with_keys(const PlanOptions& options, const std::vector<std::string>& more) {
    static constexpr LogSink kNowhere{.line = [](LogLevel, Warning, std::string_view) {}};
    std::vector<std::string> keys = more;
    if (!options.gpu.empty()) keys.emplace_back("device=cuda");
    const auto names = [](const std::string& one, const std::string& other) {
        return one.substr(0, one.find('=')) == other.substr(0, other.find('='));
    };
    for (const std::string& given : options.overrides.keys) {
        if (std::ranges::none_of(keys, [&](const std::string& one) { return names(one, given); }))
            keys.push_back(given);
    }
    set_log_sink(&kNowhere);
    Changed changed;
    try {
        changed.config = load_config(options.config, keys);
    } catch (const Error& error) {
        changed.why = error.problem().what;
    }
    set_log_sink(nullptr);
    return changed;
}

// The optimizers that send momentum, for a run of AdamW or Adam. As the papers have it, the second
// moment stays from a fifth of the steps on, or from the end of the warm-up. Coded gradients are
// not theirs.
std::vector<OtherOptimizer> others_of(const PlanOptions& options, const Config& config) {
    using optim::Method;
    const Method method = config.optimizer.method;
    if (method != Method::adamw && method != Method::adam) return {};
    const int64_t freeze = std::max<int64_t>(
        1, std::min(std::max(config.schedule.warmup_steps, config.steps / 5), config.steps - 1));
    std::vector<OtherOptimizer> others;
    for (const auto& [other, key] :
         {std::pair{Method::onebit_adam, "optimizer.freeze_step"},
          std::pair{Method::zeroone_adam, "optimizer.var_freeze_step"}}) {
        Changed changed =
            with_keys(options, {fmt::format("optimizer.method={}", optim::name_of(other)),
                                fmt::format("{}={}", key, freeze), "zero.compress.gradients=none"});
        others.push_back({.method = other, .config = changed.config, .why = changed.why});
    }
    return others;
}

std::optional<NetworkReport> codecs_over(const PlanOptions& options, const Network& network,
                                         const Config& config, const train::RankCount& count,
                                         const std::optional<MachineFile>& machine,
                                         const PredictionReport& measured) {
    if (!measured.found.missing.empty()) return std::nullopt;
    NetworkReport report = network_report(config, count, machine, network, measured.in_a_host);
    add_others(report, others_of(options, config), machine, measured.in_a_host);
    return report;
}

// With --layouts the number of stages is chosen, unless it is given: what the configuration's
// checks then say of one stage is of none.
Config config_to_divide(const PlanOptions& options) {
    static std::vector<std::string> warnings;
    static constexpr LogSink kKept{
        .line = [](LogLevel level, Warning about, std::string_view line) {
            if (level == LogLevel::warn && about != Warning::idle_with_one_stage)
                warnings.emplace_back(line);
        }};
    const auto load = [&] {
        return options.overrides.checked(load_config(options.config, options.overrides.keys));
    };
    const std::vector<std::string> given = given_keys(options.config, options.overrides.keys);
    if (std::ranges::find(given, "parallel.pipeline") != given.end()) return load();
    set_log_sink(&kKept);
    std::exception_ptr failed;
    Config config;
    try {
        config = load();
    } catch (...) {
        failed = std::current_exception();
    }
    set_log_sink(nullptr);
    for (const std::string& line : warnings) log_warn(line);
    if (failed) std::rethrow_exception(failed);
    return config;
}

void run_layouts(const PlanOptions& options) {
    const Config config = config_to_divide(options);
    const LayoutsReport report = layouts_report(
        config, given_keys(options.config, options.overrides.keys), count_of(options, config),
        options.gpu, network_of(options),
        [&](const std::vector<std::string>& more) { return with_keys(options, more).why; });
    print("{}", options.json ? json_line(to_json(report)) : text_of(report));
}

// What the plan itself says.
nlohmann::json plan_json(const planner::Plan& plan, const Config& config) {
    return {{"device_bytes", plan.device_bytes},
            {"host_bytes", plan.host_bytes},
            {"nvme_bytes", plan.nvme_bytes},
            {"chunk_elements", plan.chunk_elements},
            {"micro_batches", plan.micro_batches},
            {"groups", plan.groups},
            {"attention_saved", plan.blocks_saving(model::Saved::attention)},
            {"mlp_saved", plan.blocks_saving(model::Saved::mlp)},
            {"projections_saved", plan.blocks_saving(model::Saved::projections)},
            {"inputs_saved", plan.blocks_saving_inputs()},
            {"ranks", plan.partition.of_run()},
            {"tensor", plan.partition.slices},
            {"sequence", config.parallel.sequence},
            {"kernel_exchanges",
             {{"bytes", kernel_bytes(plan).bytes}, {"calls", kernel_bytes(plan).calls}}},
            {"tiers", tiers_json(plan)},
            {"schedules", schedules_json(train::schedule_bytes(plan), plan.partition.of_run())}};
}

// All that `ferry plan` says of a configuration.
struct Answer {
    std::vector<planner::Plan> plans{};  // of each stage
    std::string planned_by{};
    bool tokens_checked = false;
    std::optional<train::PatternShare> pattern{};
    std::optional<std::vector<ops::SlowPath>> slow{};
    std::optional<PredictionReport> report{};
    std::vector<Phase> phases{};
    std::optional<NetworkReport> over_network{};
    std::optional<CheckpointCost> checkpoint{};
    Wear wear{};
    int64_t longest = 0;
    const planner::Plan& plan() const { return plans.front(); }
    // Of the whole configuration; null: not known.
    const train::Prediction* step() const {
        return report && report->found.missing.empty() ? &report->prediction : nullptr;
    }
};

// What a user should know of these plans before reading them.
void warn_of(const Answer& answer, const Config& config, const train::RankCount& count) {
    warn_of_hosts(answer.plan(), count);
    warn_of_other_hosts(answer.plan(), config, count);
    train::warn_of_one_host(config, train::world_of(config, 0, count.ranks, count.on_a_host));
    train::warn_of_bubble(answer.plan());
    train::warn_of_gathers(answer.plan());
}

void print_text(const PlanOptions& options, const Config& config, const Answer& answer,
                const train::Predictor& predictor) {
    print_plan(answer.plan(), config);
    print("{}", pipeline_text(answer.plans, answer.step(), predictor.schedules()));
    print("planned by {}\n\n", answer.planned_by);
    if (!answer.tokens_checked)
        print("tokens not checked: {} is not there yet\n\n", one_line(config.data.tokens));
    print("{}", text_of(answer.pattern, config));
    if (options.longest) print("{}", text_of_longest(answer.longest, config));
    if (answer.slow) print("{}", text_of(*answer.slow));
    if (answer.report) print("{}", text_of(*answer.report));
    print("{}", text_of(answer.phases));
    if (answer.over_network) print("{}", text_of(*answer.over_network));
    print("{}", text_of(answer.wear, config));
    if (answer.checkpoint) print("{}", text_of(*answer.checkpoint));
    if (options.schedule) print_schedule(config, train::schedule_of(config));
}

nlohmann::json json_of(const PlanOptions& options, const Config& config, const Answer& answer,
                       const train::Predictor& predictor) {
    nlohmann::json line = plan_json(answer.plan(), config);
    line["phases"] = to_json(answer.phases, answer.plan().partition.of_run());
    if (const auto mean = mean_seconds(answer.phases)) line["mean_step_seconds"] = *mean;
    line["planned_by"] = answer.planned_by;
    line["tokens_checked"] = answer.tokens_checked;
    line["attention"] = to_json(answer.pattern, config);
    line["slow_operations"] = answer.slow ? to_json(*answer.slow) : nlohmann::json();
    line["wear"] = to_json(answer.wear);
    if (answer.plans.size() > 1)
        line["pipeline"] = pipeline_json(answer.plans, answer.step(), predictor.schedules());
    if (options.longest) line["longest_sequence"] = answer.longest;
    if (answer.checkpoint) line["checkpoint"] = to_json(*answer.checkpoint);
    if (answer.report) line["prediction"] = to_json(*answer.report);
    if (answer.over_network) line["network"] = to_json(*answer.over_network);
    if (options.schedule) line["schedule"] = schedule_json(config, train::schedule_of(config));
    return line;
}

void run_plan(const PlanOptions& options) {
    if (options.layouts) return run_layouts(options);
    const Config config =
        options.overrides.checked(load_config(options.config, options.overrides.keys));
    if (!options.svg.empty()) check_picture_file("--svg", options.svg);
    if (!options.pattern_svg.empty()) check_picture_file("--pattern-svg", options.pattern_svg);
    Answer answer{.tokens_checked = train::check_token_header(config)};
    if (options.machine.empty()) train::check_reserved_cores(config);  // else of another machine
    const train::RankCount count = count_of(options, config);
    const std::optional<Network> network = network_of(options);
    std::optional<MachineFile> machine;
    if (!options.machine.empty()) machine = MachineFile::read(options.machine);
    const auto predictor = predictor_for(config, count, machine);
    answer.planned_by = plan_by(machine, config, *predictor);
    if (options.prediction) require_memory_to_measure(*predictor, machine);
    if (network && !options.prediction && !predictor->chooses())
        log_warn(
            "--network does nothing here: with --no-prediction only the choice of a "
            "pipeline's schedule goes by it");
    if (network) predictor->choose_schedule(over(*network, count, config, predictor->planned_by()));
    answer.plans = predictor->plans(train::request_of(config));
    const planner::Plan& plan = answer.plan();
    warn_of(answer, config, count);
    answer.pattern = train::pattern_share(config);
    if (!options.pattern_svg.empty()) draw_pattern(options.pattern_svg, answer.pattern, config);
    answer.slow = train::slow_operations(config, predictor->is_here());
    if (options.prediction)
        answer.report = prediction_of(machine, config, *predictor, plan, network);
    const PredictionReport* const report = answer.report ? &*answer.report : nullptr;
    if (report && !options.svg.empty()) require_step(*report);
    if (options.json || plan.has_feedback()) answer.phases = phases_of(config, plan);
    if (answer.step())
        predict(answer.phases, answer.step()->step_seconds, config, *predictor, plan,
                report->found.measurements);
    if (network && report)
        answer.over_network = codecs_over(options, *network, config, count, machine, *report);
    answer.checkpoint = checkpoint_cost(config, plan, predictor->layers(), count, report);
    answer.wear = wear_of(config, *predictor, plan, count,
                          report ? report->found.path_rates : std::vector<double>{});
    if (report && !options.svg.empty())
        write_picture("--svg", options.svg, timeline_svg(report->prediction, machine_text()));
    if (options.longest) answer.longest = predictor->longest_sequence();
    if (options.json)
        print("{}", json_line(json_of(options, config, answer, *predictor)));
    else
        print_text(options, config, answer, *predictor);
}

}  // namespace
}  // namespace ferry::tools

void add_plan_command(CLI::App& app) {
    using namespace ferry::tools;
    const auto options = std::make_shared<PlanOptions>();
    CLI::App* command = app.add_subcommand("plan", "say what `train` would do, without training");
    command->add_option("config", options->config, "JSON configuration (docs/configuration.md)")
        ->required();
    add_overrides(*command, options->overrides, "override a key: --set budgets.host=64MiB");
    CLI::Option* machine =
        command->add_option("--machine", options->machine,
                            "a machine file (docs/machine.md): what it knows is not measured");
    command->add_option("--ranks", options->count.ranks, "plan one of so many ranks")
        ->check(CLI::Range(1, 1 << 16));
    command
        ->add_option("--ranks-per-host", options->count.on_a_host,
                     "neighbouring ranks on each host, which share its budgets and its network; "
                     "those of zero.ranks_per_host exchange among themselves first (default: "
                     "budgets.ranks_per_host, else all; with --network also "
                     "zero.ranks_per_host, else 1)")
        ->check(CLI::Range(1, 1 << 16));
    command
        ->add_option("--hosts", options->hosts,
                     "hosts that have those ranks, as many each: in place of --ranks-per-host")
        ->check(CLI::Range(1, 1 << 16));
    CLI::Option* here =
        command
            ->add_option("--ranks-here", options->count.here,
                         "how many ranks compute on this machine at the same time, where it stands "
                         "for several hosts (default, and at the least: those of one)")
            ->check(CLI::Range(1, 1 << 10));
    CLI::Option* svg =
        command->add_option("--svg", options->svg, "write the step's timeline to this file (SVG)");
    CLI::Option* pattern_svg =
        command->add_option("--pattern-svg", options->pattern_svg,
                            "write a picture of attention.pattern's blocks to this file (SVG)");
    CLI::Option* longest =
        command->add_flag("--longest-sequence", options->longest,
                          "say how long a sequence fits the budgets, all else as it is");
    CLI::Option* network = command->add_option(
        "--network", options->network,
        "a step with each codec where hosts are joined by this rate, such as 10Gbit; with "
        "--no-prediction the choice of parallel.schedule alone goes by it");
    command
        ->add_option("--network-latency", options->network_latency,
                     "what an exchange between hosts takes longer, such as 50us")
        ->needs(network);
    CLI::Option* layouts = command->add_flag(
        "--layouts", options->layouts,
        "nothing but the best ways for so many ranks to share tensors, sequences, layers and "
        "state, by arithmetic");
    command
        ->add_option("--gpu", options->gpu,
                     "the GPU that --layouts reckons with: a100, h100 or h200")
        ->needs(layouts);
    command
        ->add_flag("!--no-prediction", options->prediction,
                   "only where everything goes: measure nothing, predict nothing")
        ->excludes(svg)
        ->excludes(layouts);
    CLI::Option* schedule = command->add_flag("--schedule", options->schedule,
                                              "the learning rate over the steps as well");
    // It plans no single layout, and its rates are those of a device or a data sheet.
    for (CLI::Option* other : {machine, here, svg, pattern_svg, longest, schedule})
        layouts->excludes(other);
    command->add_flag("--json", options->json,
                      "one JSON object; with --schedule the rates of at most 10,000 steps, evenly "
                      "spaced, and those steps");
    command->footer("Example: ferry plan my.json --set budgets.device=20GiB --svg step.svg");
    command->callback([options] { run_plan(*options); });
}
