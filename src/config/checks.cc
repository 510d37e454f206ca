#include "checks.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <initializer_list>
#include <iomanip>
#include <set>
#include <span>
#include <sstream>
#include <string_view>
#include <utility>
#include <vector>

#include "base/log.h"
#include "ferry/error.h"
#include "words.h"

namespace ferry::config {
namespace {

struct Rule {
    bool holds;
    std::string key;
    std::string what;
    std::string measured;
    std::string remedy;
    std::string limit{};
};

void demand(const GivenKeys& given, std::initializer_list<Rule> rules) {
    for (const Rule& rule : rules) {
        if (rule.holds) continue;
        throw Error(Trouble::usage, {.what = rule.what,
                                     .where = given.place_of(rule.key),
                                     .measured = rule.measured,
                                     .limit = rule.limit,
                                     .remedy = rule.remedy});
    }
}

std::string show(const char* name, int64_t value) {
    return std::string(name) + " " + std::to_string(value);
}

std::string show(const char* name, double value) {
    std::ostringstream text;
    text << name << ' ' << value;
    return text.str();
}

// The divisor of `whole` nearest to `wish`: what a user can write instead.
int64_t nearest_divisor(int64_t whole, int64_t wish) {
    wish = std::min(wish, whole);
    for (int64_t step = wish == 0 ? 1 : 0; step < whole; ++step) {
        if (wish > step && whole % (wish - step) == 0) return wish - step;
        if (whole % (wish + step) == 0) return wish + step;
    }
    return 1;
}

// A directory says all of the shape, so that keys of it beside the path contradict it.
void check_directory(const GivenKeys& given) {
    constexpr std::array<std::string_view, 3> kOfDirectory{"model.path", "model.load",
                                                           "model.dropout"};
    for (const auto& [key, place] : given.keys) {
        const bool known =
            std::find(kOfDirectory.begin(), kOfDirectory.end(), key) != kOfDirectory.end();
        demand(given, {{known || !key.starts_with("model."), std::string(key),
                        "the model's directory and a key of its shape are both given",
                        "model.path is given", "leave one of them out"}});
    }
}

void resolve_model(ModelConfig& m, const GivenKeys& given) {
    if (!m.path.empty()) return check_directory(given);
    if (m.kv_heads == 0) m.kv_heads = m.heads;
    demand(given, {{m.head_dim != 0 || m.hidden % m.heads == 0, "model.heads",
                    "the hidden width is not divisible by the heads",
                    show("hidden", m.hidden) + ", " + show("heads", m.heads),
                    "set " + show("heads", nearest_divisor(m.hidden, m.heads)) +
                        ", or give model.head_dim"}});
    if (m.head_dim == 0) m.head_dim = m.hidden / m.heads;
    demand(given, {{m.heads % m.kv_heads == 0, "model.kv_heads",
                    "the heads are not divisible by the key and value heads",
                    show("heads", m.heads) + ", " + show("kv_heads", m.kv_heads),
                    "set " + show("kv_heads", nearest_divisor(m.heads, m.kv_heads))},
                   {m.head_dim % 2 == 0, "model.head_dim",
                    "the elements of a head must be even: RoPE turns them in pairs",
                    show("head_dim", m.head_dim), "choose heads or head_dim so that it is even"}});
}

// A key that only some choices of another use.
template <class Choice>
struct Use {
    std::string_view key;
    std::vector<Choice> choices;
};

void warn_of_unused(std::string_view key, const std::string& choice, const std::string& users,
                    const GivenKeys& given) {
    log_warn_of_run(given.place_of(key) + " does nothing with " + choice + "; it is for " + users);
}

// `of` stands before each choice.
template <class Choice, size_t count>
void warn_of_unused(const Use<Choice>& use, Choice choice, const Words<Choice, count>& words,
                    const GivenKeys& given, const std::string& of = "") {
    if (!given.contains(use.key) || std::ranges::count(use.choices, choice) > 0) return;
    std::string users;
    for (const Choice each : use.choices)
        users.append(users.empty() ? "" : ", ").append(of).append(word_of(words, each));
    warn_of_unused(use.key, of + std::string(word_of(words, choice)), users, given);
}

void warn_of_method(const OptimizerConfig& o, const GivenKeys& given) {
    using enum optim::Method;
    const std::array<Use<optim::Method>, 5> uses{
        {{"optimizer.betas", {adamw, adam, lion, muon, onebit_adam, zeroone_adam}},
         {"optimizer.eps", {adamw, adam, adagrad, muon, onebit_adam, zeroone_adam}},
         {"optimizer.momentum", {sgd, muon}},
         {"optimizer.nesterov", {sgd, muon}},
         {"optimizer.initial_accumulator", {adagrad}}}};
    for (const Use<optim::Method>& use : uses) warn_of_unused(use, o.method, kMethods, given);
}

// Another method with keys of Muon's alone was meant to be Muon.
void check_muon(const OptimizerConfig& o, const GivenKeys& given) {
    constexpr std::array<std::string_view, 6> kOfMuon{
        "optimizer.ns_steps",  "optimizer.ns_coefficients", "optimizer.ns_products",
        "optimizer.adjust_lr", "optimizer.adamw_lr",        "optimizer.adamw_tensors"};
    const bool muon = o.method == optim::Method::muon;
    for (const std::string_view key : kOfMuon) {
        const bool is_auto = key == "optimizer.adamw_lr" && !o.adamw_lr;
        demand(given,
               {{muon || is_auto || !given.contains(key), std::string(key), "a key of Muon's alone",
                 "optimizer.method " + std::string(word_of(kMethods, o.method)),
                 "set optimizer.method to \"muon\", or leave the key out"}});
    }
    // What an iteration makes of a singular value of 1. Beyond 2 the next one throws it further
    // out.
    const NewtonSchulzCoefficients& n = o.ns_coefficients;
    const double of_one = n.a + n.b + n.c;
    demand(given, {{n.a > 0 && of_one > 0 && of_one < 2, "optimizer.ns_coefficients",
                    "coefficients with which Newton-Schulz does not bring singular values near 1",
                    show("a", n.a) + ", " + show("b", n.b) + ", " + show("c", n.c) + ", " +
                        show("of 1 they make", of_one),
                    "take a above 0 and a + b + c between 0 and 2: [3.4445, -4.775, 2.0315], or "
                    "[1.5, -0.5, 0]"}});
}

void warn_of_pattern(const AttentionConfig& a, const GivenKeys& given) {
    using enum AttentionPattern;
    using Uses = Use<AttentionPattern>;
    const std::array<Uses, 14> uses{
        {{"attention.block", {window, fixed, bigbird, longformer, variable}},
         {"attention.layers", {window, fixed, bigbird, longformer, variable, layout}},
         {"attention.different_layout_per_head", {fixed, bigbird, variable}},
         {"attention.different_layout_per_layer", {bigbird, variable}},
         {"attention.num_sliding_window_blocks", {window, bigbird, longformer}},
         {"attention.num_local_blocks", {fixed}},
         {"attention.num_global_blocks", {fixed, bigbird}},
         {"attention.num_different_global_patterns", {fixed}},
         {"attention.num_random_blocks", {bigbird, variable}},
         {"attention.local_window_blocks", {variable}},
         {"attention.global_block_indices", {longformer, variable}},
         {"attention.global_block_end_indices", {longformer, variable}},
         {"attention.horizontal_global_attention", {fixed, variable}},
         {"attention.layout", {layout}}}};
    for (const Uses& use : uses) warn_of_unused(use, a.pattern, kPatterns, given);
    if (a.pattern == dense || a.pattern == layout) return;
    if (a.block < 64)
        log_warn_of_run(given.place_of("attention.block") + " is " + std::to_string(a.block) +
                        ": widened to 64, what a block of 64 sees in part it sees whole");
    if (a.attention == AttentionDirection::bidirectional)
        log_warn_of_run(given.place_of("attention.attention") +
                        " is bidirectional: cut by the causal mask, no token sees a later one");
}

void resolve_attention(AttentionConfig& a, const GivenKeys& given) {
    using enum AttentionPattern;
    const bool known = a.block == 16 || a.block == 32 || a.block == 64 || a.block == 128;
    demand(
        given,
        {{known, "attention.block", "no length of a block", show("block", a.block),
          "choose 16, 32, 64 or 128"},
         {a.pattern != layout || !a.layout.empty(), "attention.layout",
          "a layout is asked for, and no file says which", "attention.layout is not given",
          "name a file that tools/write_layout.py wrote"},
         {a.pattern != variable || !a.local_window_blocks.empty(), "attention.local_window_blocks",
          "there is no window", "an empty list", "give the length of at least one"}});
    if (!a.num_random_blocks) a.num_random_blocks = a.pattern == bigbird ? 1 : 0;
    warn_of_pattern(a, given);
}

void warn_of_speculation(const Config& c, const GivenKeys& given) {
    const std::string key = "swap.expect_clipped";
    const bool unlimited = c.clip_norm == 0;
    if (unlimited && given.contains(key)) {
        return warn_of_unused(key, "clip_norm 0", "swap.speculate auto, swap.speculate all", given);
    }
    warn_of_unused({key, {Speculate::automatic, Speculate::all}}, c.swap.speculate, kSpeculate,
                   given, "swap.speculate ");
}

// Below 1 as given, but the update computes in fp32, where a decay of 1 takes no gradient in.
Rule below_one_in_fp32(std::string key, double decay) {
    std::ostringstream measured;
    measured << std::setprecision(15) << decay;
    return {static_cast<float>(decay) < 1, std::move(key), "rounds to 1 in fp32", measured.str(),
            "set it to at most 0.9999999"};
}

// Warns of an eps below the least that the update can use (ferry/optim.h): a gradient too small to
// leave a trace in the second moment would be divided by less.
void warn_of_eps(const OptimizerConfig& o, const GivenKeys& given) {
    const double least =
        0x1p-50 / (o.method == optim::Method::adagrad ? 1 : std::sqrt(1 - o.beta2));
    using enum optim::Method;
    const bool used = o.method == adamw || o.method == adam || o.method == adagrad ||
                      o.method == muon || optim::sends_momentum(o.method);
    if (!used || o.eps >= least) return;
    std::ostringstream text;
    text << given.place_of("optimizer.eps") << " is " << o.eps << ", but the update uses " << least
         << ": with fp32 moments a smaller one is not safe";
    log_warn_of_run(text.str());
}

void resolve_optimizer(OptimizerConfig& o, const GivenKeys& given) {
    // Chen et al. 2023; torch.optim.Adagrad.
    using enum optim::Method;
    if (o.method == lion && !given.contains("optimizer.betas")) o.beta2 = 0.99;
    if (o.method == adagrad && !given.contains("optimizer.eps")) o.eps = 1e-10;
    if (o.method == muon && !given.contains("optimizer.momentum")) o.momentum = 0.95;
    if (o.method == muon && !given.contains("optimizer.nesterov")) o.nesterov = o.momentum > 0;
    check_muon(o, given);
    warn_of_method(o, given);
    warn_of_eps(o, given);
    const bool keeps_none = o.method == sgd && o.momentum == 0;
    if (o.moments == MomentType::bf16 && keeps_none)
        log_warn_of_run(given.place_of("optimizer.moments") +
                        " does nothing with sgd without momentum");
    if (o.moments != MomentType::int8 && given.contains("optimizer.fp32_moments"))
        log_warn_of_run(given.place_of("optimizer.fp32_moments") +
                        " is used by moments int8 alone");
    const bool looks_ahead_with_nothing =
        (o.method == sgd || o.method == muon) && o.nesterov && o.momentum == 0;
    demand(given, {{o.moments != MomentType::int8 || !keeps_none, "optimizer.moments",
                    "sgd without momentum keeps no moments, in int8 or otherwise", "momentum 0",
                    "leave optimizer.moments out, or set optimizer.momentum, such as 0.9"},
                   {!looks_ahead_with_nothing, "optimizer.nesterov",
                    "there is no momentum to look ahead with", "momentum 0",
                    "set optimizer.momentum, such as 0.9, or nesterov to false"},
                   below_one_in_fp32("optimizer.betas", std::max(o.beta1, o.beta2)),
                   below_one_in_fp32("optimizer.momentum", o.momentum)});
}

void resolve_schedule(Config& c, const GivenKeys& given) {
    ScheduleConfig& s = c.schedule;
    // A trial run of a few steps (--set steps=5) may end inside the warm-up.
    if (s.total_steps == 0) s.total_steps = std::max(c.steps, s.warmup_steps);
    const int64_t left = std::max<int64_t>(1, s.total_steps - s.warmup_steps);
    if (s.decay_steps == 0) s.decay_steps = std::clamp<int64_t>(s.total_steps / 10, 1, left);
    warn_of_unused({"schedule.decay_steps", {optim::Decay::wsd}}, s.kind, kSchedules, given);
}

void check_steps(const Config& c, const GivenKeys& given) {
    const ScheduleConfig& s = c.schedule;
    const EvaluateConfig& e = c.evaluate;
    const int64_t groups = c.swap.groups.value_or(1);
    demand(given,
           {{s.warmup_steps <= s.total_steps, "schedule.warmup_steps",
             "the warm-up is longer than the schedule",
             show("warmup_steps", s.warmup_steps) + ", " + show("total_steps", s.total_steps),
             "warm up for fewer steps"},
            {e.every == 0 || e.micro_batches > 0, "evaluate.every",
             "evaluation is asked for, with no micro-batches to evaluate",
             show("every", e.every) + ", micro_batches 0",
             "set evaluate.micro_batches, or leave evaluate.every out"},
            {e.micro_batches == 0 || c.data.held_back > 0, "evaluate.micro_batches",
             "evaluation is asked for, with no text held back", "data.held_back 0",
             "set data.held_back, such as 0.05"},
            {groups <= c.batch.micro_batches, "swap.groups", "more groups than micro-batches",
             show("groups", groups) + ", " + show("micro_batches", c.batch.micro_batches),
             "use at most one group a micro-batch, or \"auto\""},
            {c.batch.micro_batches % groups == 0, "swap.groups",
             "the micro-batches are not divisible by the groups",
             show("groups", groups) + ", " + show("micro_batches", c.batch.micro_batches),
             "set " + show("groups", nearest_divisor(c.batch.micro_batches, groups)) +
                 ", or \"auto\""}});
}

void check_paths(const Config& c, const GivenKeys& given) {
    constexpr size_t kMostPaths = 1024;  // that a volume takes
    const size_t paths = c.budgets.nvme.size();
    demand(given,
           {{paths <= kMostPaths, "budgets.nvme", "more paths than a run takes",
             std::to_string(paths) + " paths", "list at most " + std::to_string(kMostPaths)}});
    std::set<std::string_view> seen;
    for (size_t i = 0; i < c.budgets.nvme.size(); ++i) {
        const std::string& path = c.budgets.nvme[i].path;
        if (seen.insert(path).second) continue;
        demand(given, {{false, "budgets.nvme[" + std::to_string(i) + "]", "the same path twice",
                        path, "list each directory once"}});
    }
}

void check_tiers(const Config& c, const GivenKeys& given) {
    constexpr int64_t kLeaf = 4096;
    const int64_t chunk = c.swap.chunk_elements.value_or(kLeaf);
    const std::optional<DType> residual = c.numerics.residual;
    const std::string asked{word_of(kNarrow, residual)};
    const std::string precision{word_of(kPrecisions, c.precision)};
    demand(given,
           {{chunk % kLeaf == 0, "swap.chunk_elements",
             "a chunk is not a whole number of 4,096-element leaves", show("chunk_elements", chunk),
             "set " + show("chunk_elements", round_up(chunk, kLeaf))},
            {c.io.block_bytes % kLeaf == 0, "io.block_bytes",
             "the block is not a multiple of 4 KiB: O_DIRECT cannot read or write it",
             show("block_bytes", c.io.block_bytes),
             "set " + show("block_bytes", round_up(c.io.block_bytes, kLeaf))},
            {c.swap.state_on_nvme.value_or(0) == 0 || !c.budgets.nvme.empty(), "swap.state_on_nvme",
             "state is to lie on NVMe, with no path to put it", "budgets.nvme is empty",
             "add a path to budgets.nvme"},
            {c.optimizer.master != MasterFormat::split || c.precision != DType::f32,
             "optimizer.master", "a split master is a weight of 16 bits and what it leaves over",
             "precision " + precision, "set precision to bf16 or fp16, or master to fp32"},
            {!residual || residual == DType::f32 || residual == c.precision, "numerics.residual",
             "a " + asked + " residual stream needs " + asked + " compute",
             "precision " + precision, "set precision to " + asked + ", or residual to auto"},
            {c.numerics.wire != DType::f16 || c.precision == DType::f16, "numerics.wire",
             "gradients in fp16 overflow without loss scaling", "precision " + precision,
             "set precision to fp16, or wire to auto"}});
    check_paths(c, given);
}

void check_compression(const Config& c, const GivenKeys& given) {
    const CompressConfig& k = c.zero.compress;
    const std::string key = "zero.compress.";
    const std::string stage = show("zero.stage", c.zero.stage);
    const bool gradients = k.gradients != CodecKind::none, weights = k.weights != CodecKind::none;
    const int64_t lower = static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(k.block)));
    demand(given, {{lower == k.block, key + "block", "a block must divide a leaf of 4,096 elements",
                    show("block", k.block), "set " + show("block", lower), "a power of two"},
                   {!weights || c.zero.stage == 3, key + "weights",
                    "weights are gathered before they are used at stage 3 alone", stage,
                    "set zero.stage to 3, or weights to none", "zero.stage 3"}});
    if (!gradients && !weights && !optim::sends_momentum(c.optimizer.method) &&
        given.contains(key + "block"))
        log_warn_of_run(given.place_of(key + "block") +
                        " does nothing where nothing is compressed");
}

// What the ranks of a host exchange among themselves.
void check_hosts(const Config& c, const GivenKeys& given) {
    const ZeroConfig& z = c.zero;
    const std::string key = "zero.ranks_per_host", second = "zero.second_shard";
    const std::string each = show("zero.ranks_per_host", int64_t{z.ranks_per_host});
    const bool keeps = z.second_shard != SecondShard::none;
    demand(given,
           {{!keeps || z.stage == 3, second, "below stage 3 every rank keeps the weights anyway",
             show("zero.stage", z.stage), "set zero.stage to 3, or second_shard to none"},
            {!keeps || z.ranks_per_host > 1, second,
             "a host's ranks are to share the second copy, and nothing says how many they are",
             each, "set zero.ranks_per_host, or second_shard to none"}});
    if (z.ranks_per_host == 1) return;
    const bool slices = c.parallel.tensor > 1, stages = c.parallel.pipeline > 1;
    demand(given, {{!slices, key, "ranks that share tensors make no groups of a host yet",
                    show("parallel.tensor", int64_t{c.parallel.tensor}),
                    "set it to 1, or parallel.tensor to 1"},
                   {!stages, key, "stages of a pipeline make no groups of a host yet",
                    show("parallel.pipeline", int64_t{c.parallel.pipeline}),
                    "set it to 1, or parallel.pipeline to 1"}});
    if (z.compress.gradients == CodecKind::none && !keeps)
        log_warn_of_run(given.place_of(key) +
                        " does nothing where neither zero.compress.gradients nor " + second +
                        " is set");
}

// Methods that need more than an element's own gradient. `ranks`: who has a part of the model.
void check_method_of_groups(const Config& c, const GivenKeys& given, const std::string& ranks,
                            const char* key, int groups) {
    const optim::Method method = c.optimizer.method;
    const std::string measured =
        std::string(word_of(kMethods, method)) + ", " + show(key, int64_t{groups});
    const std::string alone = std::string(", or ") + key + " to 1";
    demand(given,
           {{method != optim::Method::muon, "optimizer.method",
             "Muon updates whole matrices, and not yet of " + ranks, measured,
             "set optimizer.method to \"adamw\"" + alone},
            {!optim::sends_momentum(method), "optimizer.method",
             "momentum travels among all ranks of a run, and not yet among " + ranks, measured,
             "set optimizer.method to \"adamw\", whose gradients zero.compress.gradients "
             "can code" +
                 alone}});
}

// What ranks with slices of the same tensors do not do.
void check_tensor(const Config& c, const GivenKeys& given) {
    if (c.parallel.tensor == 1) return;
    const std::string tensor = show("parallel.tensor", int64_t{c.parallel.tensor});
    check_method_of_groups(c, given, "ranks that have slices", "parallel.tensor",
                           c.parallel.tensor);
    demand(
        given,
        {{c.checkpoint.dir.empty() || c.optimizer.moments != MomentType::int8, "optimizer.moments",
          "blocks of coded moments are of a slice, and a checkpoint has the whole tensor's",
          "int8, " + tensor, "set it to bf16 or fp32, or leave checkpoint.dir out"},
         {!c.checkpoint.durable_steps, "checkpoint.durable_steps",
          "steps of ranks that have slices of tensors are not kept yet", tensor,
          "set it to false, or parallel.tensor to 1"}});
}

// What the stages of a pipeline do not do.
void check_pipeline(const Config& c, const GivenKeys& given) {
    if (c.parallel.pipeline == 1) return;
    const std::string pipeline = show("parallel.pipeline", int64_t{c.parallel.pipeline});
    check_method_of_groups(c, given, "stages of a pipeline", "parallel.pipeline",
                           c.parallel.pipeline);
    demand(given, {{!c.checkpoint.durable_steps, "checkpoint.durable_steps",
                    "steps of a pipeline are not kept yet", pipeline,
                    "set it to false, or parallel.pipeline to 1"}});
    const PipelineSchedule schedule = c.parallel.schedule;
    const std::optional<int>& each = c.parallel.virtual_stages;
    if (!each) return;  // chosen among those that the schedule has
    const bool one =
        schedule == PipelineSchedule::one_f_one_b || schedule == PipelineSchedule::zero_bubble;
    const std::string both = "\"" + std::string(word_of(kPipelineSchedules, schedule)) + "\", " +
                             show("virtual_stages", int64_t{*each});
    demand(given,
           {{!one || *each == 1, "parallel.virtual_stages",
             "this parallel.schedule has one run of blocks a stage", both,
             "set it to 1, or parallel.schedule to \"interleaved\" or \"round_robin\""},
            {schedule != PipelineSchedule::interleaved || *each > 1, "parallel.virtual_stages",
             "an interleaved schedule has several runs of blocks a stage", both,
             "set it to \"auto\" or to 2 or more, or parallel.schedule to \"1f1b\""}});
}

void warn_of_one_stage(const GivenKeys& given, std::string_view key) {
    log_warn_of_run(given.place_of(key) + " does nothing with one stage",
                    Warning::idle_with_one_stage);
}

void check_parallel(const Config& c, const GivenKeys& given) {
    const int parts = c.parallel.sequence;
    demand(given, {{c.batch.sequence % parts == 0, "parallel.sequence",
                    "a sequence cannot be cut into equal parts, one a rank",
                    show("batch.sequence", c.batch.sequence) + ", " + show("parts", int64_t{parts}),
                    "set batch.sequence to " + std::to_string(round_up(c.batch.sequence, parts)) +
                        ", or parallel.sequence to a divisor"}});
    const bool in_16_bits = c.precision != DType::f32;
    demand(given, {{c.parallel.sequence_order != SequenceOrder::ring ||
                        c.device == DeviceKind::cpu || in_16_bits,
                    "parallel.sequence_order", "a GPU attends in a ring in 16 bits alone",
                    "\"ring\", device is cuda, precision is fp32",
                    "set it to \"heads\" or \"auto\", or precision to \"bf16\" or \"fp16\""}});
    check_tensor(c, given);
    check_pipeline(c, given);
    if (c.parallel.pipeline == 1 && c.parallel.schedule != PipelineSchedule::automatic &&
        c.parallel.schedule != PipelineSchedule::one_f_one_b)
        warn_of_one_stage(given, "parallel.schedule");
    if (c.parallel.pipeline == 1 && c.parallel.virtual_stages.value_or(1) > 1)
        warn_of_one_stage(given, "parallel.virtual_stages");
    const int64_t ranks = int64_t{parts} * c.parallel.tensor;
    if (ranks > 1 && c.swap.save_projections.value_or(0) > 0)
        log_warn_of_run(given.place_of("swap.save_projections") +
                        " does nothing where ranks share sequences or tensors");
}

// Keys of one method alone, with another.
void refuse_of_another(const OptimizerConfig& o, const GivenKeys& given, optim::Method method,
                       const std::string& who, std::span<const std::string_view> keys) {
    const std::string its(word_of(kMethods, method));
    for (const std::string_view key : keys)
        demand(given, {{o.method == method || !given.contains(key), std::string(key),
                        "a key of " + who + "'s alone",
                        "optimizer.method " + std::string(word_of(kMethods, o.method)),
                        "set optimizer.method to \"" + its + "\", or leave the key out"}});
}

// The second moment that stays is one of small steps: later updates divide by too little.
void warn_of_warm_up(const Config& c, const GivenKeys& given, const std::string& freeze,
                     int64_t last_change) {
    if (last_change >= c.schedule.warmup_steps) return;
    log_warn_of_run(
        given.place_of(freeze) + " is " + std::to_string(last_change) + ", and " +
        show("schedule.warmup_steps", c.schedule.warmup_steps) +
        ": the second moment stays before the learning rate is at its peak; set it to no less");
}

void check_onebit_adam(const Config& c, const GivenKeys& given) {
    constexpr std::array<std::string_view, 1> kKeys{"optimizer.freeze_step"};
    const OptimizerConfig& o = c.optimizer;
    const std::string freeze(kKeys[0]);
    refuse_of_another(o, given, optim::Method::onebit_adam, "1-bit Adam", kKeys);
    if (o.method != optim::Method::onebit_adam) return;
    const bool stays_within = o.freeze_step < c.steps, one_step = c.steps == 1;
    demand(given, {{o.freeze_step > 0, freeze,
                    "1-bit Adam is told after how many updates the second moment stays",
                    show("freeze_step", o.freeze_step),
                    "set it to 15 to 25 % of the steps, and to no less than schedule.warmup_steps",
                    "1 or more"},
                   {stays_within, freeze, "the run ends before the second moment stays",
                    show("freeze_step", o.freeze_step) + ", " + show("steps", c.steps),
                    (one_step ? "set steps to 2 or more" : "set it below steps") +
                        std::string(", or optimizer.method to \"adamw\""),
                    one_step ? "2 steps or more" : "at most " + std::to_string(c.steps - 1)}});
    warn_of_warm_up(c, given, freeze, o.freeze_step);
}

void check_local_steps(const Config& c, const GivenKeys& given) {
    const OptimizerConfig& o = c.optimizer;
    const std::string clipper = "optimizer.local_step_clipper",
                      scaler = "optimizer.local_step_scaler";
    const std::string measured = show("local_step_clipper", o.local_step_clipper) + ", ";
    if (o.local_step_clipper == 1) {
        if (given.contains(scaler))
            log_warn_of_run(given.place_of(scaler) + " does nothing with local_step_clipper 1");
        return;
    }
    demand(given, {{c.zero.stage == 0, clipper,
                    "between exchanges each rank has weights of its own, and above stage 0 no rank "
                    "has all of them",
                    measured + show("zero.stage", c.zero.stage),
                    "set local_step_clipper to 1, or zero.stage to 0", "zero.stage 0"},
                   {c.parallel.sequence == 1, clipper,
                    "ranks that share sequences need the same weights at every step",
                    measured + show("parallel.sequence", int64_t{c.parallel.sequence}),
                    "set local_step_clipper to 1, or parallel.sequence to 1"},
                   {o.master == MasterFormat::fp32, clipper,
                    "a split master has its weight's bits, and between exchanges the two part",
                    measured + "optimizer.master split",
                    "set local_step_clipper to 1, or optimizer.master to fp32"}});
    // Exchanges are every step's for so many updates more.
    if (o.local_step_scaler >= c.steps - o.var_freeze_step)
        log_warn_of_run(given.place_of(clipper) + " is " + std::to_string(o.local_step_clipper) +
                        ", and no step is local: exchanges grow apart " +
                        show("local_step_scaler", o.local_step_scaler) + " updates after " +
                        show("var_freeze_step", o.var_freeze_step) + ", beyond " +
                        show("steps", c.steps) +
                        "; their 4 B a parameter are for nothing: set local_step_scaler below "
                        "steps - var_freeze_step, or local_step_clipper to 1");
}

void check_zeroone_adam(const Config& c, const GivenKeys& given) {
    constexpr std::array<std::string_view, 4> kKeys{
        "optimizer.var_freeze_step", "optimizer.var_update_scaler", "optimizer.local_step_scaler",
        "optimizer.local_step_clipper"};
    const OptimizerConfig& o = c.optimizer;
    const std::string freeze(kKeys[0]);
    refuse_of_another(o, given, optim::Method::zeroone_adam, "0/1 Adam", kKeys);
    if (o.method != optim::Method::zeroone_adam) return;
    // The updates before the first that sends signs.
    const int64_t exact = std::min(o.var_freeze_step, o.var_update_scaler + 1);
    demand(given,
           {{o.var_freeze_step > 0, freeze,
             "0/1 Adam is told after how many updates the second moment stays",
             show("var_freeze_step", o.var_freeze_step),
             "set it to no less than schedule.warmup_steps; the paper ends there", "1 or more"},
            {exact < c.steps, freeze, "the run ends before ranks send momentum",
             show("var_freeze_step", o.var_freeze_step) + ", " +
                 show("var_update_scaler", o.var_update_scaler) + ", " + show("steps", c.steps),
             "set var_freeze_step or var_update_scaler below steps, or optimizer.method to "
             "\"adamw\""}});
    warn_of_warm_up(c, given, freeze, o.var_freeze_step);
    check_local_steps(c, given);
}

// What both need.
void check_momentum(const Config& c, const GivenKeys& given) {
    const OptimizerConfig& o = c.optimizer;
    if (!optim::sends_momentum(o.method)) return;
    const std::string key = "optimizer.method";
    const std::string its(word_of(kMethods, o.method));
    const CodecKind gradients = c.zero.compress.gradients;
    demand(
        given,
        {{o.moments == MomentType::f32, "optimizer.moments",
          its + " exchanges its first moment in fp32's place, and keeps it so",
          "moments " + std::string(word_of(kMoments, o.moments)), "set it to fp32"},
         {gradients == CodecKind::none, "zero.compress.gradients",
          "where " + its + " sends gradients they are exact: they are not coded",
          "gradients " + std::string(word_of(kGradientCodecs, gradients)),
          "set it to none, or optimizer.method to \"adamw\""},
         {!c.checkpoint.durable_steps, "checkpoint.durable_steps",
          "the errors of momentum's codes do not survive the process on NVMe: no step after they "
          "began could be resumed",
          key + " " + its,
          "set it to false and save with checkpoint.dir, or optimizer.method to \"adamw\""}});
}

void check_checkpoint(const Config& c, const GivenKeys& given) {
    const CheckpointConfig& k = c.checkpoint;
    for (const auto& [key, place] : given.keys) {
        const bool of_dir = key.starts_with("checkpoint.") && key != "checkpoint.durable_steps";
        demand(given, {{!of_dir || !k.dir.empty(), std::string(key),
                        "checkpoints are asked for, with no directory to put them",
                        "checkpoint.dir is not given", "set checkpoint.dir"}});
    }
    demand(given, {{k.keep.best == 0 || c.evaluate.every > 0, "checkpoint.keep.best",
                    "the best checkpoints are to stay, and nothing tells which they are",
                    show("evaluate.every", c.evaluate.every),
                    "set evaluate.every and evaluate.micro_batches, or keep.best to 0"}});
    if (!c.checkpoint.durable_steps) return;
    const std::string key = "checkpoint.durable_steps";
    const double on_nvme = c.swap.state_on_nvme.value_or(1);
    const double on_device = c.swap.state_on_device.value_or(0);
    demand(
        given,
        {{!c.budgets.nvme.empty(), key, "what is to survive the process must be on NVMe",
          "budgets.nvme is empty", "add a path to budgets.nvme, or set it to false"},
         {on_nvme == 1, key, "all of the optimizer state must be on NVMe to survive the process",
          show("swap.state_on_nvme", on_nvme), "leave swap.state_on_nvme out"},
         {on_device == 0, key, "all of the optimizer state must be on NVMe to survive the process",
          show("swap.state_on_device", on_device), "leave swap.state_on_device out"},
         {c.swap.verify, key, "without checksums nothing proves what was read back",
          "swap.verify is false", "set swap.verify to true"}});
}

}  // namespace

std::string GivenKeys::place_of(std::string_view key) const {
    const auto found = keys.find(key.substr(0, key.find('[')));
    std::string place = found == keys.end() ? file : found->second;
    return place.append(": ").append(key);
}

void resolve_defaults(Config& config, const GivenKeys& given) {
    resolve_model(config.model, given);
    resolve_attention(config.attention, given);
    resolve_optimizer(config.optimizer, given);
    resolve_schedule(config, given);
    warn_of_speculation(config, given);
    check_steps(config, given);
    check_tiers(config, given);
    check_compression(config, given);
    check_hosts(config, given);
    check_parallel(config, given);
    check_onebit_adam(config, given);
    check_zeroone_adam(config, given);
    check_momentum(config, given);
    check_checkpoint(config, given);
}

}  // namespace ferry::config
