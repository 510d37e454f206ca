// Whatever the model, the budgets, the machine and the ranks: no simulated step of a plan is
// shorter than the lower bound of its configuration.
#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "cost/drives.h"
#include "planner/recording/recorder.h"
#include "planner/work.h"
#include "tests/support/seeds.h"
#include "train/prediction/step_timeline.h"

namespace ferry::train {
namespace {

class Random {
public:
    explicit Random(uint64_t seed) : draws_(seed) {}
    int64_t from(int64_t least, int64_t most) {
        return std::uniform_int_distribution<int64_t>(least, most)(draws_);
    }
    bool once_in(int64_t times) { return from(1, times) == 1; }
    double part() { return std::uniform_real_distribution<double>(0, 1)(draws_); }
    // As likely in each power of ten.
    double between(double least, double most) { return least * std::pow(most / least, part()); }

private:
    std::mt19937_64 draws_;
};

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

void draw_machine(Random& random, Case& made) {
    cost::Measurements& m = made.measured;
    m.computes_on_host = made.request.device == DeviceKind::cpu;
    m.copy_bytes_per_s = random.between(1e8, 1e11);
    m.dram_bytes_per_s = random.between(1e9, 3e11);
    m.update_overhead_s = random.between(1e-7, 1e-4);
    m.out_of_place = 1 + random.part();
    m.check_bytes_per_s = random.between(1e9, 2e10);
    m.threads = static_cast<int>(random.from(1, 16));
    m.device_bytes_per_s = m.computes_on_host ? m.dram_bytes_per_s : random.between(1e11, 4e12);
    m.comm_bytes_per_s = random.between(1e8, 1e11);
    m.comm_overhead_s = random.between(1e-7, 1e-4);
    m.across_hosts = {m.comm_bytes_per_s * random.between(0.3, 1), m.comm_overhead_s};
    for (cost::GroupRate* group : {&m.with_sequence, &m.with_slices, &m.in_host})
        *group = {m.comm_bytes_per_s * random.between(1, 10), m.comm_overhead_s};
    m.assumed_flops_per_s = random.between(1e9, 1e14);
    m.memory_of = m.storage_of = random.once_in(2) ? cost::Of::host : cost::Of::rank;
    const cost::Drive drive = cost::one_drive(made.paths);
    m.nvme_bytes_per_s = drive.bytes_per_s > 0 ? drive.bytes_per_s : 1e9;
    m.nvme_at_once = std::max<int64_t>(drive.at_once, 1);
    m.dram_per_nvme_byte = drive.dram_per_byte;
    m.cores_per_nvme_byte = drive.cores_per_byte;
}

Case draw(uint64_t seed) {
    Random random(seed);
    Case made;
    made.request.device = random.once_in(2) ? DeviceKind::cpu : DeviceKind::cuda;
    draw_model(random, made);
    draw_budgets(random, made);
    draw_machine(random, made);
    made.measured = cost::of_rank(made.measured, made.partition.of_run());
    return made;
}

// As the paths are filled, and every kernel by what it multiplies and moves.
void complete(Case& made, const planner::Plan& plan, const swap::Schedule& step) {
    const cost::Drive drive = cost::one_drive(made.paths, plan.nvme_bytes);
    if (drive.bytes_per_s > 0) made.measured.nvme_bytes_per_s = drive.bytes_per_s;
    model::OfSaved<double> flops{};
    for (const model::Saved what : model::kAllSaved)
        flops[at(what)] = made.needs.saved_flops[at(what)].front();
    made.measured.kernels =
        cost::assumed_times(step, planner::work_of(plan), made.numerics.tokens(), flops,
                            {made.measured.assumed_flops_per_s, cost::kAssumedDeviceBytesPerS});
}

constexpr double kRounding = 1 + 1e-6;

void expect_no_shorter_step(Case& made, const planner::Plan& plan) {
    const swap::Schedule plain = record_step(plan, Previous::not_speculative, false);
    complete(made, plan, plain);
    const double bound =
        bound_of(made.request.budgets, plan, made.shape, plain, made.measured).seconds;
    EXPECT_GT(bound, 0);
    const auto simulated = [&](Previous previous, bool speculative) {
        return predict_steps(plan, record_step(plan, Previous::none, speculative),
                             record_step(plan, previous, speculative), made.measured)
            .step_seconds;
    };
    EXPECT_LE(bound, simulated(Previous::not_speculative, false) * kRounding);
    if (plan.speculative) {
        EXPECT_LE(bound, simulated(Previous::committed, true) * kRounding);
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
    int64_t fitted = 0, of_momentum = 0;
    Seeds seeds(400);
    do {
        SCOPED_TRACE(testing::Message() << "FERRY_SIM_SEED=" << seeds.now());
        Case made = draw(seeds.now());
        planner::Plan plan;
        try {
            plan = planner::make_plan(made.request, made.layers, made.numerics, made.needs,
                                      made.measured, made.partition);
        } catch (const Error& error) {
            EXPECT_EQ(error.trouble(), Trouble::does_not_fit) << error.what();
            continue;
        }
        ++fitted;
        expect_no_shorter_step(made, plan);
        if (!plan.has_feedback()) continue;
        ++of_momentum;
        expect_no_shorter_step_of_momentum(made, plan);
    } while (seeds.next());
    if (seeds.replays()) return;
    EXPECT_GT(fitted, seeds.count() / 2) << "budgets are too small to plan for";
    EXPECT_GT(of_momentum, seeds.count() / 40) << "hardly any run exchanges momentum";
}

}  // namespace
}  // namespace ferry::train
