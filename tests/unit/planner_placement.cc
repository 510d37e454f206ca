#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "planner/chunks.h"
#include "planner/placing/speculation.h"
#include "planner/planner.h"

namespace ferry::planner {
namespace {

using testing::HasSubstr;
using testing::Not;

TEST(SpeculativeFraction, LeavesBothPassesTheSameSlack) {
    EXPECT_EQ(speculative_fraction(1, 3, 0.25, 1), 0);  // forward hides it with time to spare
    for (const double optimizer : {0.5, 2.0, 4.0}) {
        for (const double out_of_place : {1.0, 1.5}) {
            const double speculative = speculative_fraction(1, 3, optimizer, out_of_place);
            const double in_forward = (1 - speculative) * optimizer / 1;
            const double in_backward = speculative * optimizer * out_of_place / 3;
            if (in_backward < 1) {
                EXPECT_DOUBLE_EQ(in_forward, in_backward);
            }
        }
    }
    EXPECT_DOUBLE_EQ(speculative_fraction(1, 3, 2, 1), 0.75);
    EXPECT_DOUBLE_EQ(speculative_fraction(1, 3, 12, 1),
                     0.25);  // backward hides no more than itself
    EXPECT_DOUBLE_EQ(speculative_fraction(1, 3, 12, 2),
                     0.125);  // and half of what takes twice as long
}

model::Layer layer(model::LayerKind kind, int64_t decayed, int64_t norms) {
    model::Layer made{.kind = kind};
    made.segments = {{0, decayed, true, true}, {decayed, norms, false, true}};
    made.elements = made.trainable_elements = decayed + norms;
    if (kind == model::LayerKind::block)
        made.tensors = {{.role = model::Role::up, .shape = {decayed, 1}, .count = decayed}};
    return made;
}

std::vector<model::Layer> three_blocks() {
    std::vector<model::Layer> layers{layer(model::LayerKind::embedding, 65536, 0)};
    for (int i = 0; i < 3; ++i) layers.push_back(layer(model::LayerKind::block, 196608, 4096));
    layers.push_back(layer(model::LayerKind::head, 65536, 4096));
    return layers;
}

PlanRequest small_request() {
    PlanRequest request;
    request.micro_batches = 4;
    request.swap.chunk_elements = 65536;
    return request;
}

// A GPU with nothing of the state.
PlanRequest beside_gpu() {
    PlanRequest request = small_request();
    request.device = DeviceKind::cuda;
    request.swap.state_on_device = 0;
    return request;
}

Plan plan_of(PlanRequest request, const StateFormat& state = {}, DType compute = DType::f32) {
    request.state = state;
    return make_plan(request, three_blocks(),
                     {.sequence = 64, .micro_batch = 1, .compute = compute, .wire = compute},
                     {.activation = 32768, .scratch = 1 << 20},
                     cost::default_measurements(request.device));
}

Plan plan_by(const PlanRequest& request, const cost::Measurements& machine) {
    return make_plan(request, three_blocks(), {.sequence = 64, .micro_batch = 1},
                     {.activation = 32768, .scratch = 1 << 20}, machine);
}

TEST(Chunks, NeverStraddleASegmentAndCoverEveryElementOnce) {
    const auto layers = three_blocks();
    std::vector<LayerPlan> plans(layers.size());
    const std::vector<Chunk> chunks = cut_chunks(layers, 65536, {}, {}, plans);
    for (size_t l = 0; l < layers.size(); ++l) {
        int64_t next = 0;
        for (int64_t c = plans[l].first_chunk; c < plans[l].first_chunk + plans[l].chunks; ++c) {
            const Chunk& chunk = chunks[static_cast<size_t>(c)];
            EXPECT_EQ(chunk.first, next);
            EXPECT_EQ(chunk.decays, chunk.first < layers[l].segments[1].offset ||
                                        layers[l].segments[1].count == 0);
            next += chunk.count;
        }
        EXPECT_EQ(next, layers[l].elements);
    }
}

TEST(Plan, KeepsEverythingInMemoryWhenNothingIsLimited) {
    const Plan plan = plan_of(small_request());
    EXPECT_EQ(plan.groups, 1);
    EXPECT_EQ(plan.nvme_bytes, 0);
    for (const LayerPlan& l : plan.layer_plans) EXPECT_TRUE(l.resident);
    for (const swap::Object& object : plan.objects) EXPECT_NE(object.home, swap::Tier::nvme);
}

// A GPU with so much of its memory.
Plan plan_on_gpu(int64_t device_bytes) {
    PlanRequest request = beside_gpu();
    request.budgets.device_bytes = device_bytes;
    return make_plan(
        request, three_blocks(), {.sequence = 64, .micro_batch = 1},
        {.activation = 32768, .scratch = 1 << 20, .overhead = 3 * kMiB, .maps_host = true},
        cost::default_measurements(request.device));
}

TEST(Plan, CountsThePageTablesOfTheHostTierIntoTheDevice) {
    const Plan plan = plan_on_gpu(kUnlimited);
    const int64_t tables = plan.device_overhead_bytes - 3 * kMiB;
    EXPECT_GT(plan.host_bytes, 0);
    EXPECT_EQ(tables, round_up(ceil_div(plan.host_bytes, 512), kMiB));
    const auto row = std::ranges::find(plan.rows, "page tables of the host tier", &TierRow::what);
    ASSERT_NE(row, plan.rows.end());
    EXPECT_EQ(row->bytes, tables);
    try {
        plan_on_gpu(4 * kMiB);
        ADD_FAILURE() << "4 MiB are enough?";
    } catch (const Error& error) {
        const std::string& text = error.problem().measured;
        const int64_t enough = std::stoll(text.substr(text.find('(') + 1));
        const Plan tight = plan_on_gpu(enough);
        EXPECT_LE(tight.device_bytes + tight.device_overhead_bytes, enough);
        EXPECT_GT(tight.device_overhead_bytes, 3 * kMiB);
    }
}

// The budget that a refusal names must do.
int64_t smallest_budget(PlanRequest request, int64_t BudgetConfig::*budget,
                        const StateFormat& state = {}, DType compute = DType::f32) {
    request.budgets.*budget = 1;
    try {
        plan_of(request, state, compute);
    } catch (const Error& error) {
        EXPECT_EQ(error.trouble(), Trouble::does_not_fit);
        const std::string& text = error.problem().measured;
        return std::stoll(text.substr(text.find('(') + 1));
    }
    ADD_FAILURE() << "one byte is enough?";
    return 0;
}

TEST(Plan, TheSmallestBudgetItNamesWorksAndOneByteLessDoesNot) {
    for (const bool nvme : {false, true}) {
        for (int64_t BudgetConfig::*budget :
             {&BudgetConfig::device_bytes, &BudgetConfig::host_bytes}) {
            PlanRequest request = small_request();
            if (nvme) request.budgets.nvme = {{.path = "unused"}};
            const int64_t smallest = smallest_budget(request, budget);
            request.budgets.*budget = smallest;
            const Plan plan = plan_of(request);
            EXPECT_LE(budget == &BudgetConfig::device_bytes ? plan.device_bytes : plan.host_bytes,
                      smallest);
            request.budgets.*budget = smallest - 1;
            EXPECT_THROW(plan_of(request), Error);
        }
    }
}

// Without NVMe buffers that keep the lanes busy are worth less than a run that fits.
TEST(Plan, TheDeviceYieldsBuffersToWhatTheHostHasNoRoomFor) {
    PlanRequest request = small_request();
    request.swap.groups = 1;
    const auto count_of = [](const Plan& plan, Class c) {
        return plan.buffers[static_cast<size_t>(c)].count;
    };
    const auto inputs_on_host = [](const Plan& plan) {
        return std::ranges::count_if(plan.inputs,
                                     [](swap::ObjectId id) { return id != swap::kNoObject; });
    };
    // Room for a second block's weights, and little else.
    request.budgets.device_bytes = smallest_budget(request, &BudgetConfig::device_bytes) + kMiB;
    const Plan busy = plan_of(request);
    EXPECT_EQ(count_of(busy, Class::block_weights), 2);
    ASSERT_GT(inputs_on_host(busy), 0);
    const int64_t smallest = smallest_budget(request, &BudgetConfig::host_bytes);
    request.budgets.host_bytes = smallest;
    const Plan lean = plan_of(request);
    EXPECT_EQ(count_of(lean, Class::block_weights), 1);
    EXPECT_LT(inputs_on_host(lean), inputs_on_host(busy));
    EXPECT_LE(lean.host_bytes, smallest);
    EXPECT_LE(lean.device_bytes, request.budgets.device_bytes);
    // Where the host has room nothing is yielded.
    request.budgets.host_bytes = busy.host_bytes;
    const Plan again = plan_of(request);
    for (size_t c = 0; c < busy.buffers.size(); ++c)
        EXPECT_EQ(again.buffers[c].count, busy.buffers[c].count) << c;
}

// Elements of a layer's state on NVMe.
int64_t stored_of(const Plan& plan, int64_t layer) {
    int64_t stored = 0;
    for (const Chunk& chunk : plan.chunks_of(layer)) {
        if (plan.objects[chunk.state].home == swap::Tier::nvme) stored += chunk.count;
    }
    return stored;
}

TEST(Plan, SpreadsStoredStateOverTheLayers) {
    PlanRequest request = small_request();
    request.budgets.nvme = {{.path = "unused"}};
    request.swap.chunk_elements = 8192;
    const auto expect_even = [&](const Plan& plan, double share) {
        for (int64_t layer = 0; layer < std::ssize(plan.layers); ++layer) {
            const double all = double(plan.layers[static_cast<size_t>(layer)].trainable_elements);
            EXPECT_NEAR(double(stored_of(plan, layer)), share * all, 2 * 8192)
                << "layer " << layer << ", share " << share;
        }
    };
    for (const double share : {0.1, 0.25, 0.5, 0.75, 0.9, 1.0}) {
        request.swap.state_on_nvme = share;
        expect_even(plan_of(request), share);
    }
    // As much as the budget leaves: half of all state has no room.
    request.swap.state_on_nvme = std::nullopt;
    const Plan unlimited = plan_of(request);
    int64_t elements = 0;
    for (const model::Layer& layer : unlimited.layers) elements += layer.trainable_elements;
    request.budgets.host_bytes = unlimited.host_bytes - elements * 12 / 2;
    const Plan half = plan_of(request);
    int64_t stored = 0;
    for (int64_t layer = 0; layer < std::ssize(half.layers); ++layer)
        stored += stored_of(half, layer);
    EXPECT_GT(stored, elements / 4);
    EXPECT_LT(stored, elements);
    expect_even(half, double(stored) / double(elements));
    EXPECT_GT(half.host_bytes, request.budgets.host_bytes - 8192 * 12);
}

// Every p, m, v on NVMe, in twice the slots; with a split master the weights too, whatever memory
// there is.
TEST(Plan, DurableStateIsOnNvmeTwice) {
    for (const bool split : {false, true}) {
        for (const Speculate speculative : {Speculate::off, Speculate::all}) {
            PlanRequest request = small_request();
            request.budgets.nvme = {{.path = "unused"}};
            request.durable = true;
            request.swap.speculate = speculative;
            const Plan plan = plan_of(request, {.split = split}, split ? DType::bf16 : DType::f32);
            EXPECT_TRUE(plan.durable);
            int64_t chunks = 0;
            for (const Chunk& chunk : plan.chunks) {
                EXPECT_EQ(plan.objects[chunk.state].home, swap::Tier::nvme);
                EXPECT_TRUE(plan.objects[chunk.state].versioned);
                EXPECT_EQ(plan.objects[chunk.weight].home == swap::Tier::nvme, split);
                EXPECT_EQ(plan.objects[chunk.weight].versioned, split);
                ++chunks;
            }
            for (const aio::SlotClass& one : plan.slot_classes) {
                const auto staging =
                    one.name == "state" ? Class::state_staging : Class::weight_staging;
                EXPECT_EQ(one.slots, 2 * chunks + plan.buffers[static_cast<size_t>(staging)].count);
            }
            EXPECT_EQ(plan.slot_classes.size(), split ? 2u : 1u);
            EXPECT_GT(plan.record_bytes, swap::map_bytes(plan.objects));
            request.budgets.nvme[0].size_bytes = plan.nvme_bytes;
            EXPECT_NO_THROW(plan_of(request, {.split = split}, split ? DType::bf16 : DType::f32));
            --request.budgets.nvme[0].size_bytes;
            EXPECT_THROW(plan_of(request, {.split = split}, split ? DType::bf16 : DType::f32),
                         Error);
        }
    }
}

TEST(Plan, StaysWithinEveryBudgetAndSpendsIt) {
    PlanRequest request = small_request();
    request.budgets.nvme = {{.path = "unused"}};
    const int64_t least = smallest_budget(request, &BudgetConfig::host_bytes);
    for (int64_t host = least; host < 20 * kMiB; host += 700 * kKiB) {
        request.budgets.host_bytes = host;
        const Plan plan = plan_of(request);
        EXPECT_LE(plan.host_bytes, host);
        // Nothing that would have fitted is left on NVMe.
        int64_t smallest_stored = kUnlimited;
        for (const Chunk& chunk : plan.chunks) {
            if (plan.objects[chunk.state].home == swap::Tier::nvme) {
                smallest_stored = std::min(smallest_stored, state_bytes(chunk));
            }
        }
        EXPECT_TRUE(smallest_stored == kUnlimited || plan.host_bytes + smallest_stored > host)
            << host;
    }
}

TEST(Plan, ResidencyGoesToTheEmbeddingAndTheFirstLayers) {
    PlanRequest request = small_request();
    const int64_t all = plan_of(request).device_bytes;
    for (int64_t device = all; device > all / 2; device -= 200 * kKiB) {
        request.budgets.device_bytes = device;
        const Plan plan = plan_of(request);
        EXPECT_LE(plan.device_bytes, device);
        for (size_t l = 1; l < plan.layer_plans.size(); ++l) {
            EXPECT_TRUE(plan.layer_plans[l - 1].resident || !plan.layer_plans[l].resident);
        }
    }
}

// State and gradient of the first chunks, beside their weights; further weights only from what is
// too little for the next chunk's state.
TEST(Plan, StateGoesToTheDeviceInForwardOrderAndBeforeFurtherWeights) {
    PlanRequest request = small_request();
    request.swap.state_on_device = 1;
    const int64_t all = plan_of(request).device_bytes;
    const int64_t least = smallest_budget(request, &BudgetConfig::device_bytes);
    int64_t partial = 0;
    for (int64_t device = all; device >= least; device -= 100 * kKiB) {
        request.budgets.device_bytes = device;
        const Plan plan = plan_of(request);
        EXPECT_LE(plan.device_bytes, device);
        const Chunk* first_left = nullptr;
        for (const Chunk& chunk : plan.chunks) {
            const bool resident = plan.layer_plans[size_t(chunk.layer)].resident;
            if (!plan.updates_on_device(chunk)) {
                first_left = first_left ? first_left : &chunk;
                EXPECT_NE(plan.objects[chunk.gradient].home, swap::Tier::device);
                continue;
            }
            EXPECT_FALSE(first_left);
            EXPECT_TRUE(resident);
            EXPECT_FALSE(chunk.speculative);
            EXPECT_EQ(plan.objects[chunk.gradient].home, swap::Tier::device);
        }
        if (!first_left || !plan.layer_plans[size_t(first_left->layer)].resident) continue;
        int64_t without_later_weights = plan.device_bytes;
        for (size_t l = size_t(first_left->layer) + 1; l < plan.layers.size(); ++l) {
            if (plan.layer_plans[l].resident) without_later_weights -= plan.layers[l].elements * 4;
        }
        EXPECT_GT(without_later_weights + first_left->count * (12 + 4), device);
        ++partial;
    }
    EXPECT_GT(partial, 10);
}

// One task for each run of chunks that the device updates: every element once, gradients one after
// the other, and leaves that fit a wire buffer.
TEST(Plan, TheDeviceUpdatesNeighboursTogether) {
    PlanRequest request = small_request();
    request.swap.state_on_device = 1;
    request.swap.chunk_elements = kLeafElements;
    const int64_t all = plan_of(request).device_bytes;
    int64_t longest = 0, single = 0;
    for (const int64_t device : {kUnlimited, all - 1500 * kKiB}) {
        request.budgets.device_bytes = device;
        const Plan plan = plan_of(request);
        const Chunk* first = nullptr;
        int64_t left = 0;
        for (const Chunk& chunk : plan.chunks) {
            if (chunk.run > 0) {
                EXPECT_EQ(left, 0);
                first = &chunk;
                left = chunk.run;
                longest = std::max<int64_t>(longest, chunk.run);
                single += chunk.run == 1;
                EXPECT_LE(plan.elements_of_run(chunk) / kLeafElements * 4,
                          plan.buffers[size_t(Class::wire)].bytes);
            }
            EXPECT_EQ(plan.updates_on_device(chunk), plan.updates_on_device(*first));
            EXPECT_EQ(chunk.layer, first->layer);
            EXPECT_EQ(chunk.decays, first->decays);
            EXPECT_TRUE(plan.updates_on_device(chunk) || chunk.run == 1);
            if (plan.updates_on_device(chunk)) {
                const int64_t apart = chunk.first - first->first;
                EXPECT_EQ(plan.objects[chunk.gradient].offset,
                          plan.objects[first->gradient].offset + apart * size_of(plan.wire));
                EXPECT_EQ(plan.objects[chunk.weight].offset,
                          plan.objects[first->weight].offset + apart * size_of(plan.compute));
            }
            --left;
        }
        EXPECT_EQ(left, 0);
        int64_t elements = 0;
        for (const Chunk& chunk : plan.chunks) elements += plan.elements_of_run(chunk);
        EXPECT_EQ(elements, plan.leaves * kLeafElements);
    }
    EXPECT_GT(longest, 10);
    EXPECT_GT(single, 0);
}

TEST(Plan, ThePartOfTheStateOnTheDeviceIsLimitedByWhatIsAskedFor) {
    PlanRequest request = small_request();
    request.budgets.nvme = {{.path = "disk"}};
    const auto parts = [&] {
        const Plan plan = plan_of(request);
        std::array<double, 3> found{};
        for (const Chunk& chunk : plan.chunks)
            found[size_t(plan.objects[chunk.state].home)] += double(chunk.count);
        for (double& part : found) part /= double(plan.leaves * kLeafElements);
        return found;
    };
    constexpr double kChunk = 65536.0 / (2 * 65536 + 3 * 200704 + 4096);
    EXPECT_EQ(parts()[0], 0);  // the processors' memory is the host's
    request.device = DeviceKind::cuda;
    EXPECT_EQ(parts()[0], 1);
    request.swap.state_on_device = 0.5;
    EXPECT_LE(parts()[0], 0.5);
    EXPECT_GT(parts()[0], 0.5 - kChunk);
    EXPECT_EQ(parts()[2], 0);
    request.swap.state_on_device = 1;
    request.swap.state_on_nvme = 0.7;
    EXPECT_LE(parts()[0], 0.3);
    EXPECT_GT(parts()[0], 0.3 - kChunk);
    EXPECT_GE(parts()[2], 0.7);
    request.swap.state_on_nvme = 1;
    EXPECT_EQ(parts()[0], 0);
}

// A GPU orthogonalises: in a room for what the host sends, and in another for its own where it has
// some. The processors have one workspace, in host memory, and keep all matrices there.
TEST(Plan, MatricesHaveRoomsWhereTheyAreMadeOrthogonal) {
    std::vector<model::Layer> layers = three_blocks();
    for (size_t l = 1; l < 4; ++l) layers[l].segments[0].matrices = {{384, 512}};
    const auto plan_for = [&](DeviceKind kind, double on_device, int64_t device_bytes) {
        PlanRequest request = small_request();
        request.device = kind;
        request.ns_steps = 5;
        request.swap.state_on_device = on_device;
        request.budgets.device_bytes = device_bytes;
        return make_plan(request, layers, {.sequence = 64, .micro_batch = 1},
                         {.activation = 32768, .scratch = 1 << 20, .matrix_scratch = 1 << 20},
                         cost::default_measurements(kind));
    };
    const int64_t workspace = workspace_of(384, 512, 196608, DType::f32).bytes();
    const Plan host = plan_for(DeviceKind::cpu, 1, kUnlimited);
    EXPECT_EQ(host.workspace_bytes, workspace);
    EXPECT_EQ(host.room_bytes, 0);
    const auto on_device = [](const Plan& plan) {
        return std::ranges::count_if(plan.chunks, [&](const Chunk& chunk) {
            return is_matrix(chunk) && plan.updates_on_device(chunk);
        });
    };
    EXPECT_EQ(on_device(host), 0);
    const Plan sent = plan_for(DeviceKind::cuda, 0, kUnlimited);
    EXPECT_EQ(on_device(sent), 0);
    EXPECT_EQ(sent.workspace_bytes, 196608 * 4);
    EXPECT_EQ(sent.room_bytes, round_up(workspace + (1 << 20), kPage));
    EXPECT_LE(sent.sent_room_offset + sent.room_bytes, sent.device_bytes);
    EXPECT_EQ(sent.own_room_offset, -1);
    const Plan whole = plan_for(DeviceKind::cuda, 1, kUnlimited);
    EXPECT_EQ(on_device(whole), 3);
    EXPECT_GE(whole.own_room_offset, whole.sent_room_offset + whole.room_bytes);
    EXPECT_LE(whole.own_room_offset + whole.room_bytes, whole.device_bytes);
    EXPECT_EQ(plan_for(DeviceKind::cuda, 1, whole.device_bytes).device_bytes, whole.device_bytes);
    EXPECT_LT(plan_for(DeviceKind::cuda, 1, whole.device_bytes - 1).device_bytes,
              whole.device_bytes);
}

int64_t speculative_of(const Plan& plan) {
    return std::ranges::count(plan.chunks, true, &Chunk::speculative);
}

// With so little other memory that more than state is stored; of a split master, weights that are
// speculative.
template <class Body>
void for_stored(const Body& body) {
    for (const bool split : {false, true}) {
        const StateFormat state{.split = split};
        const DType compute = split ? DType::bf16 : DType::f32;
        for (const int64_t groups : {1, 2}) {
            PlanRequest request = small_request();
            request.swap.groups = groups;
            request.budgets.nvme = {{.path = "disk"}};
            for (int64_t BudgetConfig::*budget :
                 {&BudgetConfig::device_bytes, &BudgetConfig::host_bytes})
                request.budgets.*budget = smallest_budget(request, budget, state, compute);
            const Plan plan = plan_of(request, state, compute);
            EXPECT_TRUE(std::ranges::any_of(plan.chunks, [&](const Chunk& chunk) {
                return chunk.speculative && plan.objects[chunk.weight].home == swap::Tier::nvme;
            }));
            body(request, [&] { return plan_of(request, state, compute); });
        }
    }
}

// The size it names is that without speculative updates, whatever would be speculative with more;
// with "all" they are what to do without.
TEST(Plan, NvmeBudgetTooSmallSaysHowMuch) {
    for_stored([](PlanRequest& request, const auto& plan) {
        request.swap.speculate = Speculate::off;
        const int64_t least = plan().nvme_bytes;
        request.budgets.nvme[0].size_bytes = least - 1;
        const auto refusal = [&](Speculate speculative) {
            request.swap.speculate = speculative;
            try {
                plan();
            } catch (const Error& error) {
                EXPECT_EQ(error.trouble(), Trouble::does_not_fit);
                EXPECT_EQ(error.problem().where, "budgets.nvme");
                return error.problem();
            }
            ADD_FAILURE() << "a byte less than it needs is enough?";
            return Problem{};
        };
        for (const Speculate speculative : {Speculate::off, Speculate::automatic}) {
            const Problem problem = refusal(speculative);
            const std::string bytes = std::to_string(least);
            EXPECT_THAT(problem.measured, HasSubstr("(" + bytes + " bytes)"));
            EXPECT_THAT(problem.remedy, HasSubstr("to " + bytes + " in all"));
            EXPECT_THAT(problem.remedy, Not(HasSubstr("swap.speculate")));
        }
        EXPECT_THAT(refusal(Speculate::all).remedy, HasSubstr("set swap.speculate to \"auto\""));
    });
}

// Nobody asked for them: with less room there are fewer, and none before anything is refused.
TEST(Speculation, TakeOnlyWhatTheNvmePathsHaveLeft) {
    for_stored([](PlanRequest& request, const auto& plan) {
        const Plan unlimited = plan();
        const int64_t most = speculative_of(unlimited);
        ASSERT_GT(most, 2);
        request.swap.speculate = Speculate::off;
        const int64_t least = plan().nvme_bytes;
        request.swap.speculate = Speculate::automatic;
        int64_t before = 0, partly = 0;
        for (int64_t size = least; size <= unlimited.nvme_bytes; size += 64 * kKiB) {
            request.budgets.nvme[0].size_bytes = size;
            const Plan found = plan();
            EXPECT_LE(found.nvme_bytes, size);
            EXPECT_GE(speculative_of(found), before);
            before = speculative_of(found);
            partly += before > 0 && before < most;
            if (size == least) {
                EXPECT_EQ(before, 0);
            }
        }
        EXPECT_GT(partly, 0);
        request.budgets.nvme[0].size_bytes = unlimited.nvme_bytes + kMiB;
        EXPECT_EQ(speculative_of(plan()), most);
    });
}

// The ends of two paths may hold no slot.
TEST(Speculation, LeaveASlotForTheEndOfAPath) {
    for_stored([](PlanRequest& request, const auto& plan) {
        request.swap.speculate = Speculate::off;
        const Plan without = plan();
        request.swap.speculate = Speculate::automatic;
        const int64_t slot = without.slot_classes.at(0).slot_bytes;
        const int64_t enough = without.nvme_bytes + aio::kHeaderBytes + slot;
        request.budgets.nvme = {{.path = "disk", .size_bytes = enough / 3},
                                {.path = "other", .size_bytes = enough - enough / 3}};
        EXPECT_EQ(speculative_of(plan()), 0);
    });
}

// The master weight and the moments as they are kept: in memory, on NVMe and in the
// staging buffers.
TEST(Plan, TakesStateAsTheOptimizerKeepsIt) {
    PlanRequest in_memory = small_request(), stored = small_request();
    stored.budgets.nvme = {{.path = "disk"}};
    stored.swap.state_on_nvme = 1;
    const auto plans = [](const PlanRequest& request, const StateFormat& state) {
        return plan_of(request, state, DType::bf16);
    };
    const std::pair<StateFormat, int64_t> formats[] = {
        {{.moments = 0}, 4},
        {{.moments = 1}, 8},
        {{.moments = 2}, 12},
        {{.moments = 2, .moment_type = MomentType::bf16}, 8},
        {{.moments = 2, .split = true}, 10},
        {{.moments = 1, .moment_type = MomentType::bf16, .split = true}, 4},
        {{.moments = 0, .split = true}, 2}};
    for (const auto& [format, element_bytes] : formats) {
        for (const PlanRequest& request : {in_memory, stored}) {
            const Plan plan = plans(request, format);
            EXPECT_EQ(plan.buffers[size_t(Class::state_staging)].bytes,
                      element_bytes * plan.chunk_elements);
            int64_t bytes = 0;
            for (const Chunk& chunk : plan.chunks) bytes += plan.objects[chunk.state].bytes;
            EXPECT_EQ(bytes, element_bytes * plan.leaves * 4096);
        }
    }
    EXPECT_LT(plans(stored, {.moments = 0}).nvme_bytes, plans(stored, {.moments = 1}).nvme_bytes);
    EXPECT_LT(plans(in_memory, {.moments = 1}).host_bytes,
              plans(in_memory, {.moments = 2}).host_bytes);
    const int64_t saved = 2 * plans(in_memory, {}).leaves * 4096;  // 2 B a parameter
    EXPECT_GE(plans(in_memory, {}).host_bytes - plans(in_memory, {.split = true}).host_bytes,
              saved);
    EXPECT_GE(plans(stored, {}).nvme_bytes - plans(stored, {.split = true}).nvme_bytes, saved);
}

// Segments of fp32 moments are cut into chunks of fewer elements, which take the others' slots; the
// scales of a chunk lie with its codes.
TEST(Plan, CutsFp32MomentsBesideCodedOnesIntoSmallerChunks) {
    const std::vector<std::string> fp32{"*embed*", "*gate*"};
    const model::Shape shape{.hidden = 256,
                             .layers = 2,
                             .heads = 2,
                             .kv_heads = 2,
                             .head_dim = 128,
                             .intermediate = 512,
                             .vocab = 512};
    const auto layers = model::layers_of(shape, {}, false, 1, {.coded = true, .fp32 = fp32});
    const StateFormat coded{.moment_type = MomentType::int8};
    const int64_t most = 65536;
    std::vector<LayerPlan> plans(layers.size());
    int64_t fp32_elements = 0, coded_elements = 0;
    for (const Chunk& chunk : cut_chunks(layers, most, coded, {}, plans)) {
        const bool is_coded = chunk.format.moment_type == MomentType::int8;
        (is_coded ? coded_elements : fp32_elements) += chunk.count;
        EXPECT_EQ(chunk.count % 4096, 0);
        EXPECT_LE(chunk.count, is_coded ? most : most / 2);
        EXPECT_LE(chunk.format.bytes(chunk.count), coded.bytes(most));
        EXPECT_EQ(chunk.format.bytes(chunk.count),
                  is_coded ? chunk.count * 6 + 2 * chunk.count / 256 * 4 : chunk.count * 12);
    }
    EXPECT_GE(coded_elements, 2 * (4 * 256 * 256 + 2 * 256 * 512) + 256 * 512);
    EXPECT_GE(fp32_elements, 2 * 256 * 512 + 256 * 512);
    EXPECT_EQ(largest_state_bytes(most, coded), coded.bytes(most));
    EXPECT_EQ(largest_state_bytes(4096, coded), 4096 * 12) << "a leaf is the least";
}

// The weight is half of a version: what is speculative has two places for it, and what has none is
// not.
TEST(Plan, ASpeculativeUpdateOfASplitMasterKeepsBothWeights) {
    PlanRequest request = small_request();
    request.budgets.nvme = {{.path = "disk"}};
    request.swap.state_on_nvme = 1;
    // Some layers are resident, some are not.
    request.budgets.device_bytes = plan_of(request, {}, DType::bf16).device_bytes - 800 * kKiB;
    const auto speculating = [&](const Plan& plan, swap::Tier weights) {
        int64_t speculative = 0;
        for (const Chunk& chunk : plan.chunks) {
            const swap::Object& weight = plan.objects[chunk.weight];
            EXPECT_EQ(weight.versioned, plan.state.split && chunk.speculative);
            EXPECT_TRUE(!chunk.speculative || !plan.state.split ||
                        weight.home != swap::Tier::device);
            speculative += chunk.speculative && weight.home == weights ? 1 : 0;
        }
        return speculative;
    };
    const auto plan_with = [&](Speculate speculative, int64_t host_bytes, bool split) {
        request.swap.speculate = speculative;
        request.budgets.host_bytes = host_bytes;
        return plan_of(request, {.split = split}, DType::bf16);
    };
    const Plan roomy = plan_with(Speculate::all, kUnlimited, true);
    EXPECT_GT(speculating(roomy, swap::Tier::host), 0);
    EXPECT_EQ(speculating(roomy, swap::Tier::device), 0);
    EXPECT_GT(speculating(plan_with(Speculate::all, kUnlimited, false), swap::Tier::device), 0);
    EXPECT_EQ(roomy.host_slots.at(1).slots, 2 * speculating(roomy, swap::Tier::host));
    // A second slot for each speculative chunk, and one for each buffer that a committed write may
    // hold.
    int64_t host_least = 0;
    try {
        plan_with(Speculate::all, 1, true);
    } catch (const Error& error) {
        const std::string& text = error.problem().measured;
        host_least = std::stoll(text.substr(text.find('(') + 1));
    }
    const Plan tight = plan_with(Speculate::all, host_least, true);
    const int64_t stored_speculative = speculating(tight, swap::Tier::nvme);
    EXPECT_GT(stored_speculative, 0);
    int64_t stored = 0, slots = 0;
    for (const Chunk& chunk : tight.chunks)
        stored += tight.objects[chunk.weight].home == swap::Tier::nvme ? 1 : 0;
    for (const aio::SlotClass& c : tight.slot_classes) slots += c.name == "weights" ? c.slots : 0;
    EXPECT_EQ(slots,
              stored + stored_speculative + tight.buffers[size_t(Class::weight_staging)].count);
}

// Block inputs keep the device's spare buffers, the last blocks' first; then host memory; and only
// what neither holds goes to NVMe.
TEST(Plan, BlockInputsSpillToTheHostAndThenToNvme) {
    PlanRequest request = small_request();
    const auto count = [](const Plan& plan, swap::Tier tier) {
        return std::ranges::count_if(plan.inputs, [&](swap::ObjectId id) {
            return (id == swap::kNoObject ? swap::Tier::device : plan.objects[id].home) == tier;
        });
    };
    request.budgets.device_bytes = smallest_budget(request, &BudgetConfig::device_bytes);
    request.swap.groups = std::nullopt;
    const Plan lean = plan_of(request);
    EXPECT_EQ(count(lean, swap::Tier::host), std::ssize(lean.inputs));
    request.budgets.device_bytes += 2 * 32768;  // one to run ahead with, one to keep an input in
    request.swap.groups = lean.groups;
    const Plan roomier = plan_of(request);
    EXPECT_GT(count(roomier, swap::Tier::device), 0);
    EXPECT_GT(count(roomier, swap::Tier::host), 0);
    EXPECT_EQ(roomier.inputs.back(), swap::kNoObject);
    EXPECT_NE(roomier.inputs.front(), swap::kNoObject);

    request.budgets.nvme = {{.path = "disk"}};
    const auto stored_with = [&](int64_t host_bytes) {
        request.budgets.host_bytes = host_bytes;
        return count(plan_of(request), swap::Tier::nvme);
    };
    const int64_t least = smallest_budget(request, &BudgetConfig::host_bytes);
    const int64_t spilled = stored_with(least);
    EXPECT_EQ(spilled, count(roomier, swap::Tier::host));
    bool partly = false;
    for (int64_t host = least; stored_with(host) > 0; host += 16 * kKiB) {
        partly = partly || stored_with(host) < spilled;
        ASSERT_LT(host, kGiB);
    }
    EXPECT_TRUE(partly || spilled == 1);
}

// Beside a GPU, and where the budget says what is to spare, state in memory is updated
// speculatively too: it then has two slots and is never updated in place.
TEST(Speculation, StateInMemorySpeculatesWhereThereIsRoom) {
    PlanRequest request = beside_gpu();
    request.micro_batches = 2048;  // backward has time to hide updates
    const auto speculative = [&] {
        const Plan plan = plan_of(request);
        int64_t count = 0;
        for (const Chunk& chunk : plan.chunks) {
            if (!chunk.trainable) continue;
            EXPECT_EQ(plan.objects[chunk.state].versioned, chunk.speculative);
            count += chunk.speculative;
        }
        EXPECT_EQ(plan.host_slots.at(0).slots, 2 * count);
        return count;
    };
    EXPECT_EQ(speculative(), 0);  // unlimited: nobody said what is to spare
    request.budgets.host_bytes = kGiB;
    const int64_t most = speculative();
    EXPECT_GT(most, 3);
    request.swap.speculate = Speculate::off;
    EXPECT_EQ(speculative(), 0);
    const int64_t in_place = plan_of(request).host_bytes;
    request.swap.speculate = Speculate::automatic;
    request.budgets.host_bytes = in_place + 2 * 65536 * 12;  // room for two second slots
    const int64_t few = speculative();
    EXPECT_EQ(few, 2);
    request.budgets.host_bytes = in_place;
    EXPECT_EQ(speculative(), 0);
    request.device = DeviceKind::cpu;
    request.budgets.host_bytes = kGiB;
    EXPECT_EQ(speculative(), 0);
}

// ---------------------------------------------------------------- by the machine's measurements

int64_t count_speculative(const Plan& plan) {
    return std::ranges::count_if(plan.chunks, &Chunk::speculative);
}

TEST(Measurements, DecideHowMuchSpeculates) {
    PlanRequest request = beside_gpu();
    request.budgets.host_bytes = kGiB;
    cost::Measurements machine = cost::default_measurements(request.device);
    const int64_t chunks = std::ssize(plan_by(request, machine).chunks);
    // The seconds of a step: of its one micro-batch, on three blocks.
    const auto take = [&](cost::Op op, double seconds) {
        constexpr auto kBlock = static_cast<int64_t>(model::LayerKind::block);
        machine.kernels.seconds[{static_cast<int64_t>(op), kBlock, 0}] =
            seconds / 3 / static_cast<double>(request.micro_batches);
    };
    // Updates that the forward pass hides need no speculation; others do, as far as backward hides
    // them.
    take(cost::Op::forward, 10);
    take(cost::Op::backward, 10);
    EXPECT_EQ(count_speculative(plan_by(request, machine)), 0);
    take(cost::Op::forward, 1e-9);
    const int64_t most = count_speculative(plan_by(request, machine));
    EXPECT_GT(most, chunks / 2);
    take(cost::Op::backward, 1e-9);
    EXPECT_EQ(count_speculative(plan_by(request, machine)), 0);
    // Twice the price is half the speculative updates.
    const double updates_s =
        9 * machine.update_overhead_s;  // 9 chunks of 65,536 and norms' remainders
    take(cost::Op::backward, updates_s * 0.8);
    const int64_t cheap = count_speculative(plan_by(request, machine));
    machine.out_of_place = 2;
    const int64_t costly = count_speculative(plan_by(request, machine));
    EXPECT_GT(cheap, costly);
    EXPECT_NEAR(double(cheap) / 2, double(costly), 1);
    // Where updates would take the kernels' cores nothing in memory is speculative.
    machine.computes_on_host = true;
    EXPECT_EQ(count_speculative(plan_by(request, machine)), 0);
}

TEST(Measurements, DecideHowLongAnUpdateIs) {
    PlanRequest request = small_request();
    const auto elements = [&](double overhead_s, double bytes_per_s) {
        cost::Measurements machine = cost::default_measurements(request.device);
        machine.update_overhead_s = overhead_s;
        machine.dram_bytes_per_s = bytes_per_s;
        std::vector<model::Layer> layers = three_blocks();
        layers[1].segments[0].count = 64 * kMiB;
        return choose_chunk_elements(layers, request, {}, machine, 28);
    };
    EXPECT_EQ(elements(1.2e-4, 1.5e11), 8 * kMiB);  // a server
    EXPECT_EQ(elements(2e-5, 2e10), kMiB);          // a small machine
    EXPECT_EQ(elements(1, 1e12), 16 * kMiB);
    request.budgets.nvme = {{.path = "disk"}};  // which takes longer than any meeting
    EXPECT_EQ(elements(1.2e-4, 1.5e11), kMiB);
}

TEST(Measurements, DecideHowManyChunksAreUnderWay) {
    PlanRequest request = small_request();
    request.budgets.nvme = {{.path = "disk"}};
    request.swap.state_on_nvme = 1;
    const auto stages = [&](double nvme, double dram, int64_t at_once = 1) {
        cost::Measurements machine = cost::default_measurements(request.device);
        machine.nvme_bytes_per_s = nvme;
        machine.nvme_at_once = at_once;
        machine.dram_bytes_per_s = dram;
        machine.update_overhead_s = 0;
        return plan_by(request, machine).buffers[size_t(Class::state_staging)].count;
    };
    EXPECT_EQ(stages(1e9, 1e12), 4);  // read and written, a moment's update, one being filled
    EXPECT_EQ(stages(1e9, 3e9), 4);
    EXPECT_EQ(stages(1e12, 1e9), 3);      // all the time is the update's
    EXPECT_EQ(stages(1e9, 1e12, 4), 10);  // four read, four written, and the two
    request.swap.chunks_at_once = 2;
    EXPECT_EQ(stages(1e9, 1e12, 4), 6);
    request.swap.chunks_at_once = 64;
    request.budgets.host_bytes = 32 * kMiB;
    cost::Measurements slow = cost::default_measurements(request.device);
    slow.nvme_bytes_per_s = 1e9;
    const Plan most = plan_by(request, slow);
    const Buffers& stage = most.buffers[size_t(Class::state_staging)];
    EXPECT_LE(stage.count * stage.bytes, request.budgets.host_bytes / 4 + stage.bytes);
    EXPECT_GT(stage.count, 1);
    request.swap.chunks_at_once = std::nullopt;
    request.budgets.host_bytes = kUnlimited;
    request.budgets.nvme.clear();
    request.swap.state_on_nvme = std::nullopt;
    const auto pieces = [&](double copies) {
        cost::Measurements machine = cost::default_measurements(request.device);
        machine.copy_bytes_per_s = copies;
        return plan_by(request, machine).buffers[size_t(Class::weight_staging)].count;
    };
    EXPECT_EQ(pieces(1e12), 3);
    EXPECT_EQ(pieces(1e6), 16);
}

}  // namespace
}  // namespace ferry::planner
