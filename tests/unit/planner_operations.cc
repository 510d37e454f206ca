// The table of operations, and what of a wrong operand does not compile.
#include <gtest/gtest.h>

#include <set>
#include <string>

#include "planner/recording/recorder.h"

namespace ferry::planner {
namespace {

using cost::Addressed;
using cost::ItemOf;
using cost::name_of;
using cost::OperationRow;
using cost::operations;
using cost::row_of;
using cost::TimedBy;
using swap::Lane;

template <Content content>
using L = BufferOf<content>;
using Weights = L<Content::weights>;
using Input = L<Content::input>;

// ---------------------------------------------------------------- what compiles

template <class W, class X, class Y>
concept Forwards = requires(W weights, X x, Y out, L<Content::scratch>& scratch,
                            L<Content::report>& report) {
    op::Forward<Assigned>{
        .weights = weights, .x = x, .out = out, .scratch = scratch, .report = report};
};
static_assert(Forwards<const Weights&, const Input&, Input&>);
static_assert(!Forwards<const Input&, const Weights&, Input&>, "swapped");
static_assert(!Forwards<const Weights&, const Input&, L<Content::input_gradient>&>, "another's");
static_assert(!Forwards<const Weights&, const Input&, const Input&>,
              "what is written is not const");
static_assert(!Forwards<const L<Content::table>&, const Input&, Input&>, "the embedding's");
template <template <Content> class Before, template <Content> class After, Content gradient,
          Content weight>
concept Updates = requires(Before<Content::state> before, After<Content::state> after,
                           LocatedOf<gradient> of_chunk, After<weight> cast) {
    op::Update<Assigned>{.before = before, .state = after, .gradient = of_chunk, .weight = cast};
};
static_assert(Updates<LocatedOf, WrittenOf, Content::wire, Content::weight>);
static_assert(!Updates<LocatedOf, WrittenOf, Content::weight, Content::wire>,
              "swapped, of objects too");
static_assert(!Updates<WrittenOf, LocatedOf, Content::wire, Content::weight>,
              "the old version and the new one, swapped");
template <class Cast, class Before>
concept UpdatesWeight = requires(LocatedOf<Content::state> before, WrittenOf<Content::state> after,
                                 LocatedOf<Content::wire> gradient, Cast cast,
                                 Before weight_before) {
    op::Update<Assigned>{.before = before,
                         .state = after,
                         .gradient = gradient,
                         .weight = cast,
                         .weight_before = weight_before};
};
static_assert(UpdatesWeight<WrittenOf<Content::weight>, LocatedOf<Content::weight>>);
static_assert(!UpdatesWeight<LocatedOf<Content::weight>, WrittenOf<Content::weight>>,
              "a split master's, swapped");
static_assert(!Forwards<const AssignedBuffer&, const Input&, Input&>, "nobody knows of what");

template <class W>
concept ForwardsWithoutInput = requires(W weights, Input& out, L<Content::scratch>& scratch,
                                        L<Content::report>& report) {
    op::Forward<Assigned>{.weights = weights, .out = out, .scratch = scratch, .report = report};
};
static_assert(!ForwardsWithoutInput<const Weights&>, "missing");

template <class X, class D>
concept GoesBack = requires(const Weights& weights, X x, D dx, L<Content::scratch>& scratch) {
    op::Backward<Assigned>{.weights = weights, .x = x, .dx = dx, .scratch = scratch};
};
static_assert(GoesBack<const Input&, L<Content::input_gradient>&>, "the rest may be missing");
static_assert(!GoesBack<const L<Content::input_gradient>&, Input&>, "swapped");

template <class G, class T>
concept Adds = requires(G gradient, T added) {
    op::Add<Assigned>{.gradient = gradient, .added = added};
};
static_assert(Adds<L<Content::gradient>&, const L<Content::table_gradient>&>);
static_assert(!Adds<L<Content::table_gradient>&, const L<Content::gradient>&>, "swapped");

// ---------------------------------------------------------------- rows

TEST(Operations, EachHasARowWithItsOwnName) {
    ASSERT_EQ(operations().size(), static_cast<size_t>(Op::end));
    std::set<std::string> names;
    for (int i = 0; i < static_cast<int>(Op::end); ++i) {
        const OperationRow& row = row_of(static_cast<Op>(i));
        EXPECT_EQ(row.op, static_cast<Op>(i));
        ASSERT_NE(row.name, nullptr);
        EXPECT_TRUE(names.insert(row.name).second) << row.name;
        EXPECT_NE(row.bytes, nullptr) << row.name;
        EXPECT_FALSE(row.operands.empty()) << row.name;
        EXPECT_LE(row.operands.size(), static_cast<size_t>(swap::kPlaces)) << row.name;
        EXPECT_TRUE(row.among == cost::Among::all || row.lane == Lane::comm) << row.name;
        // The comm lane's take the time of their bytes; of a kernel's somebody has to know.
        EXPECT_EQ(row.lane == Lane::comm,
                  row.timed_by == TimedBy::nothing && row.lane != Lane::team)
            << row.name;
        EXPECT_EQ(row.timed_by == TimedBy::elements,
                  row.item == ItemOf::chunk && row.lane == Lane::compute)
            << row.name;
    }
    EXPECT_DEATH(row_of(Op::end), "unknown operation");
}

TEST(Operations, ATaskIsNamedByItsRowOrByItsVerb) {
    EXPECT_STREQ(name_of({.verb = swap::Verb::kernel, .op = static_cast<uint8_t>(Op::sum)}),
                 "sum, round and norm");
    EXPECT_STREQ(name_of({.verb = swap::Verb::seal, .op = static_cast<uint8_t>(Op::sum)}), "seal");
}

TEST(Operations, RowsSayWhatTheirOperandsAre) {
    const auto& operands = row_of(Op::backward).operands;
    ASSERT_EQ(operands.size(), 10u);
    EXPECT_EQ(operands[0].content, Content::weights);
    EXPECT_EQ(operands[0].role, Role::in);
    EXPECT_FALSE(operands[0].optional);
    EXPECT_EQ(operands[2].content, Content::input_gradient);
    EXPECT_EQ(operands[2].role, Role::in_out);
    EXPECT_EQ(operands[3].content, Content::gradient);
    EXPECT_TRUE(operands[3].optional);
    EXPECT_EQ(operands[4].role, Role::scratch);
    EXPECT_EQ(operands[7].content, Content::projections);
    EXPECT_EQ(operands[8].content, Content::tokens);
    EXPECT_TRUE(operands[8].optional);  // where documents are isolated
    EXPECT_EQ(operands[9].content, Content::deferred);
    EXPECT_EQ(operands[9].role, Role::out);
    EXPECT_TRUE(operands[9].optional);
    EXPECT_EQ(row_of(Op::update).operands.size(), row_of(Op::update_speculative).operands.size());
}

// ---------------------------------------------------------------- from the recorder to the kernel

Plan small_plan() {
    const model::Shape shape{.hidden = 64,
                             .layers = 1,
                             .heads = 2,
                             .kv_heads = 1,
                             .head_dim = 32,
                             .intermediate = 128,
                             .vocab = 64,
                             .tie_embeddings = true};
    PlanRequest request;
    request.micro_batches = 2;
    return make_plan(request, model::layers_of(shape, {}, false),
                     {.sequence = 64, .micro_batch = 1}, {.activation = 16384, .scratch = 1 << 20},
                     cost::default_measurements(request.device));
}

// Each operand reaches the kernel under the name that it was recorded by.
TEST(Operands, ReachTheKernelByName) {
    const Plan plan = small_plan();
    Recorder recorder(plan, "head");
    std::byte memory{};
    const auto address = [&](const swap::OperandPlace& place) { return &memory + place.offset; };
    auto x = recorder.acquire<Content::input>();
    auto dx = recorder.acquire<Content::input_gradient>();
    auto scratch = recorder.acquire<Content::scratch>();
    auto report = recorder.acquire<Content::report>();
    L<Content::tokens> tokens(recorder.acquire(Class::tokens));
    const Weights weights(recorder.acquire(Class::edge_weights));
    const L<Content::table> table(recorder.acquire(Class::edge_weights));
    L<Content::table_gradient> table_gradient(recorder.acquire(Class::edge_gradient));
    recorder.record<op::Head>(2, 1,
                              {.weights = weights,
                               .table = table,
                               .x = x,
                               .tokens = tokens,
                               .dx = dx,
                               .table_gradient = table_gradient,
                               .scratch = scratch,
                               .report = report});
    const swap::Schedule schedule = recorder.finish();
    const swap::Task& task = schedule.tasks.back();
    std::array<std::byte*, swap::kPlaces> at{};
    for (size_t i = 0; i < at.size(); ++i)
        if (task.places[i].kind != swap::OperandPlace::Kind::none) at[i] = address(task.places[i]);
    int kernels = 0;
    op::run(op::Kernels{}, task, at, [&](const auto& operands) {
        using Operands = std::remove_cvref_t<decltype(operands)>;
        if constexpr (std::is_same_v<Operands, op::Head<Addressed>>) {
            ++kernels;
            const auto is = [&](const void* given, const AssignedBuffer& buffer) {
                return given == address(buffer.place());
            };
            EXPECT_TRUE(is(operands.weights, weights));
            EXPECT_TRUE(is(operands.table, table));
            EXPECT_TRUE(is(operands.x, x));
            EXPECT_TRUE(is(operands.tokens, tokens));
            EXPECT_TRUE(is(operands.dx, dx));
            EXPECT_EQ(operands.gradient, nullptr);
            EXPECT_TRUE(is(operands.table_gradient, table_gradient));
            EXPECT_TRUE(is(operands.scratch, scratch));
            EXPECT_TRUE(is(operands.report, report));
        }
    });
    EXPECT_EQ(kernels, 1);
    EXPECT_DEATH(op::run(op::Exchanges{}, task, at, [](const auto&) {}), "no kernel of this sort");
}

// A buffer that was moved from, or never made, is no operand that can be done without.
TEST(Operands, ThatAreEmptyAreRefused) {
    const Plan plan = small_plan();
    Recorder recorder(plan, "embed");
    auto out = recorder.acquire<Content::input>();
    const L<Content::tokens> tokens(recorder.acquire(Class::tokens));
    const L<Content::table> none;
    auto scratch = recorder.acquire<Content::scratch>();
    EXPECT_DEATH(recorder.record<op::Embed>(
                     0, 0, {.tokens = tokens, .table = none, .out = out, .scratch = scratch}),
                 "embed");
}

}  // namespace
}  // namespace ferry::planner
