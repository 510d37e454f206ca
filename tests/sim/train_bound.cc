// Whatever the model, the budgets, the machine and the rank: the lower bound of a configuration is
// no longer than the simulated step of its plan, nor than what keeps the plan busiest. Here needs
// and ranks are any; train_predictions.cc has runs that a configuration can say, with pipelines.
#include <gtest/gtest.h>

#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <optional>
#include <ostream>

#include "cost/drives.h"
#include "planner/recording/recorder.h"
#include "planner/work.h"
#include "tests/support/random_machine.h"
#include "tests/support/seeds.h"
#include "train/prediction/step_timeline.h"

namespace ferry::train {
namespace {

enum class Method : uint8_t { any, momentum, muon };

struct Case {
    planner::PlanRequest request{};
    model::Shape shape{};  // of this rank's slices
    model::Numerics numerics{};
    zero::Partition partition{};
    std::vector<model::Layer> layers{};
    planner::DeviceNeeds needs{};
    std::vector<cost::Path> paths{};
    cost::Measurements measured{};
    uint64_t seed = 0;
    friend void PrintTo(const Case& made, std::ostream* out) {
        const planner::PlanRequest& request = made.request;
        const SwapConfig& swap = request.swap;
        const auto shown = [](const auto& knob) {
            return knob ? fmt::format("{}", *knob) : "auto";
        };
        *out << fmt::format(
            "FERRY_SIM_SEED={}: {}, rank {} of {} and slice {} of {}, {} micro-batches of {} x {} "
            "tokens, hidden {}, {} blocks, {} moments, budgets {} and {} bytes, {} paths, durable "
            "{}, clips {}; swap: chunk_elements {}, chunks_at_once {}, groups {}, speculate {}, "
            "state_on_nvme {}, state_on_device {}, save_attention {}, save_mlp {}, "
            "save_projections {}, save_inputs {}, verify {}",
            made.seed, name_of(request.device), made.partition.rank, made.partition.ranks,
            made.partition.slice, made.partition.slices, request.micro_batches,
            made.numerics.micro_batch, made.numerics.sequence, made.shape.hidden, made.shape.layers,
            request.state.moments, request.budgets.device_bytes, request.budgets.host_bytes,
            request.budgets.nvme.size(), request.durable, request.clips, shown(swap.chunk_elements),
            shown(swap.chunks_at_once), shown(swap.groups), static_cast<int>(swap.speculate),
            shown(swap.state_on_nvme), shown(swap.state_on_device), shown(swap.save_attention),
            shown(swap.save_mlp), shown(swap.save_projections), shown(swap.save_inputs),
            swap.verify);
    }
};

// Ranks that share each block's tensors or each sequence, and what the blocks exchange for it.
struct Groups {
    int tensor = 1, sequence = 1;
};
Groups draw_groups(Random& random, Method method, int ranks) {
    Groups groups;
    if (ranks > 1 && method == Method::any && random.once_in(4)) groups.tensor = 2;
    if (ranks > groups.tensor && random.once_in(4)) groups.sequence = 2;
    return groups;
}
model::BlockExchanges draw_exchanges(Random& random, const Groups& groups, int64_t activation) {
    const auto among = [&](int ranks) -> model::BlockExchanges::Group {
        if (ranks == 1) return {};
        const int64_t bytes = activation * random.from(1, 4);
        return {.forward_bytes = bytes,
                .backward_bytes = 2 * bytes,
                .forward_calls = random.from(1, 4),
                .backward_calls = random.from(2, 8)};
    };
    return {.sequence = among(groups.sequence), .slices = among(groups.tensor)};
}

// Kernels that code run on the CPU alone. Each rank has momentum as it is, in fp32.
zero::Codecs draw_codecs(Random& random, Method method, int64_t stage) {
    const auto codec = [&] {
        return zero::Codec{random.once_in(2) ? CodecKind::int8 : CodecKind::int4,
                           int64_t{64} << random.from(0, 5)};
    };
    zero::Codecs codecs;
    if (stage == 3 && random.once_in(3)) codecs.weights = {CodecKind::int8, codec().block};
    if (method == Method::momentum) {
        codecs.momentum = {CodecKind::sign, codec().block};
        codecs.local_steps = stage == 0 && random.once_in(2);
    } else if (random.once_in(3)) {
        codecs.gradients = codec();
    }
    return codecs;
}

void draw_partition(Random& random, Case& made, Method method, int ranks, const Groups& groups) {
    const int sharers = ranks / groups.tensor;
    const int64_t stage = random.from(0, 3);
    const bool codes = sharers > 1 && made.request.device == DeviceKind::cpu;
    zero::Hosts hosts;
    if (codes && sharers > 2 && groups.tensor == 1 && random.once_in(2))
        hosts = {.each = 2, .second_shards = random.once_in(2)};
    made.partition = zero::partition_of(
        stage, static_cast<int>(random.from(0, sharers - 1)), sharers,
        codes ? draw_codecs(random, method, stage) : zero::Codecs{},
        {groups.tensor, static_cast<int>(random.from(0, groups.tensor - 1))}, {}, hosts);
}

void draw_state(Random& random, Case& made, Method method, bool half) {
    StateFormat& state = made.request.state;
    state = {.moments = random.from(method == Method::muon ? 1 : 0, 2),
             .split = half && random.once_in(3)};
    if (method == Method::momentum)
        state.moments = 2;
    else if (state.moments > 0 && random.once_in(2))
        state.moment_type = MomentType::int8;
    if (method != Method::muon) return;
    made.request.ns_steps = random.from(1, 6);
    made.request.ns_products = half && random.once_in(2) ? DType::bf16 : DType::f32;
}

void draw_model(Random& random, Case& made) {
    const model::Shape whole{.hidden = 64 * random.from(1, 4),
                             .layers = random.from(1, 6),
                             .heads = 2,
                             .kv_heads = random.from(1, 2),
                             .head_dim = 32,
                             .intermediate = 128 * random.from(1, 4),
                             .vocab = 64 * random.from(1, 40),
                             .tie_embeddings = random.once_in(2)};
    const bool half = random.once_in(2);
    const DType type = half ? DType::bf16 : DType::f32;
    const int ranks = 1 << random.from(0, 3);
    const bool on_cpu = made.request.device == DeviceKind::cpu;
    const Method method = ranks > 1 && on_cpu && random.once_in(3) ? Method::momentum
                          : random.once_in(4)                      ? Method::muon
                                                                   : Method::any;
    const Groups groups = draw_groups(random, method, ranks);
    made.shape = model::slice_of(whole, {groups.tensor});
    made.numerics = {.sequence = 32 * random.from(1, 8),
                     .micro_batch = random.from(1, 2),
                     .parts = groups.sequence,
                     .slices = groups.tensor,
                     .key_holders = model::key_holders_of(whole, groups.tensor),
                     .compute = type,
                     .residual = type,
                     .wire = random.once_in(3) ? DType::f32 : type};
    draw_state(random, made, method, half);
    draw_partition(random, made, method, ranks, groups);
    made.request.micro_batches = int64_t{1} << random.from(0, 2);
    const std::vector<std::string> fp32{"*embed_tokens*"};
    std::vector<std::string> freeze;
    if (random.once_in(4)) freeze.emplace_back("*mlp*");
    const bool coded = made.request.state.moment_type == MomentType::int8;
    made.layers = model::layers_of(whole, freeze, false, made.partition.ranks,
                                   {.coded = coded, .fp32 = fp32}, {.on = method == Method::muon},
                                   {made.partition.slices, made.partition.slice});
    const int64_t tokens = made.numerics.tokens();
    const double each = random.between(0.01, 1);  // of what attention and the MLP multiply
    const bool windows = random.once_in(3);       // some blocks' attention multiplies less
    const auto blocks = static_cast<size_t>(made.shape.layers);
    const double products =
        2.0 * static_cast<double>(tokens * made.shape.hidden * made.shape.hidden);
    const int64_t activation = round_up(tokens * made.shape.hidden * size_of(type), 4096);
    made.needs = {
        .activation = activation,
        .scratch = 4096 * random.from(1, 64),
        .exchanges = {.embedding = draw_exchanges(random, groups, activation),
                      .block = draw_exchanges(random, groups, activation),
                      .head = draw_exchanges(random, groups, activation)},
        .saved = {4096 * random.from(1, 16), 4096 * random.from(1, 16), 4096 * random.from(1, 16)},
        .saved_flops = {std::vector<double>(blocks, each * products),
                        std::vector<double>(blocks, 2 * each * products),
                        std::vector<double>(blocks, each * products)}};
    if (!windows) return;
    for (double& flops : made.needs.saved_flops[at(model::Saved::attention)]) {
        const bool has_one = random.once_in(2);
        made.shape.windows.push_back(has_one ? made.numerics.sequence / 2 : 0);
        if (has_one) flops *= 0.75;
    }
}

// From nothing to more than everything.
void draw_budgets(Random& random, Case& made) {
    int64_t elements = 0;
    for (const model::Layer& layer : made.layers) elements += layer.elements;
    const auto of_all = [&] {
        return random.once_in(5) ? kUnlimited
                                 : static_cast<int64_t>(random.between(0.2, 3) * 16 *
                                                        static_cast<double>(elements)) +
                                       kMiB;
    };
    made.request.budgets.device_bytes = of_all();
    made.request.budgets.host_bytes = of_all();
    const int64_t paths = random.from(0, 3);
    for (int64_t p = 0; p < paths; ++p) {
        made.request.budgets.nvme.push_back(
            {.path = "path " + std::to_string(p), .size_bytes = 64 * elements + 16 * kMiB});
        made.paths.push_back({.bytes_per_s = random.between(1e7, 1e10),
                              .drive = random.from(-1, 1),  // duplicates
                              .in_memory = random.once_in(4),
                              .cores_per_byte = random.once_in(2) ? random.between(1e-11, 1e-9) : 0,
                              .size_bytes = made.request.budgets.nvme.back().size_bytes});
    }
    made.request.swap.chunk_elements = 4096 << random.from(0, 4);
    made.request.clips = random.once_in(2);
}

void draw_knobs(Random& random, Case& made) {
    SwapConfig& swap = made.request.swap;
    const bool stores = !made.request.budgets.nvme.empty();
    swap.speculate = random.one_of({Speculate::automatic, Speculate::off, Speculate::all});
    if (made.request.clips && random.once_in(3)) swap.expect_clipped = random.part();
    if (random.once_in(3)) swap.groups = int64_t{1} << random.from(0, 2);
    if (swap.groups) swap.groups = std::min(*swap.groups, made.request.micro_batches);
    for (std::optional<int64_t>* blocks :
         {&swap.save_attention, &swap.save_mlp, &swap.save_projections, &swap.save_inputs})
        if (random.once_in(4)) *blocks = random.from(0, made.shape.layers);
    swap.verify = !random.once_in(4);
    if (random.once_in(4)) swap.state_on_device = random.one_of({0.0, 0.5, 1.0});
    if (!stores) return;
    if (random.once_in(3)) swap.chunks_at_once = random.from(1, 4);
    made.request.durable =
        made.partition.slices == 1 && !made.partition.codecs.momentum.on() && random.once_in(4);
    if (!made.request.durable) {
        if (random.once_in(3)) swap.state_on_nvme = random.one_of({0.0, 0.3, 1.0});
        return;
    }
    swap.state_on_device.reset();
    swap.verify = true;
    if (!made.partition.alone()) swap.speculate = Speculate::off;
}

void draw_machine(Random& random, Case& made) {
    made.measured = draw_links(random, made.request.device);
    cost::Measurements& m = made.measured;
    const cost::Drive drive = cost::one_drive(made.paths);
    m.nvme_bytes_per_s = drive.bytes_per_s > 0 ? drive.bytes_per_s : 1e9;
    m.nvme_at_once = std::max<int64_t>(drive.at_once, 1);
    m.dram_per_nvme_byte = drive.dram_per_byte;
    m.cores_per_nvme_byte = drive.cores_per_byte;
}

Case draw(uint64_t seed) {
    Random random(seed);
    Case made;
    made.seed = seed;
    made.request.device = random.once_in(2) ? DeviceKind::cpu : DeviceKind::cuda;
    draw_model(random, made);
    draw_budgets(random, made);
    if (random.once_in(2)) draw_knobs(random, made);
    draw_machine(random, made);
    made.measured = cost::of_rank(made.measured, made.partition.of_run());
    return made;
}

// As the paths are filled; every kernel by what it multiplies and moves, and its own efficiency.
void complete(Case& made, const planner::Plan& plan, const swap::Schedule& step) {
    const cost::Drive drive = cost::one_drive(made.paths, plan.nvme_bytes);
    if (drive.bytes_per_s > 0) made.measured.nvme_bytes_per_s = drive.bytes_per_s;
    model::OfSaved<double> flops{};
    for (const model::Saved what : model::kAllSaved)
        flops[at(what)] = std::ranges::max(made.needs.saved_flops[at(what)]);
    made.measured.kernels =
        cost::assumed_times(step, planner::work_of(plan), made.numerics.tokens(), flops,
                            {made.measured.assumed_flops_per_s, cost::kAssumedDeviceBytesPerS});
    Random random(made.seed);
    vary(random, made.measured.kernels);
}

constexpr double kRounding = 1 + 1e-6;

void expect_no_shorter_step(Case& made, const planner::Plan& plan) {
    const swap::Schedule plain = record_step(plan, Previous::not_speculative, false);
    complete(made, plan, plain);
    const double bound =
        bound_of(made.request.budgets, plan, made.shape, plain, made.measured).seconds;
    EXPECT_GT(bound, 0);
    // A drive may owe more after each step than after the one before, and the simulation ends.
    const auto least_s = [&](Previous previous, bool speculative) {
        const swap::Schedule step = record_step(plan, previous, speculative);
        return std::max(
            predict_steps(plan, record_step(plan, Previous::none, speculative), step, made.measured)
                .step_seconds,
            busiest_of(step, plan, made.measured, true).seconds);
    };
    EXPECT_LE(bound, least_s(Previous::not_speculative, false) * kRounding);
    if (plan.speculative) {
        EXPECT_LE(bound, least_s(Previous::committed, true) * kRounding);
    }
}

void expect_no_shorter_step_of_momentum(Case& made, const planner::Plan& plan) {
    const auto recorded = [&](Previous previous) {
        return record_step(plan, previous, false, Exchanged::momentum);
    };
    const swap::Schedule step = recorded(Previous::not_speculative);
    complete(made, plan, step);
    const double bound =
        bound_of(made.request.budgets, plan, made.shape, step, made.measured, Exchanged::momentum)
            .seconds;
    EXPECT_GT(bound, 0);
    EXPECT_LE(bound,
              predict_steps(plan, recorded(Previous::none), step, made.measured).step_seconds *
                  kRounding);
}

TEST(Bound, IsNoLongerThanAnySimulatedStep) {
    int64_t fitted = 0, of_momentum = 0, durable = 0;
    constexpr int64_t kOfAllKinds = 400;
    Seeds seeds(kOfAllKinds);
    do {
        Case made = draw(seeds.now());
        SCOPED_TRACE(testing::PrintToString(made));
        planner::Plan plan;
        try {
            plan = planner::make_plan(made.request, made.layers, made.numerics, made.needs,
                                      made.measured, made.partition);
        } catch (const Error& error) {
            EXPECT_EQ(error.trouble(), Trouble::does_not_fit) << error.what();
            continue;
        }
        ++fitted;
        durable += plan.durable;
        expect_no_shorter_step(made, plan);
        if (!plan.has_feedback()) continue;
        ++of_momentum;
        expect_no_shorter_step_of_momentum(made, plan);
    } while (seeds.next());
    if (seeds.replays()) return;
    EXPECT_GT(fitted, seeds.count() / 2) << "budgets are too small to plan for";
    if (seeds.count() < kOfAllKinds) return;
    EXPECT_GT(durable, seeds.count() / 80) << "hardly any step is durable";
    EXPECT_GT(of_momentum, seeds.count() / 40) << "hardly any run exchanges momentum";
}

}  // namespace
}  // namespace ferry::train
