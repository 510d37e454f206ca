// `ferry plan CONFIG`: where everything would go, what a step would take, and the learning rate
// over the steps, without training.
#include <CLI/CLI.hpp>
#include <memory>
#include <nlohmann/json.hpp>

#include "attention_report.h"
#include "base/log.h"
#include "changed_config.h"
#include "checkpoint_cost.h"
#include "ferry/config.h"
#include "ferry/train.h"
#include "host_warnings.h"
#include "layouts_report.h"
#include "network.h"
#include "phases.h"
#include "plan_answer.h"
#include "plan_options.h"
#include "prediction_report.h"
#include "timeline_picture.h"
#include "tools/commands.h"
#include "tools/machine/machine_text.h"
#include "tools/output/json_line.h"
#include "tools/output/output.h"
#include "tools/output/svg.h"
#include "train/prediction/config_facts.h"
#include "train/prediction/kernel_profile.h"
#include "train/prediction/predictor.h"
#include "train/setup/from_config.h"
#include "train/setup/rank_share.h"
#include "train/setup/stages.h"
#include "wear.h"

namespace ferry::tools {
namespace {

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

// A step to draw.
void require_step(const PredictionReport& report) {
    if (report.found.missing.empty()) return;
    throw Error(Trouble::usage, {.what = "there is no step to draw: a measurement is missing",
                                 .where = "--svg",
                                 .measured = report.found.missing,
                                 .remedy = "mend that, give a machine file that has the "
                                           "measurement (--machine), or leave --svg out"});
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

void run_layouts(const PlanOptions& options) {
    const Config config = config_to_divide(options);
    const LayoutsReport report = layouts_report(
        config, given_keys(options.config, options.overrides.keys), count_of(options, config),
        options.gpu, network_of(options),
        [&](const std::vector<std::string>& more) { return with_keys(options, more).why; });
    print("{}", options.json ? json_line(to_json(report)) : text_of(report));
}

// What a user should know of these plans before reading them.
void warn_of(const Answer& answer, const Config& config, const train::RankCount& count) {
    warn_of_hosts(answer.plan(), config, count);
    train::warn_of_one_host(config, train::world_of(config, 0, count.ranks, count.on_a_host));
    train::warn_of_bubble(answer.plan());
    train::warn_of_gathers(answer.plan());
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
    add_plan_options(*command, *options);
    command->callback([options] { run_plan(*options); });
}
