// The update as its callers see it: threads, pieces, degenerate input, refusals.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mman.h>

#include <array>
#include <atomic>
#include <set>

#include "ferry/error.h"
#include "internal.h"
#include "tests/unit/optim_arrays.h"
#include "topology/topology.h"

namespace ferry::optim {
namespace {

const Method kMethods[] = {Method::adamw, Method::adam, Method::sgd, Method::lion, Method::adagrad};

Hyper hyper_for(Method method) {
    Hyper hyper{.method = method, .weight_decay = 0.1};
    hyper.momentum = method == Method::sgd ? 0.9 : 0;
    return hyper;
}

TEST(Update, is_independent_of_threads_and_pieces) {
    for (const Method method : kMethods) {
        const Case c{.count = 300001,
                     .gradient_type = DType::bf16,
                     .out_of_place = true,
                     .positive_m = method == Method::adagrad};
        const Scalars scalars = scalars_of(hyper_for(method), 3, 0.5);
        Arrays want(c);
        update_reference(want.span(), scalars);
        for (const int threads : {1, 2, 3, 8}) {
            Team team(threads);
            Arrays got(c);
            update(team, got.span(), scalars);
            EXPECT_EQ(difference(got, want, c), "") << name_of(method) << " on " << threads;
        }
        Arrays pieces(c);
        for (int64_t begin = 0, length = 1; begin < c.count;
             begin += length, length = length * 3 + 1) {
            update(part_of(pieces.span(), begin, std::min(length, c.count - begin)), scalars);
        }
        EXPECT_EQ(difference(pieces, want, c), "") << name_of(method) << " in pieces";
    }
}

// The formats of the state: pieces, threads and in place or not are the same bits too.
TEST(Update, of_every_format_is_independent_of_threads_and_pieces) {
    for (const Method method : kMethods) {
        for (const MomentType moment_type : {MomentType::f32, MomentType::bf16, MomentType::int8}) {
            for (const bool out_of_place : {false, true}) {
                const Case c{.count = 200033,
                             .gradient_type = DType::bf16,
                             .out_of_place = out_of_place,
                             .positive_m = method == Method::adagrad,
                             .moment_type = moment_type,
                             .split = true,
                             .element = 4096};
                Hyper hyper = hyper_for(method);
                hyper.seed = 5;
                const Scalars scalars = scalars_of(hyper, 3, 0.5);
                Arrays want(c);
                update_reference(want.span(), scalars);
                Team team(2);
                Arrays got(c), pieces(c);
                update(team, got.span(), scalars);
                EXPECT_EQ(difference(got, want, c), "") << name_of(method);
                const int64_t unit = moment_type == MomentType::int8 ? kMomentBlock : 32;
                for (int64_t begin = 0, length = unit; begin < c.count;
                     begin += length, length = length * 3 + unit)
                    update(part_of(pieces.span(), begin, std::min(length, c.count - begin)),
                           scalars);
                EXPECT_EQ(difference(pieces, want, c), "") << name_of(method) << " in pieces";
            }
        }
    }
}

// A split master gives back what was given, whatever the bits. Its weight is the nearest bf16, and
// the larger in magnitude of two equally near ones.
TEST(Split, is_exact_and_differs_from_the_cast_in_ties_alone) {
    for (uint32_t high = 0; high < 0x10000; ++high) {
        for (const uint32_t low : {0u, 1u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
            const uint32_t bits = high << 16 | low;
            const Halves halves = split(bits);
            ASSERT_EQ(join(halves), bits);
            const float p = std::bit_cast<float>(bits);
            if (std::isnan(p)) continue;
            const bool tie = low == 0x8000u && high % 2 == 0;
            ASSERT_EQ(halves.weight, to_bf16(p) + (tie ? 1 : 0)) << std::hexfloat << p;
        }
    }
}

// Beside fp16 the weight is the cast, and p comes back exactly from 2^-16 on; below it comes back
// to within 2^-39, above fp16's largest as an infinity. What came back splits into the same halves.
TEST(Split, beside_fp16_is_exact_from_2_to_the_minus_16_on) {
    for (uint32_t high = 0; high < 0x10000; ++high) {
        for (const uint32_t low : {0u, 1u, 0x0fffu, 0x1000u, 0x1001u, 0x7fffu, 0x8000u, 0xffffu}) {
            const float p = std::bit_cast<float>(high << 16 | low);
            const Halves halves = split(DType::f16, p);
            ASSERT_EQ(halves.weight, to_f16(p) == 0x8000u ? 0 : to_f16(p)) << std::hexfloat << p;
            const float back = join(DType::f16, halves), w = from_f16(halves.weight);
            if (std::isnan(p)) {
                ASSERT_TRUE(std::isnan(back));
            } else if (!std::isfinite(w)) {
                ASSERT_EQ(back, w);
            } else if (std::fabs(p) >= 0x1p-16f) {
                ASSERT_EQ(back, p) << std::hexfloat << p;
            } else {
                ASSERT_LT(std::fabs(double{back} - p), 0x1p-39) << std::hexfloat << p;
            }
            const Halves again = split(DType::f16, back);
            ASSERT_EQ(again.weight, halves.weight) << std::hexfloat << p;
            ASSERT_EQ(again.low, halves.low) << std::hexfloat << p;
        }
    }
}

// A rounding that is fair: over many draws the mean is the value, where rounding to nearest would
// always give the same neighbour; what bf16 holds exactly stays.
TEST(Noise, rounds_to_a_neighbour_and_is_right_on_average) {
    constexpr int64_t kCount = 1 << 16;
    const float value = 1 + 0x1p-7f * 0.3f;  // between 1 and 1 + 2^-7
    std::vector<float> p(kCount), g(kCount, value);
    std::vector<uint16_t> m(kCount);
    const Scalars sgd = scalars_of({.method = Method::sgd, .momentum = 0.5, .seed = 9}, 1, 1);
    update({.count = kCount,
            .gradient = g.data(),
            .moment_type = MomentType::bf16,
            .p_in = p.data(),
            .m_in = m.data(),
            .p = p.data(),
            .m = m.data()},
           sgd);
    int64_t above = 0;
    for (const uint16_t half : m) {
        ASSERT_TRUE(half == to_bf16(1) || half == to_bf16(1) + 1);
        above += half - to_bf16(1);
    }
    // A binomial's standard deviation is 117 here.
    EXPECT_NEAR(static_cast<double>(above), 0.3 * kCount, 500);
    std::fill(g.begin(), g.end(), 1.5f);
    std::fill(m.begin(), m.end(), uint16_t{0});
    update({.count = kCount,
            .gradient = g.data(),
            .moment_type = MomentType::bf16,
            .p_in = p.data(),
            .m_in = m.data(),
            .p = p.data(),
            .m = m.data()},
           sgd);
    for (const uint16_t half : m) ASSERT_EQ(half, to_bf16(1.5f));
}

// Each of seed, update, layer, element and moment draws bits of its own.
TEST(Noise, is_a_function_of_step_layer_element_and_moment) {
    const Span span{.layer = 3};
    const Scalars base = scalars_of({.seed = 11}, 4, 1);
    const auto at = [&](uint32_t seed, int64_t step, uint32_t layer, int64_t element) {
        Span place = span;
        place.layer = layer;
        place.element = element;
        return noise_of(place, scalars_of({.seed = seed}, step, 1), 0);
    };
    const uint32_t here = noise_of(span, base, 0);
    EXPECT_EQ(at(11, 4, 3, 0), here);
    EXPECT_NE(at(12, 4, 3, 0), here);
    EXPECT_NE(at(11, 5, 3, 0), here);
    EXPECT_NE(at(11, 4, 4, 0), here);
    std::set<uint32_t> words;
    for (int64_t i = 0; i < 4096; ++i) {
        words.insert(noise_of(span, base, i));
        EXPECT_EQ(noise_of(span, base, i), at(11, 4, 3, i));
    }
    EXPECT_GT(words.size(), 4090u);  // of 2^32: two alike are rare, neighbours in a block too
    // Element 38 is word 0 of block 11.
    EXPECT_EQ(noise_of(span, base, 38),
              philox({11, Purpose::stochastic_rounding}, {4, 0, 3, 11})[0]);
    EXPECT_EQ(noise_of(span, base, 55),
              philox({11, Purpose::stochastic_rounding}, {4, 0, 3, 11})[3]);
}

// Two pretended nodes. Either both have numbers that this machine has not, and the first takes what
// is nowhere; or the second is the one that really holds the arrays, and its core does all the
// work.
TEST(Update, on_several_nodes_is_the_same) {
    const Scalars scalars = scalars_of({}, 3, 1);
    const Case c{.count = 300001, .seed = 1};
    Arrays want(c);
    update_reference(want.span(), scalars);
    for (const bool second_holds_it : {false, true}) {
        Arrays got(c);
        const int holder = second_holds_it ? node_of(got.in(0).data()) : 99;
        NodeTeams teams(
            {.nodes = {{.os_index = 77, .cores = {0}}, {.os_index = holder, .cores = {1}}}}, 2);
        ASSERT_EQ(teams.index_of(got.in(0).data()), second_holds_it ? 1 : 0);
        update(teams, got.span(), scalars);
        EXPECT_EQ(difference(got, want, c), "");
        update(teams, Span{}, scalars);
    }
}

// Two tiles that the second node really holds, and two that are nowhere, which the first takes.
TEST(Update, works_on_each_tile_on_the_node_that_holds_it) {
    constexpr int64_t kHeld = 2, kTiles = 4;
    constexpr size_t kTileBytes = kTile * sizeof(float);
    void* memory =
        mmap(nullptr, kTiles * kTileBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    ASSERT_NE(memory, MAP_FAILED);
    ASSERT_EQ(mprotect(memory, kHeld * kTileBytes, PROT_READ | PROT_WRITE), 0);
    std::memset(memory, 1, kHeld * kTileBytes);
    const auto* where = static_cast<const float*>(memory);
    NodeTeams teams(
        {.nodes = {{.os_index = 77, .cores = {0}}, {.os_index = node_of(where), .cores = {1}}}}, 2);
    std::array<std::atomic<int>, kTiles> times{}, node{}, core{};
    each_tile(teams, where, kTiles * kTile - 5, [&](int index, int64_t tile) {
        const auto t = static_cast<size_t>(tile);
        ++times[t];
        node[t] = index;
        core[t] = sched_getcpu();
    });
    munmap(memory, kTiles * kTileBytes);
    cpu_set_t allowed;
    ASSERT_EQ(sched_getaffinity(0, sizeof(allowed), &allowed), 0);
    const bool two_cores = CPU_ISSET(0, &allowed) && CPU_ISSET(1, &allowed);
    for (size_t t = 0; t < kTiles; ++t) {
        const int holder = t < kHeld ? 1 : 0;
        EXPECT_EQ(times[t], 1) << t;
        EXPECT_EQ(node[t], holder) << t;
        if (two_cores) {
            EXPECT_EQ(core[t], holder) << t;
        }
    }
}

TEST(Update, in_place_and_out_of_place_agree) {
    for (const Method method : kMethods) {
        Case c{.count = 70000};
        Arrays inside(c);
        c.out_of_place = true;
        Arrays outside(c), untouched(c);
        const Scalars scalars = scalars_of(hyper_for(method), 1, 1);
        update(inside.span(), scalars);
        update(outside.span(), scalars);
        const int kept = 1 + moments_of(method);
        for (int k = 0; k < kept; ++k) {
            EXPECT_EQ(std::memcmp(inside.out(k).data(), outside.out(k).data(), 280000), 0);
            EXPECT_EQ(std::memcmp(outside.in(k).data(), untouched.in(k).data(), 280000), 0);
        }
    }
}

TEST(Update, of_nothing_touches_nothing) {
    for (const Method method : kMethods) {
        Team team(2);
        const Scalars scalars = scalars_of(hyper_for(method), 1, 1);
        update(Span{}, scalars);
        update(team, Span{}, scalars);
        update_reference(Span{}, scalars);
    }
    leaf_norms(nullptr, DType::f32, 0, nullptr);
    recast(nullptr, 0, DType::bf16, nullptr);
    EXPECT_EQ(sum_leaves({}), 0);
}

TEST(Update, with_a_learning_rate_of_zero_moves_only_the_moments) {
    for (const Method method : kMethods) {
        Hyper hyper = hyper_for(method);
        hyper.lr = 0;
        const Case c{.count = 1000, .positive_m = method == Method::adagrad};
        Arrays got(c), before(c);
        update(got.span(), scalars_of(hyper, 1, 1));
        for (int64_t i = 0; i < c.count; ++i) EXPECT_EQ(got.out(0).get(i), before.in(0).get(i));
        EXPECT_NE(std::memcmp(got.out(1).data(), before.in(1).data(), 4000), 0);
    }
}

TEST(Update, with_an_eps_of_zero_stays_finite) {
    for (const Method method : {Method::adamw, Method::adam, Method::adagrad}) {
        Hyper hyper = hyper_for(method);
        hyper.eps = 0;
        const int64_t count = 200;
        std::vector<float> p(count, 1.0f), m(count), v(count), g(count);
        for (int64_t i = 0; i < count; ++i)
            g[static_cast<size_t>(i)] = std::ldexp(1.0f, static_cast<int>(-i));
        const Span span{.count = count,
                        .gradient = g.data(),
                        .p_in = p.data(),
                        .m_in = m.data(),
                        .v_in = v.data(),
                        .p = p.data(),
                        .m = m.data(),
                        .v = v.data()};
        for (int step = 1; step < 4; ++step) update(span, scalars_of(hyper, step, 1));
        for (const float value : p) {
            EXPECT_TRUE(std::isfinite(value));
            EXPECT_NEAR(value, 1, 0.005);  // three steps of at most lr, some decay
        }
    }
}

// A gradient of exactly zero lets a moment decay to zero, not to a denormal that stays for ever.
TEST(Update, lets_moments_die) {
    float p = 1, m = 1, v = 1, g = 0;
    const Span span{
        .count = 1, .gradient = &g, .p_in = &p, .m_in = &m, .v_in = &v, .p = &p, .m = &m, .v = &v};
    const Hyper hyper{.lr = 1e-4, .beta1 = 0.9, .beta2 = 0.95};
    for (int step = 1; step < 2000; ++step) update(span, scalars_of(hyper, step, 1));
    EXPECT_EQ(m, 0);
    EXPECT_EQ(v, 0);
}

TEST(UpdateDeathTest, refuses_half_overlapping_and_missing_arrays) {
    std::vector<float> a(64), b(64), c(64), g(64);
    const Scalars scalars = scalars_of({}, 1, 1);
    Span span{.count = 32,
              .gradient = g.data(),
              .p_in = a.data(),
              .m_in = b.data(),
              .v_in = c.data(),
              .p = a.data() + 1,
              .m = b.data(),
              .v = c.data()};
    EXPECT_DEATH(update(span, scalars), "same_or_disjoint");
    span.p = a.data();
    span.v = nullptr;
    EXPECT_DEATH(update(span, scalars), "v_in");
    span.v_in = nullptr;
    EXPECT_DEATH(update(span, scalars), "adamw");
    span.v_in = span.v = c.data();
    span.moment_type = MomentType::bf16;
    span.element = 16;
    EXPECT_DEATH(update(span, scalars), "16");
    span.element = 0;
    span.low = reinterpret_cast<uint16_t*>(g.data());
    EXPECT_DEATH(update(span, scalars), "low_in");
    span.count = -1;
    EXPECT_DEATH(update(span, scalars), "-1");
}

Problem refusal(const Hyper& hyper, int64_t step = 1, double scale = 1) {
    try {
        scalars_of(hyper, step, scale);
    } catch (const Error& error) {
        EXPECT_EQ(error.trouble(), Trouble::usage);
        return error.problem();
    }
    ADD_FAILURE() << "accepted";
    return {};
}

TEST(Scalars, of_values_that_define_no_update_are_refused_by_name) {
    EXPECT_EQ(refusal({}, 0).where, "optimizer.step");
    EXPECT_EQ(refusal({}, -3).measured, "-3");
    EXPECT_EQ(refusal({.beta1 = 1}).where, "optimizer.beta1");
    EXPECT_EQ(refusal({.beta2 = 1}).where, "optimizer.beta2");
    EXPECT_EQ(refusal({.beta2 = -0.1}).measured, "-0.1");
    EXPECT_EQ(refusal({.beta1 = NAN}).where, "optimizer.beta1");
    EXPECT_EQ(refusal({.lr = -1e-3}).where, "optimizer.lr");
    EXPECT_EQ(refusal({.lr = INFINITY}).where, "optimizer.lr");
    EXPECT_EQ(refusal({.eps = -1e-8}).where, "optimizer.eps");
    EXPECT_EQ(refusal({.weight_decay = NAN}).where, "optimizer.weight_decay");
    EXPECT_EQ(refusal({.momentum = 1}).where, "optimizer.momentum");
    EXPECT_EQ(refusal({.initial_accumulator = -1}).where, "optimizer.initial_accumulator");
    EXPECT_EQ(refusal({.method = Method::sgd, .nesterov = true}).where, "optimizer.nesterov");
    EXPECT_EQ(refusal({}, 1, NAN).where, "optimizer.gradient_scale");
    EXPECT_EQ(refusal({}, 1, -1).where, "optimizer.gradient_scale");
    EXPECT_FALSE(refusal({.beta1 = 1}).remedy.empty());
}

TEST(Scalars, that_fp32_rounds_to_one_or_to_infinity_are_refused) {
    const double nearly = 0.99999999;  // a float of exactly 1
    EXPECT_EQ(refusal({.beta1 = nearly}).where, "optimizer.beta1");
    EXPECT_EQ(refusal({.beta1 = nearly}).measured, "0.99999999");
    EXPECT_EQ(refusal({.beta2 = nearly}).where, "optimizer.beta2");
    EXPECT_EQ(refusal({.method = Method::sgd, .momentum = nearly}).where, "optimizer.momentum");
    const double most = 1 - 0x1p-24;
    const Scalars s = scalars_of({.beta1 = most, .beta2 = most}, 1, 1);
    EXPECT_LT(s.beta1, 1);
    EXPECT_LT(s.beta2, 1);
    EXPECT_GT(s.one_minus_beta1, 0);
    EXPECT_TRUE(std::isfinite(s.step_size) && std::isfinite(s.inv_sqrt_bias2));

    EXPECT_EQ(refusal({.lr = 3e38}).where, "optimizer.lr");
    EXPECT_EQ(scalars_of({.method = Method::sgd, .lr = 3e38}, 1, 1).step_size, 3e38f);
    EXPECT_EQ(refusal({.lr = 1e30, .weight_decay = 1e30}).where, "optimizer.weight_decay");
    EXPECT_EQ(refusal({.method = Method::lion, .lr = 1e30, .weight_decay = 1e30}).where,
              "optimizer.weight_decay");
    EXPECT_EQ(scalars_of({.method = Method::adam, .lr = 1e30, .weight_decay = 1e30}, 1, 1).decay,
              1);
}

TEST(Scalars, are_rounded_once_from_double) {
    const Hyper hyper{.lr = 1e-3, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .weight_decay = 0.1};
    const Scalars s = scalars_of(hyper, 3, 0.25);
    EXPECT_EQ(s.one_minus_beta2, static_cast<float>(1 - 0.999));
    EXPECT_EQ(s.step_size, static_cast<float>(1e-3 / (1 - std::pow(0.9, 3))));
    EXPECT_EQ(s.inv_sqrt_bias2, static_cast<float>(1 / std::sqrt(1 - std::pow(0.999, 3))));
    EXPECT_EQ(s.decay, static_cast<float>(1 - 1e-3 * 0.1));
    EXPECT_EQ(s.weight_decay, 0);
    EXPECT_EQ(s.gradient_scale, 0.25f);
    // Long after the corrections have gone, and with betas of zero.
    EXPECT_EQ(scalars_of(hyper, int64_t{1} << 40, 1).step_size, 1e-3f);
    EXPECT_EQ(scalars_of({.beta1 = 0, .beta2 = 0}, 1, 1).inv_sqrt_bias2, 1);
    EXPECT_NEAR(scalars_of({.eps = 0}, 1, 1).eps, 2.81e-14, 1e-16);
    EXPECT_EQ(scalars_of({.method = Method::adagrad, .eps = 0}, 1, 1).eps, 0x1p-50f);
    EXPECT_EQ(scalars_of({}, 1, 1e-42).gradient_scale, 0);
    EXPECT_EQ(scalars_of({.method = Method::adam, .weight_decay = 0.1}, 1, 1).decay, 1);
}

TEST(Names, go_both_ways_and_the_nearest_is_offered) {
    for (const Method method : kMethods) EXPECT_EQ(method_from(name_of(method)), method);
    try {
        method_from("adamv");
        FAIL();
    } catch (const Error& error) {
        EXPECT_THAT(error.what(), testing::HasSubstr("did you mean \"adamw\""));
    }
    EXPECT_EQ(moments_of(Method::adamw), 2);
    EXPECT_EQ(moments_of(Method::lion), 1);
    EXPECT_EQ(moments_of(Hyper{.method = Method::sgd}), 0);
    EXPECT_EQ(initial_moment({.method = Method::adagrad, .initial_accumulator = 0.5}), 0.5f);
    EXPECT_EQ(initial_moment({.initial_accumulator = 0.5}), 0);
}

TEST(Norm, sums_in_double_and_clips_as_pytorch) {
    const float leaves[] = {1, 0x1p-30f, 4};
    EXPECT_EQ(sum_leaves(leaves), 5 + 0x1p-30);
    EXPECT_EQ(sum_leaves(leaves, 2), 7 + 0x1p-30);
    EXPECT_EQ(clip_factor(2, 1), 1 / (2 + 1e-6));
    EXPECT_EQ(clip_factor(0.5, 1), 1);
    EXPECT_EQ(clip_factor(5, 0), 1);
    EXPECT_EQ(clip_factor(5, -1), 1);
    EXPECT_EQ(clip_factor(INFINITY, 1), 0);
    EXPECT_TRUE(std::isnan(clip_factor(NAN, 1)));
}

TEST(Norm, is_independent_of_threads) {
    Arrays arrays({.count = 500003, .gradient_type = DType::bf16});
    const auto leaves = static_cast<size_t>(leaves_of(500003));
    std::vector<float> want(leaves), got(leaves);
    leaf_norms_reference(arrays.gradient().data(), DType::bf16, 500003, want.data());
    for (const int threads : {1, 2, 5}) {
        Team team(threads);
        leaf_norms(team, arrays.gradient().data(), DType::bf16, 500003, got.data());
        EXPECT_EQ(got, want);
    }
    double exact = 0;
    for (int64_t i = 0; i < 500003; ++i) {
        uint16_t half;
        std::memcpy(&half, arrays.gradient().data() + 2 * i, 2);
        exact += double{from_bf16(half)} * from_bf16(half);
    }
    EXPECT_NEAR(sum_leaves(want) / exact, 1, 1e-6);
}

}  // namespace
}  // namespace ferry::optim
