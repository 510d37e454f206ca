#include "plan_answer.h"

#include <nlohmann/json.hpp>

#include "attention_report.h"
#include "base/text.h"
#include "learning_rates.h"
#include "pipeline_report.h"
#include "slow_operations.h"
#include "tools/output/output.h"
#include "tools/train/run_table.h"

namespace ferry::tools {
namespace {

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

}  // namespace

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
    if (options.schedule) print_learning_rates(config);
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
    if (options.schedule) line["schedule"] = learning_rates_json(config);
    return line;
}

}  // namespace ferry::tools
