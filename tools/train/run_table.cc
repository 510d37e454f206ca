#include "run_table.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "swap/schedule.h"
#include "tools/output/output.h"
#include "train/step/momentum_schedule.h"

namespace ferry::tools {
namespace {

int64_t budget_of(swap::Tier tier, const Config& config) {
    switch (tier) {
        case swap::Tier::device:
            return config.budgets.device_bytes;
        case swap::Tier::host:
            return config.budgets.host_bytes;
        case swap::Tier::nvme:
            break;
    }
    int64_t total = 0;
    for (const NvmePath& path : config.budgets.nvme) {
        if (path.size_bytes == kUnlimited) return kUnlimited;
        total += path.size_bytes;
    }
    return total;
}

int64_t used_of(swap::Tier tier, const planner::Plan& plan) {
    switch (tier) {
        case swap::Tier::device:
            return plan.device_bytes + plan.device_overhead_bytes;
        case swap::Tier::host:
            return plan.host_bytes;
        case swap::Tier::nvme:
            return plan.nvme_bytes;
    }
    return 0;
}

// Not what the plan says, but what the run found itself with.
int64_t reserved_of(swap::Tier tier, const train::Reserved& reserved) {
    switch (tier) {
        case swap::Tier::device:
            return reserved.device_bytes + reserved.device_overhead_bytes;
        case swap::Tier::host:
            return reserved.host_bytes;
        case swap::Tier::nvme:
            return reserved.nvme_bytes;
    }
    return 0;
}

constexpr std::array<swap::Tier, 3> kTiers{swap::Tier::device, swap::Tier::host, swap::Tier::nvme};

std::string budget_text(int64_t bytes) {
    return bytes == kUnlimited ? "unlimited" : format_bytes(bytes);
}

int64_t trainable_of(const planner::Plan& plan) {
    int64_t count = 0;
    for (const model::Layer& layer : plan.layers) {
        for (const model::Tensor& tensor : layer.tensors)
            count += tensor.trainable ? tensor.whole_count() : 0;
    }
    return count;
}

// How gradients or weights travel.
std::string wire_text(const zero::Codec& codec, bool gradients, const planner::Plan& plan) {
    if (codec.on()) return text_of(codec);
    return std::string(name_of(gradients ? plan.wire : plan.compute));
}

}  // namespace

double mfu_of(double model_flops_per_s, double gemm_flops_per_s) {
    return gemm_flops_per_s > 0 ? model_flops_per_s / gemm_flops_per_s : 0;
}

namespace {

std::string text_of_slices(const planner::Plan& plan) {
    if (plan.partition.slices == 1) return "";
    return fmt::format(", {} neighbours with slices of the same tensors", plan.partition.slices);
}

std::string text_of_parts(const Config& config) {
    if (config.parallel.sequence == 1) return "";
    return fmt::format(", {} with parts of the same sequences", config.parallel.sequence);
}

// Others have other layers.
std::string text_of_stage(const planner::Plan& plan) {
    const zero::Stage& stage = plan.partition.stage;
    if (stage.all()) return "";
    return fmt::format("of stage {} of {}, which has {} blocks: ", stage.index, stage.count,
                       plan.blocks());
}

}  // namespace

KernelBytes kernel_bytes(const planner::Plan& plan) {
    KernelBytes sent;
    for (int64_t layer = 0; layer < std::ssize(plan.layers); ++layer) {
        if (!plan.partition.stage.has(layer)) continue;
        const model::Layer& its_layer = plan.layers[static_cast<size_t>(layer)];
        const bool is_head = its_layer.kind == model::LayerKind::head;
        const bool goes_back = its_layer.kind == model::LayerKind::embedding
                                   ? its_layer.trainable_elements > 0
                                   : plan.goes_back(layer);
        for (const bool back : {false, true}) {
            // The head's is both ways.
            if (is_head ? !back : back && !goes_back) continue;
            const model::BlockExchanges its = plan.exchanges_of(layer);
            sent.bytes += plan.micro_batches * its.bytes(back);
            sent.calls += plan.micro_batches * its.calls(back);
        }
    }
    return sent;
}

void print_plan(const planner::Plan& plan, const Config& config) {
    int64_t parameters = 0;
    for (const model::Layer& layer : plan.layers) {
        for (const model::Tensor& tensor : layer.tensors) parameters += tensor.whole_count();
    }
    print(
        "{}{} parameters ({} trainable), chunks of {} elements, {} micro-batches in {} group{}\n\n",
        text_of_stage(plan), parameters, trainable_of(plan), plan.chunk_elements,
        plan.micro_batches, plan.groups, plan.groups == 1 ? "" : "s");
    const int64_t attention = plan.blocks_saving(model::Saved::attention),
                  projections = plan.blocks_saving(model::Saved::projections),
                  mlp = plan.blocks_saving(model::Saved::mlp), blocks = plan.blocks(),
                  inputs = plan.blocks_saving_inputs();
    if (attention + projections + mlp > 0 || inputs < blocks)
        print(
            "on the device until backward, of {} blocks: the inputs of {}, attention of {}, its "
            "products of {}, the MLP's of {}\n\n",
            blocks, inputs, attention, projections, mlp);
    if (!plan.partition.decides_alone())
        print("on each of {} ranks, stage {}{}{} (budgets of host and nvme: their host's):\n\n",
              plan.partition.of_run(), config.zero.stage, text_of_slices(plan),
              text_of_parts(config));
    if (const KernelBytes sent = kernel_bytes(plan); sent.calls > 0)
        print("within its layers' kernels a rank sends {} a step, in {} exchanges\n\n",
              format_bytes(sent.bytes), sent.calls);
    const auto& [gradients, weights, momentum, local_steps] = plan.partition.codecs;
    const OptimizerConfig& o = config.optimizer;
    if (momentum.on() && o.method == optim::Method::onebit_adam)
        print("after {} updates the second moment stays, and momentum is exchanged as {}\n\n",
              o.freeze_step, zero::text_of(momentum));
    else if (momentum.on())
        print(
            "momentum is exchanged as {} from update {} on, and after {} the second moment "
            "stays{}\n\n",
            zero::text_of(momentum), train::MomentumSchedule(o).first(), o.var_freeze_step,
            local_steps
                ? fmt::format("; exchanges are at most {} updates apart", o.local_step_clipper)
                : "");
    if (gradients.on() || weights.on())
        print("between them gradients travel as {}, weights as {}\n\n",
              wire_text(gradients, true, plan), wire_text(weights, false, plan));
    if (plan.partition.two_levels())
        print("hosts of {} ranks add their gradients up before they travel on\n\n",
              plan.partition.hosts.each);
    if (plan.partition.keeps_second_shards())
        print("hosts of {} ranks keep the weights that all have gathered\n\n",
              plan.partition.hosts.each);
    print("  {:<7} {:<40} {:>12} {:>14}\n", "tier", "what", "bytes", "budget, or why");
    for (const swap::Tier tier : kTiers) {
        if (used_of(tier, plan) == 0) continue;
        for (const planner::TierRow& row : plan.rows) {
            if (row.tier == tier)
                print("  {:<7} {:<40} {:>12}   {}\n", "", row.what, format_bytes(row.bytes),
                      planner::reason_of(row, plan));
        }
        print("  {:<7} {:<40} {:>12} {:>14}\n", swap::name_of(tier), "in all",
              format_bytes(used_of(tier, plan)), budget_text(budget_of(tier, config)));
    }
    print("\n");
}

namespace {

// What this rank sent to the others.
void print_collectives(const train::RunReport& report) {
    if (report.collectives.empty()) return;
    print("\n  {:<18} {:>10} {:>14} {:>14} {:>6}\n", "collective", "calls/step", "raw bytes/step",
          "sent/step", "ratio");
    for (const train::CollectiveReport& of : report.collectives) {
        print("  {:<18} {:>10.1f} {:>14} {:>14} {:>6.3f}\n", of.collective,
              static_cast<double>(of.calls) / static_cast<double>(report.steps),
              format_bytes(of.raw_bytes / report.steps), format_bytes(of.sent_bytes / report.steps),
              of.raw_bytes > 0
                  ? static_cast<double>(of.sent_bytes) / static_cast<double>(of.raw_bytes)
                  : 1.0);
    }
}

}  // namespace

namespace {

// What steps of each kind should have taken; skipped ones are counted to those of gradients.
void print_phases(const train::RunReport& report) {
    const int64_t gradients = report.steps - report.momentum_steps - report.local_steps;
    const double all =
        static_cast<double>(gradients) * report.predicted_seconds +
        static_cast<double>(report.momentum_steps) * report.predicted_momentum_seconds +
        static_cast<double>(report.local_steps) * report.predicted_local_seconds;
    print(
        "  predicted by their schedules: {:.4f} s with gradients ({} steps), {:.4f} s with "
        "momentum ({})",
        report.predicted_seconds, gradients, report.predicted_momentum_seconds,
        report.momentum_steps);
    if (report.local_steps > 0)
        print(", {:.4f} s local ({})", report.predicted_local_seconds, report.local_steps);
    print("; measured step at {:.2f}x of their mean\n", all / report.seconds);
}

}  // namespace

void print_run(const train::RunReport& report, const Config& config) {
    if (report.steps == 0) return;
    const double steps = static_cast<double>(report.steps), step_seconds = report.seconds / steps;
    print("\n{} steps, {:.0f} tokens/s, {:.4f} s a step\n\n", report.steps,
          static_cast<double>(report.tokens) / report.seconds, step_seconds);
    // Exposed: while nothing computes.
    print("  {:<11} {:>12} {:>12} {:>9} {:>14} {:>12}\n", "lane", "bytes/step", "busy s/step",
          "busy", "exposed s/step", "GB/s busy");
    for (size_t i = 0; i < report.links.size(); ++i) {
        const train::LinkReport& link = report.links[i];
        const auto lane = static_cast<swap::Lane>(i);
        const double bytes = static_cast<double>(link.bytes);
        const bool moves =
            lane != swap::Lane::compute && lane != swap::Lane::team && link.bytes > 0;
        print(
            "  {:<11} {:>12} {:>12.4f} {:>8.1f}% {:>14} {:>12}\n", link.lane,
            moves ? format_bytes(link.bytes / report.steps) : "", link.busy_seconds / steps,
            100 * link.busy_seconds / report.seconds,
            lane != swap::Lane::compute ? fmt::format("{:.4f}", link.exposed_seconds / steps) : "",
            moves ? fmt::format("{:.2f}", bytes / link.busy_seconds * 1e-9) : "");
    }
    print_collectives(report);
    print("\n  {:<11} {:>12} {:>12} {:>14}\n", "tier", "reserved", "peak", "budget");
    for (const swap::Tier tier : kTiers) {
        const int64_t reserved = reserved_of(tier, report.reserved);
        // Memory is the same from start to end; of files, what slots held at once.
        const bool files = tier == swap::Tier::nvme;
        print("  {:<11} {:>12} {:>12} {:>14}\n", swap::name_of(tier), format_bytes(reserved),
              format_bytes(files ? report.reserved.nvme_peak_bytes : reserved),
              budget_text(budget_of(tier, config)));
    }
    if (!report.paths.empty()) print("\n{}\n", aio::describe(report.paths, "  since start, "));
    print("\n  speculative updates: {} committed, {} rolled back; {} steps clipped, {} skipped\n",
          report.steps_committed, report.steps_rolled_back, report.clipped_steps,
          report.skipped_steps);
    const double model_flops_per_s = report.model_flops / step_seconds;
    const double mfu = mfu_of(model_flops_per_s, report.gemm_flops_per_s);
    if (mfu > 0) {
        print(
            "  the model asks for {:.4g} GFLOP a step: {:.1f}% of the {:.4g} GFLOP/s of a "
            "large product (MFU)\n",
            report.model_flops * 1e-9, 100 * mfu, report.gemm_flops_per_s * 1e-9);
    }
    if (report.bound_seconds > 0) {
        print("  lower bound of a step: {:.4f} s, set by {}; measured step at {:.2f}x of it\n",
              report.bound_seconds, report.binding, report.bound_seconds / step_seconds);
        if (report.peak_bound_seconds > 0)
            print(
                "  the same with every kernel at the machine's peaks: {:.4f} s; measured step at "
                "{:.2f}x of it\n",
                report.peak_bound_seconds, report.peak_bound_seconds / step_seconds);
        // From the last minutes' measurements: what the machine did meanwhile for others is not in
        // it.
        const bool speculative = 2 * report.steps_committed > report.steps;
        const double predicted =
            speculative ? report.predicted_speculative_seconds : report.predicted_seconds;
        print("  predicted by its schedule: {:.4f} s{}; measured step at {:.2f}x of it\n",
              predicted, speculative ? " with speculative updates committed" : "",
              predicted / step_seconds);
    } else if (report.predicted_seconds > 0) {
        print(
            "  no lower bound of a step: some exchange gradients, the others momentum or "
            "nothing\n");
        print_phases(report);
    }
}

nlohmann::json tiers_json(const planner::Plan& plan) {
    nlohmann::json tiers = nlohmann::json::array();
    for (const planner::TierRow& row : plan.rows) {
        tiers.push_back({{"tier", swap::name_of(row.tier)},
                         {"what", row.what},
                         {"bytes", row.bytes},
                         {"why", planner::reason_of(row, plan)}});
    }
    return tiers;
}

// Seconds of a step; 0 where there is one rank.
double exposed_comm_seconds(const train::RunReport& report) {
    const auto comm = static_cast<size_t>(swap::Lane::comm);
    if (comm >= report.links.size() || report.steps == 0) return 0;
    return report.links[comm].exposed_seconds / static_cast<double>(report.steps);
}

nlohmann::json summary_json(const train::RunReport& report, const planner::Plan& plan,
                            const Config& config) {
    nlohmann::json links = nlohmann::json::array(), paths = links, collectives = links;
    for (const train::LinkReport& link : report.links) {
        links.push_back({{"lane", link.lane},
                         {"bytes", link.bytes},
                         {"busy_seconds", link.busy_seconds},
                         {"exposed_seconds", link.exposed_seconds}});
    }
    for (const train::CollectiveReport& of : report.collectives) {
        collectives.push_back({{"collective", of.collective},
                               {"calls", of.calls},
                               {"raw_bytes", of.raw_bytes},
                               {"sent_bytes", of.sent_bytes}});
    }
    for (const aio::PathCounters& path : report.paths) {
        paths.push_back({{"path", path.path},
                         {"bytes_read", path.bytes_read},
                         {"bytes_written", path.bytes_written},
                         {"read_bytes_per_s", path.read_bytes_per_s},
                         {"write_bytes_per_s", path.write_bytes_per_s},
                         {"endurance_used", path.endurance_used}});
    }
    const double model_flops_per_s =
        report.model_flops * static_cast<double>(report.steps) / report.seconds;
    const double mfu = report.steps > 0 ? mfu_of(model_flops_per_s, report.gemm_flops_per_s) : 0;
    return {{"summary",
             {{"steps", report.steps},
              {"tokens", report.tokens},
              {"seconds", report.seconds},
              {"steps_committed", report.steps_committed},
              {"steps_rolled_back", report.steps_rolled_back},
              {"clipped_steps", report.clipped_steps},
              {"skipped_steps", report.skipped_steps},
              {"device_bytes", plan.device_bytes},
              {"host_bytes", plan.host_bytes},
              {"nvme_bytes", plan.nvme_bytes},
              {"reserved",
               {{"device_bytes", report.reserved.device_bytes},
                {"device_overhead_bytes", report.reserved.device_overhead_bytes},
                {"host_bytes", report.reserved.host_bytes},
                {"nvme_bytes", report.reserved.nvme_bytes},
                {"nvme_peak_bytes", report.reserved.nvme_peak_bytes}}},
              {"groups", plan.groups},
              {"ranks", plan.partition.of_run()},
              {"tensor", plan.partition.slices},
              {"sequence", config.parallel.sequence},
              {"stages", plan.partition.stage.count},
              {"chunk_elements", plan.chunk_elements},
              {"attention_saved", plan.blocks_saving(model::Saved::attention)},
              {"mlp_saved", plan.blocks_saving(model::Saved::mlp)},
              {"projections_saved", plan.blocks_saving(model::Saved::projections)},
              {"inputs_saved", plan.blocks_saving_inputs()},
              {"model_flops", report.model_flops},
              {"gemm_flops_per_s", report.gemm_flops_per_s},
              {"mfu", mfu > 0 ? nlohmann::json(mfu) : nlohmann::json()},
              {"bound_seconds", report.bound_seconds},
              {"peak_bound_seconds", report.peak_bound_seconds},
              {"binding", report.binding},
              {"predicted_seconds", report.predicted_seconds},
              {"predicted_speculative_seconds", report.predicted_speculative_seconds},
              {"momentum_steps", report.momentum_steps},
              {"local_steps", report.local_steps},
              {"predicted_momentum_seconds", report.predicted_momentum_seconds},
              {"predicted_local_seconds", report.predicted_local_seconds},
              {"exposed_comm_seconds", exposed_comm_seconds(report)},
              {"tiers", tiers_json(plan)},
              {"lanes", links},
              {"collectives", collectives},
              {"paths", paths}}}};
}

}  // namespace ferry::tools
