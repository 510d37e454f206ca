// Plans and schedules of several ranks.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <span>
#include <tuple>

#include "planner/chunks.h"
#include "planner/recording/recorder.h"

namespace ferry::planner {
namespace {

model::Layer layer(model::LayerKind kind, int64_t decayed, int64_t norms, int64_t frozen) {
    model::Layer made{.kind = kind};
    made.segments = {{0, decayed, true, true}, {decayed, norms, false, true}};
    made.trainable_elements = decayed + norms;
    made.elements = made.trainable_elements + frozen;
    if (frozen > 0) made.segments.push_back({made.trainable_elements, frozen, false, false});
    return made;
}

// For 1, 2, 3, 4 and 6 ranks.
std::vector<model::Layer> three_blocks() {
    constexpr int64_t kUnit = 12 * int64_t{4096};
    std::vector<model::Layer> layers{layer(model::LayerKind::embedding, 2 * kUnit, kUnit, 0)};
    for (int i = 0; i < 3; ++i)
        layers.push_back(layer(model::LayerKind::block, 5 * kUnit, kUnit, kUnit));
    layers.push_back(layer(model::LayerKind::head, 2 * kUnit, kUnit, 0));
    return layers;
}

Plan plan_of(const zero::Partition& partition, BudgetConfig budgets) {
    PlanRequest request;
    request.micro_batches = 4;
    request.swap.chunk_elements = 16384;
    request.budgets = std::move(budgets);
    return make_plan(
        request, three_blocks(),
        {.sequence = 64, .micro_batch = 1, .compute = DType::bf16, .wire = DType::bf16},
        {.activation = 32768, .scratch = 1 << 20}, cost::default_measurements(request.device),
        partition);
}

Plan plan_of(int64_t stage, int rank, int ranks, BudgetConfig budgets = {}) {
    return plan_of(zero::partition_of(stage, rank, ranks), std::move(budgets));
}

class Stages : public testing::TestWithParam<int64_t> {};

// Every element is updated where it must be, its norm counted once, its weights kept as the stage
// says.
TEST_P(Stages, TheRanksChunksTogetherAreTheModel) {
    const int64_t stage = GetParam();
    for (const int ranks : {2, 3, 4}) {
        int64_t updated = 0, owned = 0, weights = 0, leaves = 0, elements = 0, trainable = 0;
        for (const model::Layer& layer : three_blocks()) {
            elements += layer.elements;
            trainable += layer.trainable_elements;
        }
        for (int rank = 0; rank < ranks; ++rank) {
            const Plan plan = plan_of(stage, rank, ranks);
            for (const Chunk& chunk : plan.chunks) {
                weights += chunk.count;
                updated += chunk.trainable ? chunk.count : 0;
                owned += plan.owns(chunk) ? chunk.count : 0;
                EXPECT_FALSE(chunk.replica && (chunk.trainable || plan.owns(chunk)));
            }
            leaves += plan.leaves;
            EXPECT_EQ(plan.leaves * kLeafElements, trainable / ranks);
        }
        EXPECT_EQ(owned, elements);
        EXPECT_EQ(leaves * kLeafElements, trainable);
        EXPECT_EQ(updated, stage == 0 ? ranks * trainable : trainable);
        EXPECT_EQ(weights, stage == 3 ? elements : ranks * elements);
    }
}

std::vector<std::tuple<int, int64_t, int64_t>> exchanges(const swap::Schedule& schedule) {
    std::vector<std::tuple<int, int64_t, int64_t>> all;
    for (const uint32_t index : schedule.lanes[static_cast<size_t>(swap::Lane::comm)]) {
        const swap::Task& task = schedule.tasks[index];
        all.emplace_back(task.op, task.layer, task.bytes);
    }
    return all;
}

// A part of a step that has all of a recorder's exchanges, with one layer's forward and backward.
swap::Schedule visit(const Plan& plan) {
    Recorder recorder(plan, "visit");
    {
        auto report = recorder.acquire<Content::report>();
        auto scratch = recorder.acquire<Content::scratch>();
        for (int64_t l = 0; l < 5; ++l) {
            const auto weights = recorder.fetch_updated_weights(l);
            const auto x = recorder.acquire<Content::input>();
            auto out = recorder.acquire<Content::input>();
            recorder.record<op::Forward>(
                l, 0,
                {.weights = weights, .x = x, .out = out, .scratch = scratch, .report = report});
        }
        for (int64_t l = 3; l > 0; --l) {
            const auto weights = recorder.fetch_weights(l);
            const auto x = recorder.acquire<Content::input>();
            auto dx = recorder.acquire<Content::input_gradient>();
            auto gradient = recorder.fetch_gradient(l, true);
            recorder.record<op::Backward>(
                l, 0,
                {.weights = weights, .x = x, .dx = dx, .gradient = gradient, .scratch = scratch});
            if (l > 1) recorder.prefetch_weights(l - 1);
            recorder.receive_gradient();
            recorder.send_gradient(l, gradient);
        }
        recorder.receive_gradient();
        recorder.send_report(report);
        recorder.mark_outcome();
    }
    return recorder.finish();
}

// Whatever their memory: the order of a rank's exchanges follows from nothing that may differ
// between ranks.
TEST_P(Stages, AllRanksStartTheSameExchanges) {
    const int64_t stage = GetParam();
    const auto first = exchanges(visit(plan_of(stage, 0, 3)));
    EXPECT_FALSE(first.empty());
    EXPECT_EQ(std::get<0>(first.back()), static_cast<int>(Op::agree));
    for (int rank = 0; rank < 3; ++rank) {
        EXPECT_EQ(exchanges(visit(plan_of(stage, rank, 3))), first);
        const BudgetConfig little{.host_bytes = 2500 * kKiB,
                                  .nvme = {{.path = "there", .size_bytes = kGiB}}};
        EXPECT_EQ(exchanges(visit(plan_of(stage, rank, 3, little))), first);
    }
}

// Each gradient element crosses once to its owner, and once back where all keep it.
TEST_P(Stages, MoveTheBytesTheyShould) {
    const int64_t stage = GetParam(), ranks = 4;
    const Plan plan = plan_of(stage, 1, 4);
    std::array<int64_t, 256> bytes{};
    for (const auto& [op, layer, moved] : exchanges(visit(plan)))
        bytes[static_cast<size_t>(op)] += moved;
    const auto of = [&](Op op) { return bytes[static_cast<size_t>(op)]; };
    const auto others = [&](int64_t elements) { return elements * 2 * (ranks - 1) / ranks; };
    int64_t all = 0, trainable = 0;
    for (const model::Layer& l : plan.layers) all += l.elements, trainable += l.trainable_elements;
    const int64_t blocks = 3 * plan.layers[1].elements,
                  blocks_train = 3 * plan.layers[1].trainable_elements;
    EXPECT_EQ(of(Op::exchange), others(blocks_train));
    EXPECT_EQ(of(Op::gather_gradient), stage == 0 ? others(blocks_train) : 0);
    EXPECT_EQ(of(Op::gather_weights), stage == 3   ? others(all + blocks)
                                      : stage == 0 ? 0
                                                   : others(trainable));
}

Plan plan_of_hosts(int rank, int each, const zero::Codecs& codecs, BudgetConfig budgets = {}) {
    return plan_of(
        zero::partition_of(3, rank, 4, codecs, {}, {}, {.each = each, .second_shards = each > 1}),
        std::move(budgets));
}

// Backward gathers from the host alone, and between hosts each gradient crosses once for all of its
// ranks.
TEST(RanksOfHosts, SendTheOtherHostsLess) {
    const zero::Codecs codecs{.gradients = {CodecKind::int8, 256}};
    const auto bytes_of = [&](int each) {
        std::array<int64_t, 256> bytes{};
        for (const auto& [op, layer, moved] : exchanges(visit(plan_of_hosts(1, each, codecs))))
            bytes[static_cast<size_t>(op)] += moved;
        return bytes;
    };
    const auto one = bytes_of(1), two = bytes_of(2);
    const auto of = [](const auto& bytes, Op op) { return bytes[static_cast<size_t>(op)]; };
    const Plan plan = plan_of_hosts(1, 2, codecs);
    int64_t all = 0;
    for (const model::Layer& l : plan.layers) all += l.elements;
    const int64_t blocks = 3 * plan.layers[1].elements;
    EXPECT_EQ(of(one, Op::gather_weights), (all + blocks) * 2 * 3 / 4);
    EXPECT_EQ(of(two, Op::gather_weights), all * 2 * 3 / 4);
    EXPECT_EQ(of(two, Op::gather_weights_in_host), blocks * 2 / 2);
    EXPECT_EQ(of(one, Op::exchange), 3 * of(two, Op::exchange));
    EXPECT_EQ(of(two, Op::exchange_in_host), 2 * of(two, Op::exchange));
    EXPECT_EQ(of(one, Op::exchange_in_host) + of(one, Op::gather_weights_in_host), 0);
}

TEST(RanksOfHosts, StartTheSameExchangesWhereverTheirStateIs) {
    const zero::Codecs codecs{.gradients = {CodecKind::int4, 64}, .weights = {CodecKind::int8, 64}};
    const auto first = exchanges(visit(plan_of_hosts(0, 2, codecs)));
    for (int rank = 0; rank < 4; ++rank) {
        EXPECT_EQ(exchanges(visit(plan_of_hosts(rank, 2, codecs))), first);
        const BudgetConfig little{.host_bytes = 3000 * kKiB,
                                  .nvme = {{.path = "there", .size_bytes = kGiB}}};
        const Plan stored = plan_of_hosts(rank, 2, codecs, little);
        EXPECT_EQ(exchanges(visit(stored)), first);
    }
}

// As few buffers of parts as a step can do with: turns are combined and added as they must be.
TEST(RanksOfHosts, DoWithTwoBuffersOfParts) {
    const zero::Codecs codecs{.gradients = {CodecKind::int8, 256}};
    BudgetConfig least{.device_bytes = 1};
    try {
        plan_of_hosts(0, 2, codecs, least);
        FAIL();
    } catch (const Error& error) {
        const std::string& text = error.problem().measured;
        least.device_bytes = std::stoll(text.substr(text.find('(') + 1));
    }
    const Plan tight = plan_of_hosts(0, 2, codecs, least), roomy = plan_of_hosts(0, 2, codecs);
    ASSERT_EQ(tight.buffers[static_cast<size_t>(Class::parts)].count, 2);
    auto few = exchanges(visit(tight)), many = exchanges(visit(roomy));
    std::ranges::sort(few);
    std::ranges::sort(many);
    EXPECT_EQ(few, many);
}

INSTANTIATE_TEST_SUITE_P(zero, Stages, testing::Values(0, 1, 2, 3),
                         [](const auto& stage) { return std::to_string(stage.param); });

// In backward a layer's weights are asked for before the exchanges of the layer above, which wait
// for its work; with one buffer they cannot be.
TEST(ExpectedWeights, AreGatheredBeforeTheExchangesOfTheLayerAbove) {
    const auto order = [](const Plan& plan) {
        std::vector<std::pair<int, int64_t>> ops;
        for (const auto& [op, layer, bytes] : exchanges(visit(plan))) {
            if (ops.empty() || ops.back() != std::pair<int, int64_t>{op, layer})
                ops.emplace_back(op, layer);
        }
        const auto gather =
            std::find(ops.rbegin(), ops.rend(),
                      std::pair<int, int64_t>{static_cast<int>(Op::gather_weights), 2});
        const auto exchange = std::find(ops.begin(), ops.end(),
                                        std::pair<int, int64_t>{static_cast<int>(Op::exchange), 3});
        return (gather.base() - 1) - exchange;
    };
    const Plan roomy = plan_of(3, 0, 2);
    ASSERT_GT(roomy.buffers[static_cast<size_t>(Class::block_weights)].count, 1);
    EXPECT_LT(order(roomy), 0);
    BudgetConfig least{.device_bytes = 1};
    try {
        plan_of(3, 0, 2, least);
        FAIL();
    } catch (const Error& error) {
        const std::string& text = error.problem().measured;
        least.device_bytes = std::stoll(text.substr(text.find('(') + 1));
    }
    const Plan tight = plan_of(3, 0, 2, least);
    ASSERT_EQ(tight.buffers[static_cast<size_t>(Class::block_weights)].count, 1);
    ASSERT_EQ(tight.buffers[static_cast<size_t>(Class::parts)].count, 2);
    EXPECT_GT(order(tight), 0);
}

// Where a block's pieces all have a buffer, those that leave and those that arrive, its gradient is
// cut without waiting for an exchange. Where an eighth of the memory does not hold them, fewer.
TEST(Exchanges, OfABlockAreAllUnderWayWhereMemoryAllows) {
    const auto pieces = [](const Plan& plan) {
        return plan.buffers[static_cast<size_t>(Class::parts)];
    };
    const auto cuts_that_wait = [](const Plan& plan) {
        const swap::Schedule schedule = visit(plan);
        const auto& exchanges = schedule.lanes[static_cast<size_t>(swap::Lane::comm)];
        return std::ranges::count_if(schedule.tasks, [&](const swap::Task& task) {
            if (task.op != static_cast<int>(Op::cut) || task.layer != 3) return false;
            const auto waits = std::span(schedule.waits).subspan(task.first_wait, task.waits);
            return std::ranges::any_of(waits, [&](const swap::Wait& wait) {
                return wait.lane == swap::Lane::comm &&
                       schedule.tasks[exchanges[wait.index]].op == static_cast<int>(Op::exchange);
            });
        });
    };
    const Plan roomy = plan_of(3, 0, 2);
    const auto chunks = std::ranges::count_if(
        roomy.chunks, [](const Chunk& chunk) { return chunk.layer == 3 && chunk.trainable; });
    EXPECT_GT(chunks, 2);
    EXPECT_EQ(pieces(roomy).count, 2 * chunks);
    EXPECT_EQ(cuts_that_wait(roomy), 0);
    const Plan tight =
        plan_of(3, 0, 2, {.device_bytes = 8 * (2 * chunks - 3) * pieces(roomy).bytes});
    EXPECT_EQ(pieces(tight).count, 2 + chunks);
    EXPECT_GT(cuts_that_wait(tight), 0);
}

TEST(Plan, OfMoreRanksHoldsLessOnEach) {
    int64_t before = plan_of(3, 0, 1).host_bytes;
    for (const int ranks : {2, 4}) {
        const int64_t host = plan_of(3, 0, ranks).host_bytes;
        EXPECT_LT(host, before * 3 / 4);
        before = host;
    }
    for (const int64_t stage : {1, 3}) {
        const Plan more = plan_of(stage - 1, 0, 4), less = plan_of(stage, 0, 4);
        EXPECT_LT(less.host_bytes + less.device_bytes, more.host_bytes + more.device_bytes);
    }
}

// Neighbours with other slices share no state, and must skip and clip alike.
TEST(Plan, OfRanksWithSlicesAgreesThoughNoneSharesItsState) {
    PlanRequest request;
    request.micro_batches = 4;
    request.swap.chunk_elements = 16384;
    const Plan plan = make_plan(request, three_blocks(), {.sequence = 64, .micro_batch = 1},
                                {.activation = 32768, .scratch = 1 << 20},
                                cost::default_measurements(request.device),
                                zero::partition_of(3, 0, 1, {}, {2, 1}));
    EXPECT_TRUE(plan.partition.alone());
    EXPECT_EQ(plan.partition.of_run(), 2);
    Recorder recorder(plan, "a step");
    {
        const auto report = recorder.acquire<cost::Content::report>();
        recorder.send_report(report);
    }
    recorder.mark_outcome();
    const swap::Schedule schedule = recorder.finish();
    EXPECT_EQ(schedule.outcome.lane, swap::Lane::comm);
    const auto& comm = schedule.lanes[static_cast<size_t>(swap::Lane::comm)];
    ASSERT_EQ(comm.size(), 1u);
    EXPECT_EQ(static_cast<cost::Op>(schedule.tasks[comm[0]].op), cost::Op::agree);
    model::Segment segment{.holders = 2};
    EXPECT_FALSE(plan.partition.counts(segment));  // the neighbour does
    segment.holders = 1;
    EXPECT_TRUE(plan.partition.counts(segment));
}

TEST(Plan, OfOneRankHasNoExchanges) {
    const Plan plan = plan_of(3, 0, 1);
    EXPECT_EQ(plan.buffers[static_cast<size_t>(Class::parts)].count, 0);
    EXPECT_TRUE(exchanges(visit(plan)).empty());
}

}  // namespace
}  // namespace ferry::planner
