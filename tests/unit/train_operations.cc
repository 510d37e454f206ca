// The rows of the table of operations against the schedules of real plans.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <utility>

#include "model/gradients.h"
#include "planner/recording/recorder.h"
#include "planner/work.h"
#include "train/step/step.h"

namespace ferry::train {
namespace {

using cost::Content;
using cost::ItemOf;
using cost::Op;
using cost::OperationRow;
using cost::Role;
using cost::Work;
using swap::Lane;
using swap::Task;

struct Case {
    bool tied = false;
    int64_t groups = 1, stage = 0;
    int ranks = 1;
    zero::Codecs codecs{};
    StateFormat state{};
    double on_device = 0, on_nvme = 0;
    zero::Stage layers{};
    zero::Hosts hosts{};
    std::vector<std::string> freeze{};
    bool on_gpu = false;  // which the team does not share a memory with
};

constexpr int64_t kInput = 16384, kTokens = 64;

planner::Plan plan_of(const Case& of) {
    const model::Shape shape{.hidden = 64,
                             .layers = 3,
                             .heads = 2,
                             .kv_heads = 1,
                             .head_dim = 32,
                             .intermediate = 128,
                             .vocab = 256,
                             .tie_embeddings = of.tied};
    planner::PlanRequest request;
    request.micro_batches = 4;
    request.state = of.state;
    request.swap = {.chunk_elements = 8192,
                    .groups = of.groups,
                    .speculate = Speculate::all,
                    .state_on_nvme = of.on_nvme,
                    .state_on_device = of.on_device,
                    .save_attention = 1,
                    .save_mlp = 2,
                    .save_projections = 1};
    if (of.on_nvme > 0) request.budgets.nvme = {{.path = "there", .size_bytes = kGiB}};
    return planner::make_plan(
        request,
        zero::layers_of_stage(model::layers_of(shape, of.freeze, false, of.ranks), of.layers),
        {.sequence = kTokens, .micro_batch = 1, .compute = DType::bf16, .wire = DType::bf16},
        {.activation = kInput,
         .scratch = 1 << 20,
         .saved = {kInput, kInput, kInput},
         .saved_flops = {std::vector<double>(3, 1.0), std::vector<double>(3, 1.0),
                         std::vector<double>(3, 1.0)},
         .maps_host = of.on_gpu,
         .deferred = kInput},
        cost::default_measurements(request.device),
        zero::partition_of(of.stage, of.ranks - 1, of.ranks, of.codecs, {}, of.layers, of.hosts));
}

const std::vector<Case> kCases{
    {},
    {.tied = true, .groups = 2, .on_nvme = 0.5},
    {.state = {.moment_type = MomentType::bf16, .split = true}, .on_nvme = 1},
    {.tied = true, .on_device = 1},
    {.stage = 0, .ranks = 2},
    {.tied = true, .groups = 2, .stage = 1, .ranks = 3},
    {.stage = 3, .ranks = 2, .state = {.split = true}},
    {.stage = 0, .ranks = 2, .codecs = {.gradients = {CodecKind::int4, 64}}},
    {.tied = true,
     .stage = 3,
     .ranks = 3,
     .codecs = {.gradients = {CodecKind::int8, 256}, .weights = {CodecKind::int8, 256}}},
    {.tied = true,
     .groups = 2,
     .stage = 3,
     .ranks = 4,
     .codecs = {.gradients = {CodecKind::int4, 128}, .weights = {CodecKind::int8, 256}},
     .on_nvme = 1,
     .hosts = {.each = 2, .second_shards = true}},
    {.stage = 3, .ranks = 6, .hosts = {.each = 3, .second_shards = true}},
    {.tied = true,
     .stage = 0,
     .ranks = 3,
     .codecs = {.momentum = {CodecKind::sign, 256}},
     .on_nvme = 1},
    {.stage = 2, .ranks = 2, .codecs = {.momentum = {CodecKind::sign, 64}}},
    {.stage = 0,
     .ranks = 2,
     .codecs = {.momentum = {CodecKind::sign, 64}, .local_steps = true},
     .on_nvme = 1},
    {.stage = 3,
     .ranks = 2,
     .codecs = {.momentum = {CodecKind::sign, 64}},
     .on_nvme = 0.5,
     .on_gpu = true},
    {.tied = true,
     .groups = 4,
     .stage = 1,
     .ranks = 2,
     .layers = {.index = 0, .count = 3, .first = 0, .end = 2, .tied = true}},
    {.groups = 2,
     .on_nvme = 1,
     .layers = {.index = 1, .count = 3, .first = 2, .end = 3, .trains_below = true}},
    {.tied = true,
     .groups = 4,
     .on_nvme = 0.5,
     .layers = {.index = 2, .count = 3, .first = 3, .end = 5, .trains_below = true, .tied = true}},
    {.groups = 2,
     .layers = {.index = 0, .count = 3, .first = 0, .end = 2, .splits_backward = true}},
    {.groups = 4,
     .layers = {.index = 2,
                .count = 3,
                .first = 2,
                .end = 5,
                .trains_below = true,
                .splits_backward = true},
     .freeze = {"model.layers.1.*proj*"}},
    {.freeze = {"model.embed*", "model.layers.*"}},  // nothing below the head trains
};

template <class Look>
void for_kernels(const planner::Plan& plan, const Look& look) {
    const auto all = [&](const swap::Schedule& schedule) {
        for (const Task& task : schedule.tasks)
            if (task.verb == swap::Verb::kernel) look(task);
    };
    for (int p = 0; p < kPrevious; ++p) {
        if (static_cast<Previous>(p) == Previous::alone) continue;
        all(record_step(plan, static_cast<Previous>(p), plan.speculative));
        all(record_drain(plan, static_cast<Previous>(p)));
    }
    if (plan.has_feedback()) {
        for (const Previous previous :
             {Previous::none, Previous::not_speculative, Previous::alone}) {
            if (previous == Previous::alone && !plan.partition.codecs.local_steps) continue;
            all(record_step(plan, previous, false, Exchanged::momentum));
            all(record_drain(plan, previous, Exchanged::momentum));
        }
    }
    all(record_evaluation(plan, plan.group_size()));
}

// Bytes of an operand that is read or written once. A table and the embedding's gradient count by
// the rows that occur; data that a kernel keeps to itself or hands to the next counts for nothing.
int64_t bytes_of(const cost::OperandOf& operand, Op op, const Work& work) {
    const Content content = operand.content;
    const int64_t signs = work.codecs.momentum.bytes(work.elements);
    const bool of_chunk = cost::row_of(op).item == ItemOf::chunk;
    switch (content) {
        case Content::weights:
            return work.layer->elements * size_of(work.compute) /
                   (op == Op::encode_weights ? work.ranks : 1);
        case Content::codes: {
            const int64_t all =
                zero::coded_bytes(work.codecs.weights, *work.layer, static_cast<int>(work.ranks));
            return op == Op::encode_weights ? all / work.ranks : all;
        }
        case Content::table:
            return op == Op::embed ? work.input_bytes
                                   : work.table->elements * size_of(work.compute);
        case Content::input:
        case Content::input_gradient:
            return work.input_bytes;
        case Content::gradient:
            if (of_chunk)
                return (op == Op::cut || op == Op::keep ? work.ranks : 1) * work.elements * 4;
            if (op == Op::weight_gradients && operand.role == Role::in) return 0;  // the norms'
            if (op == Op::backward && (work.flags & cost::kDefers) != 0)
                return model::norm_elements(*work.layer) * 4;
            return op == Op::embed_backward ? work.input_bytes : work.layer->trainable_elements * 4;
        case Content::table_gradient:
            return (work.table ? work.table : work.layer)->trainable_elements * 4;
        case Content::tokens:
            return work.tokens_bytes;
        case Content::wire:
            return work.elements * size_of(work.wire);
        case Content::kept:
            return work.ranks * work.elements * size_of(work.wire);
        case Content::feedback:  // half of what is read and written
            return (op == Op::merge        ? 3
                    : op == Op::move_alone ? work.ranks * 4
                    : op == Op::compress   ? work.ranks * (3 + work.codecs.local_steps)
                                           : work.ranks * 2) *
                   work.elements * 4 / 2;
        case Content::parts:
        case Content::arrived:
            if (op == Op::compress || op == Op::average) return work.ranks * signs;
            if (op == Op::merge) return (operand.role == Role::in ? work.ranks : 1) * signs;
            return (op == Op::sum || (op == Op::combine && operand.role == Role::out)
                        ? work.summed_parts
                        : work.ranks) *
                   (work.codecs.gradients.on() ? work.codecs.gradients.bytes(work.elements)
                                               : work.elements * size_of(work.wire));
        case Content::leaves:
            return work.elements / 4096 * 4;
        case Content::state:
            return op == Op::recast ? work.elements * work.state.master_bytes()
                                    : work.state.bytes(work.elements);
        case Content::weight:
            return work.elements * size_of(work.compute);
        case Content::bytes:
            return work.bytes;
        default:
            return 0;
    }
}

// The head's, and a block's.
bool adds_to_gradients(Op op) {
    return op == Op::head || op == Op::backward || op == Op::weight_gradients;
}

// Recorded with the operands that its row asks for, on its row's lane; and the row's bytes are
// those of the operands, added up apart from it.
TEST(OperationRows, AgreeWithTheTasksOfEveryPlan) {
    std::set<Op> seen;
    for (const Case& of : kCases) {
        const planner::Plan plan = plan_of(of);
        for_kernels(plan, [&](const Task& task) {
            const auto op = static_cast<Op>(task.op);
            const OperationRow& row = cost::row_of(task);
            SCOPED_TRACE(testing::Message() << row.name << ", case " << &of - kCases.data());
            seen.insert(op);
            EXPECT_TRUE(task.lane == row.lane || (row.device_too && task.lane == Lane::compute));
            if (row.item != ItemOf::none) {
                EXPECT_GE(task.item, 0);
                EXPECT_LT(task.item,
                          row.item == ItemOf::chunk ? std::ssize(plan.chunks) : plan.micro_batches);
            }
            const Work work = planner::work_of(plan, task);
            const bool fresh = (task.flags & cost::kFresh) != 0 && adds_to_gradients(op);
            int64_t touched = 0;
            for (size_t i = 0; i < task.places.size(); ++i) {
                const bool given = task.places[i].kind != swap::OperandPlace::Kind::none;
                if (i >= row.operands.size()) {
                    EXPECT_FALSE(given);
                    continue;
                }
                const cost::OperandOf& operand = row.operands[i];
                EXPECT_TRUE(given || operand.optional || op == Op::agree) << "operand " << i;
                const bool gradient = operand.content == Content::gradient ||
                                      operand.content == Content::table_gradient;
                const bool both = operand.role == Role::in_out && !(fresh && gradient);
                if (given) touched += (both ? 2 : 1) * bytes_of(operand, op, work);
            }
            // The bytes that ranks exchange do not follow from a rank's buffers.
            EXPECT_EQ(row.bytes(work), row.lane == Lane::comm ? task.bytes : touched);
            if (row.lane == Lane::comm) return;
            if (row.timed_by != cost::TimedBy::bytes) {
                EXPECT_EQ(task.bytes, touched);
            }
        });
    }
    for (const OperationRow& row : cost::operations())
        EXPECT_TRUE(seen.contains(row.op)) << row.name;
}

// What the simulator, the estimate and the comm lane ask a row, against the tasks themselves.
TEST(OperationRows, SayWhichPassAndWhichExchangeATaskIs) {
    using cost::Pass;
    for (const Case& of : kCases) {
        const planner::Plan plan = plan_of(of);
        for_kernels(plan, [&](const Task& task) {
            const OperationRow& row = cost::row_of(task);
            SCOPED_TRACE(testing::Message() << row.name << ", case " << &of - kCases.data());
            if (row.pass != Pass::none) {
                EXPECT_EQ(task.lane, Lane::compute);
                EXPECT_EQ(row.item, ItemOf::micro_batch);
                EXPECT_EQ(plan.layers[static_cast<size_t>(task.layer)].kind, row.layer);
            }
            // Weights' gradients are products of what is there.
            EXPECT_EQ(cost::exchanges_within(task),
                      row.pass != Pass::none && row.pass != Pass::left);
            const bool between_stages = row.stage_end != cost::StageEnd::none;
            EXPECT_EQ(cost::passes(task), between_stages);
            EXPECT_LE(between_stages + row.gathers_weights + row.of_all_stages + row.of_two_levels,
                      task.lane == Lane::comm ? 1 : 0);
            EXPECT_EQ(cost::among(task) == cost::Among::hosts,
                      row.of_two_levels && task.flags == cost::kAcrossHosts);
            // An operand says what a gather is of.
            const bool of_weights = std::ranges::any_of(row.operands, [](const auto& operand) {
                return operand.content == Content::weights || operand.content == Content::codes;
            });
            EXPECT_EQ(row.gathers_weights, task.lane == Lane::comm && of_weights);
            const planner::Chunk* chunk =
                row.item == ItemOf::chunk ? &plan.chunks[static_cast<size_t>(task.item)] : nullptr;
            if (chunk) {
                EXPECT_EQ(planner::work_of(plan, task).elements,
                          row.spans_run && task.lane == Lane::compute ? plan.elements_of_run(*chunk)
                                                                      : chunk->count);
            }
        });
    }
}

bool is_given_a_gradient(const Task& task) {
    const auto& operands = cost::row_of(task).operands;
    for (size_t i = 0; i < operands.size(); ++i) {
        const Content content = operands[i].content;
        if (content != Content::gradient && content != Content::table_gradient) continue;
        if (task.places[i].kind != swap::OperandPlace::Kind::none) return true;
    }
    return false;
}

// In each step one task finds nothing in an accumulator, the first that adds to it, however many
// groups its micro-batches go in; only the embedding's is filled with zeros first.
TEST(OperationRows, TheFirstOfAStepWritesAnAccumulator) {
    for (const Case& of : kCases) {
        SCOPED_TRACE(&of - kCases.data());
        const planner::Plan plan = plan_of(of);
        std::map<int64_t, int64_t> added;
        const swap::Schedule step = record_step(plan, Previous::none, false);
        for (const Task& task : step.tasks) {
            if (task.verb != swap::Verb::kernel) continue;
            const auto op = static_cast<Op>(task.op);
            const Work work = planner::work_of(plan, task);
            if (op == Op::zero && work.layer->kind != model::LayerKind::embedding) {
                EXPECT_EQ(task.bytes, model::norm_elements(*work.layer) * 4);
            }
            const bool defers = op == Op::backward && (task.flags & cost::kDefers) != 0;
            if (!adds_to_gradients(op) || defers || !is_given_a_gradient(task)) continue;
            EXPECT_EQ((task.flags & cost::kFresh) != 0, added[task.layer]++ == 0);
        }
        EXPECT_GT(added.size(), 0U);
        for (const auto& [layer, count] : added) EXPECT_EQ(count, plan.micro_batches);
    }
}

constexpr double kAttention = 1000, kMlp = 300, kProjections = 70;

// FLOPs of every kernel of a plan that multiplies, by operation and layer.
template <class Check>
void for_products(const planner::Plan& plan, const Check& check) {
    for_kernels(plan, [&](const Task& task) {
        const OperationRow& row = cost::row_of(task);
        Work work = planner::work_of(plan, task);
        EXPECT_EQ(work.tokens, kTokens);
        work.saved_flops = {kAttention, kMlp, kProjections};
        SCOPED_TRACE(testing::Message() << row.name << " of layer " << task.layer);
        check(task, row.op, row.flops ? row.flops(work) : 0);
    });
}

// Of each token, with matrices of so many elements.
double once(double elements) { return 2 * double(kTokens) * elements; }

TEST(OperationRows, CountTheProductsOfTheModel) {
    constexpr double kQueries = 64 * 64, kKeys = 64 * 32, kInner = 64 * 128, kHead = 256 * 64;
    constexpr double kBlock = 2 * kQueries + 2 * kKeys + 3 * kInner;
    for (const bool tied : {false, true}) {
        for_products(plan_of({.tied = tied}), [](const Task& task, Op op, double flops) {
            const auto saves = [&](model::Saved what) {
                return (task.flags & cost::flag_of(what)) != 0;
            };
            double expected = 0;
            if (op == Op::forward) expected = once(kBlock) + kAttention;
            if (op == Op::backward)
                expected = once(3 * kBlock - kInner) +
                           (saves(model::Saved::attention) ? 2 : 3) * kAttention -
                           (saves(model::Saved::mlp) ? kMlp : 0) -
                           (saves(model::Saved::projections) ? kProjections : 0);
            if (op == Op::head) expected = once(3 * kHead);
            if (op == Op::head_loss) expected = once(kHead);
            EXPECT_EQ(flops, expected);
        });
    }
}

TEST(OperationRows, CountTheProductsOfASplitBackward) {
    constexpr double kInner = 64 * 128, kBlock = 2 * 64 * 64 + 2 * 64 * 32 + 3 * kInner;
    int64_t left = 0;
    for_products(plan_of({.layers = {.index = 1,
                                     .count = 2,
                                     .first = 2,
                                     .end = 5,
                                     .trains_below = true,
                                     .splits_backward = true}}),
                 [&](const Task& task, Op op, double flops) {
                     const auto spared = [&](model::Saved what, double its) {
                         return (task.flags & cost::flag_of(what)) != 0 ? its : 0;
                     };
                     if (op == Op::weight_gradients) {
                         ++left;
                         EXPECT_EQ(flops, once(kBlock));
                     }
                     if (op != Op::backward) return;
                     EXPECT_EQ(flops, once(2 * kBlock - kInner) + 3 * kAttention -
                                          spared(model::Saved::attention, kAttention) -
                                          spared(model::Saved::mlp, kMlp) -
                                          spared(model::Saved::projections, kProjections));
                 });
    EXPECT_GT(left, 0);
}

// Below the first block that trains nothing asks for gradients, and within it only what lies
// before something that trains. Forward's last product is repeated in no case.
TEST(OperationRows, CountOnlyTheGradientsThatAreAskedFor) {
    constexpr double kQueries = 64 * 64, kKeys = 64 * 32, kInner = 64 * 128, kHead = 256 * 64;
    constexpr double kAgain = 2 * kQueries + 2 * kKeys + 2 * kInner;
    struct Of {
        std::vector<std::string> trains;  // of the second block
        double inputs = 0, weights = 0;   // elements, in the products of their gradients
        int attentions = 1;               // forward's, again, and what its gradient takes
    };
    const std::vector<Of> all{
        {{"mlp.down"}, 0, kInner},
        {{"mlp.up"}, kInner, kInner},
        {{"mlp.gate", "mlp.down"}, kInner, 2 * kInner},
        {{"post_attention"}, 3 * kInner, 0},
        {{"self_attn.o"}, 3 * kInner, kQueries},
        {{"self_attn.v"}, 3 * kInner + kQueries, kKeys, 3},
        {{"input_layernorm"}, 3 * kInner + 2 * kQueries + 2 * kKeys, 0, 3},
    };
    for (const Of& of : all) {
        std::vector<std::string> freeze{"model.embed*", "model.layers.0.*", "model.layers.2.*",
                                        "model.norm*", "lm_head*"};
        for (const char* name : {"mlp.down", "mlp.up", "mlp.gate", "post_attention", "self_attn.o",
                                 "self_attn.v", "self_attn.k", "self_attn.q", "input_layernorm"}) {
            if (std::ranges::find(of.trains, name) == of.trains.end())
                freeze.push_back(std::string("model.layers.1.") + name + "*");
        }
        SCOPED_TRACE(of.trains.front());
        for_products(plan_of({.freeze = freeze}), [&](const Task& task, Op op, double flops) {
            const auto saved = [&](model::Saved what, double its) {
                return (task.flags & cost::flag_of(what)) != 0 ? its : 0;
            };
            if (op == Op::head) {
                EXPECT_EQ(flops, once(2 * kHead));
            }
            if (op != Op::backward) return;
            const double spared = saved(model::Saved::attention, kAttention) +
                                  saved(model::Saved::mlp, kMlp) +
                                  saved(model::Saved::projections, kProjections);
            EXPECT_GE(task.layer, 2);
            const double expected =
                task.layer == 3
                    ? once(kAgain) + once(3 * kInner + 2 * kQueries + 2 * kKeys) + 3 * kAttention
                    : once(kAgain + of.inputs + of.weights) + of.attentions * kAttention;
            EXPECT_EQ(flops, expected - spared);
        });
    }
}

// The team makes and reads codes of momentum in host memory; the ranks of GPUs exchange the
// device's. Between the two every code is copied once a direction.
TEST(CodesOfMomentum, PassThroughHostMemoryBesideAGpu) {
    for (const int64_t stage : {0, 2, 3}) {
        Case of{.stage = stage,
                .ranks = 3,
                .codecs = {.momentum = {CodecKind::sign, 64}},
                .on_nvme = 0.5,
                .on_gpu = true};
        const planner::Plan plan = plan_of(of);
        ASSERT_TRUE(plan.stages_codes());
        int64_t exchanged = 0, up = 0, down = 0;
        const swap::Schedule step =
            record_step(plan, Previous::not_speculative, false, Exchanged::momentum);
        for (const Task& task : step.tasks) {
            const auto op = static_cast<Op>(task.op);
            const bool kernel = task.verb == swap::Verb::kernel;
            if (kernel && op == Op::exchange_momentum) {
                const planner::Chunk& chunk = plan.chunks[static_cast<size_t>(task.item)];
                const int64_t bytes = plan.partition.codecs.momentum.bytes(chunk.count);
                exchanged += 3 * bytes;
                up += 3 * bytes + bytes;  // what goes to the owners, and what this one returns
                down += 2 * 3 * bytes;
            }
            for (const swap::OperandPlace& place : task.places) {
                if (kernel && task.lane == Lane::team) {
                    EXPECT_NE(place.kind, swap::OperandPlace::Kind::device) << cost::name_of(task);
                }
                if (kernel && task.lane == Lane::comm && op != Op::agree) {
                    EXPECT_NE(place.kind, swap::OperandPlace::Kind::host) << cost::name_of(task);
                }
            }
            if (task.verb != swap::Verb::copy || task.object != swap::kNoObject) continue;
            const planner::Buffers& codes =
                plan.buffers[static_cast<size_t>(planner::Class::codes_staging)];
            const auto of_codes = [&](const swap::OperandPlace& place) {
                return place.kind == swap::OperandPlace::Kind::host &&
                       place.offset >= codes.offset &&
                       place.offset < codes.offset + codes.count * codes.bytes;
            };
            if (task.lane == Lane::h2d && of_codes(task.places[0])) up -= task.bytes;
            if (task.lane == Lane::d2h && of_codes(task.places[1])) down -= task.bytes;
        }
        EXPECT_GT(exchanged, 0);
        EXPECT_EQ(up, 0) << "stage " << stage;
        EXPECT_EQ(down, 0) << "stage " << stage;
        of.on_gpu = false;
        EXPECT_FALSE(plan_of(of).stages_codes());
    }
}

// In the order of the record, what each task of a turn finds is what the one before it left.
TEST(CodesOfMomentum, OfATurnGoFromTaskToTask) {
    enum class Is : uint8_t { none, made, arrived, merged, gathered };
    using At = std::pair<swap::OperandPlace::Kind, int64_t>;
    const auto at = [](const swap::OperandPlace& place, int64_t behind = 0) {
        return At{place.kind, place.offset + behind};
    };
    for (const bool on_gpu : {false, true}) {
        const planner::Plan plan = plan_of({.stage = 3,
                                            .ranks = 3,
                                            .codecs = {.momentum = {CodecKind::sign, 64}},
                                            .on_gpu = on_gpu});
        std::map<At, std::pair<Is, int32_t>> holds;
        int turns = 0;
        const swap::Schedule step =
            record_step(plan, Previous::not_speculative, false, Exchanged::momentum);
        for (const Task& task : step.tasks) {
            const auto& [first, second, third] =
                std::tie(task.places[0], task.places[1], task.places[2]);
            if (task.verb == swap::Verb::copy) {
                const auto found = holds.find(at(first));
                if (found != holds.end()) holds[at(second)] = found->second;
                continue;
            }
            if (task.verb != swap::Verb::kernel || task.item < 0) continue;
            const auto chunk = static_cast<size_t>(task.item);
            const auto is = [&](Is what) { return std::pair(what, task.item); };
            const auto mine = [&] {
                return plan.partition.rank *
                       plan.partition.codecs.momentum.bytes(plan.chunks[chunk].count);
            };
            switch (static_cast<Op>(task.op)) {
                case Op::compress:
                    holds[at(third)] = is(Is::made);
                    break;
                case Op::exchange_momentum:
                    EXPECT_EQ(holds[at(first)], is(Is::made));
                    holds[at(second)] = is(Is::arrived);
                    break;
                case Op::merge:
                    EXPECT_EQ(holds[at(first)], is(Is::arrived));
                    holds[at(third, mine())] = is(Is::merged);
                    break;
                case Op::gather_momentum:
                    EXPECT_EQ(holds[at(first, mine())], is(Is::merged));
                    holds[at(first)] = is(Is::gathered);
                    break;
                case Op::average:
                    EXPECT_EQ(holds[at(first)], is(Is::gathered));
                    ++turns;
                    break;
                default:
                    break;
            }
        }
        EXPECT_GT(turns, 2);
    }
}

}  // namespace
}  // namespace ferry::train
