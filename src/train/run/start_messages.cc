#include "start_messages.h"

#include <spdlog/fmt/fmt.h>

#include <string>
#include <vector>

#include "base/log.h"
#include "ferry/units.h"
#include "train/measuring/planning_measurements.h"
#include "train/prediction/prediction.h"
#include "train/setup/attention_of.h"
#include "train/setup/from_config.h"
#include "train/setup/loader_of.h"
#include "train/setup/model_of.h"
#include "train/setup/rank_share.h"
#include "train/setup/stages.h"
#include "train/stack/threads.h"
#include "zero/zero.h"

namespace ferry::train {
namespace {

// What heads and MLP become where ranks share tensors unevenly, and a micro-batch's rows.
void log_slices(const model::Shape& whole, int64_t tokens, const World& world) {
    const model::Slicing slicing = world.slicing();
    if (slicing.ranks == 1) return;
    const model::Shape slice = model::slice_of(whole, slicing);
    std::string text = fmt::format(
        "{} ranks share the tensors: {} heads over {} of keys, an MLP {} wide and {} rows of the "
        "vocabulary's tables on each",
        slicing.ranks, slice.heads, slice.kv_heads, slice.intermediate,
        ceil_div(whole.vocab, int64_t{slicing.ranks}));
    const int holders = model::key_holders_of(whole, slicing.ranks);
    if (holders > 1) text += fmt::format("; each head of keys is on {} ranks", holders);
    const auto zeros = [&](int64_t all, int64_t own) {
        const int64_t room = own * slicing.ranks;
        return 100.0 * static_cast<double>(room - all) / static_cast<double>(room);
    };
    if (holders == 1 && whole.kv_heads % slicing.ranks != 0)
        text += fmt::format("; {:.0f} % of the heads are zeros, as {} do not divide {}",
                            zeros(whole.kv_heads, slice.kv_heads), slicing.ranks, whole.kv_heads);
    if (whole.intermediate % slicing.ranks != 0)
        text += fmt::format("; {:.2g} % of the MLP are zeros",
                            zeros(whole.intermediate, slice.intermediate));
    if (whole.vocab % slicing.ranks != 0)
        text += fmt::format("; some have a row less, as {} do not divide {} tokens", slicing.ranks,
                            whole.vocab);
    if (tokens % slicing.ranks != 0)
        text += fmt::format(
            "; the last have fewer rows of a micro-batch, as {} do not divide {} tokens",
            slicing.ranks, tokens);
    log_info(text);
}

// What a rank has of each sequence that several share, and of its attention.
void log_parts(const model::Shape& whole, const model::Numerics& numerics, const World& world) {
    const int parts = numerics.parts;
    if (parts == 1) return;
    std::string text = fmt::format("{} ranks share each sequence: {} of its {} tokens on each",
                                   parts, numerics.sequence, numerics.whole_sequence());
    const int64_t heads = model::slice_of(whole, world.slicing()).kv_heads;
    if (numerics.ring)
        text += "; for attention their keys and queries go round";
    else
        text += fmt::format("; for attention all tokens of {} of {} heads of keys{}",
                            ceil_div(heads, int64_t{parts}), heads,
                            heads < parts        ? ", and some have none"
                            : heads % parts != 0 ? ", and some have one less"
                                                 : "");
    log_info(text);
}

void log_stages(const std::vector<zero::Stage>& stages, const planner::Plan& plan) {
    const auto count = static_cast<int>(stages.size());
    log_info(fmt::format(
        "{} stages: {}; {} pass through them, and by theory each waits {:.0f} % of a step where "
        "all are as fast",
        count, text_of(stages, std::ssize(plan.layers)), groups_text(plan), 100 * bubble_of(plan)));
    warn_of_bubble(plan);
}

// Plans that go by the key share out the host's budgets otherwise.
void warn_of_host(const Config& config, const World& world) {
    const std::optional<int>& each = config.budgets.ranks_per_host;
    if (world.ranks == 1 || !each || *each == world.local_ranks) return;
    log_warn(
        fmt::format("budgets.ranks_per_host is {}, and the first host has {} rank{} of this run: "
                    "they share its "
                    "budgets, and ferry plan goes by the key",
                    *each, world.local_ranks, world.local_ranks == 1 ? "" : "s"));
}

// Whoever asks for codes hears which tensors have them: by default norms and the embedding do not.
void log_coded(const std::vector<model::Layer>& layers) {
    const CodedParts parts = coded_parts(layers);
    if (parts.coded.tensors == 0)
        return log_warn(
            "optimizer.moments int8 does nothing: no tensor that trains has whole blocks of codes "
            "and is left out of optimizer.fp32_moments");
    log_info(fmt::format(
        "int8 moments: {} tensors with {} parameters; fp32 moments: {} with {}, which "
        "are norms, biases, small ones and those of optimizer.fp32_moments",
        parts.coded.tensors, parts.coded.elements, parts.fp32.tensors, parts.fp32.elements));
}

void warn_of_codecs(const Config& config) {
    const zero::Codecs asked = codecs_of(config);
    if (asked.gradients.on() || asked.weights.on())
        log_warn("zero.compress does nothing: no two ranks have the same state");
}

}  // namespace

void tell_of_ranks(const RunSetup& setup, const model::Numerics& numerics) {
    if (!setup.is_first_rank()) return;
    warn_of_host(setup.config, setup.world);
    log_slices(setup.shape(), numerics.tokens(), setup.world);
    log_parts(setup.shape(), numerics, setup.world);
}

void tell_of_plan(const RunSetup& setup, const Cut& cut, const planner::Plan& plan) {
    if (!setup.is_first_rank()) return;
    if (setup.world.pipeline > 1) log_stages(cut.stages, plan);
    warn_of_gathers(plan);
}

void tell_of_settings(const RunSetup& setup, const Topology& machine) {
    const Config& config = setup.config;
    const bool tells = setup.is_first_rank();
    if (tells) {
        warn_of_text(config, setup.described);
        warn_of_layout(config);
        warn_of_speculation(config, setup.world);
        warn_of_one_host(config, setup.world);
        if (setup.world.sharers() == 1) warn_of_codecs(config);
    }
    log_machine(setup.share.budgets.nvme, machine, setup.device, setup.executor);
    if (tells) {
        const std::string rule = muon_rule(config, setup.layers, setup.world.ranks);
        if (!rule.empty()) log_info(rule);
        if (config.optimizer.moments == MomentType::int8) log_coded(setup.layers);
    }
    if (!setup.executor.simulated()) log_planned_by(setup.measurements, config);
}

void warn_of_last_step(const RunSetup& setup) {
    const int64_t last = setup.config.steps;
    if (!setup.is_first_rank() || setup.momentum.of(last) != Exchanged::nothing) return;
    log_warn(
        fmt::format("step {}, the last, is a local step unless some are skipped: exports will "
                    "have the weights of the exchange before it; end the run at one "
                    "(docs/communication.md)",
                    last));
}

}  // namespace ferry::train
