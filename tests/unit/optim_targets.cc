// Every SIMD target against the scalar reference, bit by bit.
#include "base/simd_targets.h"

#include <gtest/gtest.h>
#include <hwy/detect_targets.h>

#include <fstream>
#include <set>

#include "tests/support/quick.h"
#include "tests/unit/optim_arrays.h"

namespace ferry::optim {
namespace {

const Method kMethods[] = {Method::adamw, Method::adam, Method::sgd, Method::lion, Method::adagrad};
const DType kTypes[] = {DType::f32, DType::bf16, DType::f16};

class Targets : public testing::TestWithParam<std::string> {
protected:
    void SetUp() override {
        force_target(GetParam());
        ASSERT_EQ(current_target(), GetParam()) << "the target was never dispatched";
        for (const Method method : kMethods)
            ASSERT_EQ(current_target(method), GetParam()) << name_of(method) << " lacks the target";
    }
    void TearDown() override { force_target(""); }

    static void expect_same(Case c, const Scalars& scalars) {
        c.positive_m = scalars.method == Method::adagrad;
        Arrays got(c), want(c);
        update(got.span(), scalars);
        update_reference(want.span(), scalars);
        EXPECT_EQ(difference(got, want, c), "")
            << name_of(scalars.method) << ", count " << c.count << ", gradient "
            << name_of(c.gradient_type) << ", weight " << name_of(c.weight_type) << ", offset "
            << c.offset << ", moments " << name_of(c.moment_type) << (c.split ? ", split" : "")
            << ", seed " << c.seed;
    }
};

const StateFormat kSmaller[] = {{.moment_type = MomentType::bf16},
                                {.split = true},
                                {.moment_type = MomentType::bf16, .split = true},
                                {.moment_type = MomentType::int8},
                                {.moment_type = MomentType::int8, .split = true}};

TEST_P(Targets, every_format_of_the_state) {
    for (const Method method : kMethods) {
        Scalars scalars = scalars_for(method);
        scalars.seed = 0xfedcba98u;
        for (const StateFormat& format : kSmaller) {
            for (int64_t count = 0; count <= 100; ++count) {
                for (const DType gradient : kTypes) {
                    expect_same({.count = count,
                                 .gradient_type = gradient,
                                 .fill = count % 2 ? Fill::edges : Fill::ordinary,
                                 .seed = static_cast<uint64_t>(count),
                                 .offset = count % 64,
                                 .out_of_place = count % 3 == 0,
                                 .moment_type = format.moment_type,
                                 .split = format.split,
                                 .element = count * 4096},
                                scalars);
                }
            }
            for (const DType weight : kTypes) {
                if (format.split && weight == DType::f32) continue;
                for (const Fill fill : {Fill::ordinary, Fill::edges, Fill::any_finite}) {
                    for (const DType gradient : kTypes) {
                        expect_same({.count = 277,
                                     .gradient_type = gradient,
                                     .weight_type = weight,
                                     .fill = fill,
                                     .out_of_place = fill == Fill::edges,
                                     .moment_type = format.moment_type,
                                     .split = format.split},
                                    scalars);
                    }
                }
            }
            for (const bool out_of_place : {false, true}) {
                for (const int64_t offset : {int64_t{0}, int64_t{4}}) {  // streaming stores or not
                    expect_same({.count = (1 << 16) + 77,
                                 .gradient_type = DType::bf16,
                                 .fill = Fill::any_finite,
                                 .offset = offset,
                                 .out_of_place = out_of_place,
                                 .moment_type = format.moment_type,
                                 .split = format.split,
                                 .element = (int64_t{1} << 34) - (1 << 17)},
                                scalars);
                }
            }
        }
    }
    Scalars sgd = scalars_of({.method = Method::sgd, .weight_decay = 0.1}, 1, 1);
    for (const MomentType type : {MomentType::bf16, MomentType::int8}) {
        expect_same({.count = 99, .with_m = false, .moment_type = type, .split = true}, sgd);
        expect_same({.count = 99, .with_weight = false, .moment_type = type},
                    scalars_for(Method::lion));
    }
}

TEST_P(Targets, a_nan_stays_one_in_every_format) {
    for (const StateFormat& format : kSmaller) {
        if (format.moment_type == MomentType::int8) continue;  // a whole block is
        const Case c{.count = 41, .moment_type = format.moment_type, .split = format.split};
        Arrays got(c), want(c);
        got.gradient().put(20, std::nanf(""));
        want.gradient().put(20, std::nanf(""));
        update(got.span(), scalars_for(Method::adamw));
        update_reference(want.span(), scalars_for(Method::adamw));
        EXPECT_EQ(difference(got, want, c), "");
        for (int k = 0; k < 3; ++k) {
            EXPECT_TRUE(std::isnan(got.value(k, 20)));
            EXPECT_TRUE(std::isfinite(got.value(k, 19)) && std::isfinite(got.value(k, 21)));
        }
    }
}

// Tails, borders of blocks, and what a block's values can be.
TEST_P(Targets, blocks_of_codes) {
    for (const Method method : kMethods) {
        for (const int64_t count : {255, 256, 257, 511, 512, 513, 1000, 4096}) {
            for (const Fill fill : {Fill::ordinary, Fill::edges, Fill::any_finite}) {
                for (const bool out_of_place : {false, true}) {
                    expect_same({.count = count,
                                 .gradient_type = kTypes[count % 3],
                                 .weight_type = kTypes[count / 3 % 3],
                                 .fill = fill,
                                 .seed = static_cast<uint64_t>(count),
                                 .offset = count % 64,
                                 .out_of_place = out_of_place,
                                 .moment_type = MomentType::int8},
                                scalars_for(method));
                }
            }
        }
        for (uint64_t seed = 0; seed < 8; ++seed) {
            expect_same({.count = 1 << 16, .seed = seed, .moment_type = MomentType::int8},
                        scalars_for(method));
        }
    }
}

// Moments around where each code begins, in blocks of that scale: as gradients, of which the
// rule's moment is the gradient itself, or its square.
std::vector<float> gradients_around_codes(Map map, float scale) {
    const bool squared = map == Map::without_sign;
    constexpr int kAround = 64;
    std::vector<float> gradients;
    const auto add = [&](float g) {
        if (gradients.size() % kMomentBlock == 0)
            gradients.push_back(squared ? std::sqrt(scale) : scale);
        gradients.push_back(g);
    };
    for (int code = 1; code < 256; ++code) {
        const float down = share_of(map, static_cast<uint8_t>(code - 1));
        const float middle = down + (share_of(map, static_cast<uint8_t>(code)) - down) / 2;
        float g = squared ? std::sqrt(middle * scale) : middle * scale;
        for (int i = 0; i < kAround; ++i) g = std::nextafter(g, -INFINITY);
        for (int i = 0; i < 2 * kAround; ++i, g = std::nextafter(g, INFINITY)) add(g);
    }
    for (int64_t i = 0; i < 1 << 14; ++i) add(ordinary(random_bits(1, 0, i)) * gradients[0]);
    return gradients;
}

// Blocks whose moments are zero before become these.
TEST_P(Targets, each_code_begins_where_the_reference_says) {
    for (const Map map : {Map::with_sign, Map::without_sign}) {
        std::set<int> codes;
        // The least scale, one below it, and scales whose reciprocal is hardly a float, or none.
        for (const float scale : {1.0f, 0x1.fffffep-1f, 3e-9f, 1e-12f, 1e-13f, 7e29f, 0x1p100f,
                                  0x1.8p101f, 0x1.fffffcp127f}) {
            const std::vector<float> gradients = gradients_around_codes(map, scale);
            const auto count = static_cast<int64_t>(gradients.size());
            const bool v = map == Map::without_sign;
            // m' = g, or v' = g * g
            const Scalars scalars = scalars_of(
                v ? Hyper{.beta1 = 0, .beta2 = 0} : Hyper{.method = Method::sgd, .momentum = 0.5},
                1, 1);
            const Case c{.count = count, .moment_type = MomentType::int8};
            Arrays got(c), want(c);
            for (Arrays* arrays : {&got, &want}) {
                std::memcpy(arrays->gradient().data(), gradients.data(), gradients.size() * 4);
                for (const int k : {1, 2}) {
                    std::memset(arrays->in(k).data(), k == 1 ? 127 : 0, gradients.size());
                    std::memset(arrays->scale_in(k).data(), 0,
                                static_cast<size_t>(arrays->scale_in(k).size()));
                }
            }
            update(got.span(), scalars);
            update_reference(want.span(), scalars);
            EXPECT_EQ(difference(got, want, c), "") << "scale " << scale;
            const unsigned char* found = want.out(v ? 2 : 1).data();
            for (int64_t i = 0; i < count; ++i) codes.insert(found[i]);
        }
        EXPECT_EQ(codes.size(), 256u);
    }
}

TEST_P(Targets, a_block_of_zeros_stays_one) {
    for (const Method method : kMethods) {
        Case c{.count = 600, .moment_type = MomentType::int8};
        c.positive_m = method == Method::adagrad;
        Arrays arrays(c);
        std::memset(arrays.gradient().data(), 0, 600 * 4);
        std::memset(arrays.in(0).data(), 0, 600 * 4);  // of which decay may make a gradient
        const int zero = c.positive_m ? 0 : 127;
        std::memset(arrays.in(1).data(), zero, 600);
        std::memset(arrays.in(2).data(), 0, 600);
        for (int repeat = 0; repeat < 2; ++repeat) update(arrays.span(), scalars_for(method, 0));
        for (int k = 1; k <= moments_of(method); ++k) {
            for (int64_t i = 0; i < 600; ++i) ASSERT_EQ(arrays.value(k, i), 0.0f) << k;
            for (int64_t block = 0; block < 3; ++block)
                EXPECT_EQ(arrays.scale_out(k).get(block), 1e-12f);
        }
        EXPECT_TRUE(arrays.guarded());
    }
}

TEST_P(Targets, what_is_not_finite_makes_its_block_nan_and_no_other) {
    for (const Method method : kMethods) {
        for (const float bad : {std::nanf(""), INFINITY, -INFINITY}) {
            for (const int64_t at : {300, 520}) {  // in a whole block, in the tail
                Case c{.count = 600, .moment_type = MomentType::int8};
                c.positive_m = method == Method::adagrad;
                Arrays got(c), want(c);
                got.gradient().put(at, bad);
                want.gradient().put(at, bad);
                update(got.span(), scalars_for(method));
                update_reference(want.span(), scalars_for(method));
                EXPECT_EQ(difference(got, want, c), "") << name_of(method);
                for (int k = 1; k <= moments_of(method); ++k) {
                    for (int64_t i = 0; i < 600; ++i) {
                        ASSERT_EQ(std::isnan(got.value(k, i)), i / 256 == at / 256);
                    }
                }
            }
        }
    }
}

TEST_P(Targets, every_size_type_and_method) {
    for (const Method method : kMethods) {
        const Scalars scalars = scalars_for(method);
        for (int64_t count = 0; count <= 200; ++count) {
            for (const DType gradient : kTypes) {
                for (const DType weight : kTypes) {
                    expect_same({.count = count,
                                 .gradient_type = gradient,
                                 .weight_type = weight,
                                 .fill = count % 2 ? Fill::edges : Fill::ordinary,
                                 .seed = static_cast<uint64_t>(count)},
                                scalars);
                }
            }
        }
    }
}

TEST_P(Targets, misaligned_views) {
    for (const Method method : kMethods) {
        const Scalars scalars = scalars_for(method);
        for (int64_t offset = 0; offset < 64; ++offset) {
            expect_same({.count = 133,
                         .gradient_type = kTypes[offset % 3],
                         .weight_type = kTypes[offset / 3 % 3],
                         .offset = offset,
                         .out_of_place = offset % 2 == 0},
                        scalars);
        }
    }
}

TEST_P(Targets, absent_weight_and_absent_moment) {
    for (int64_t count = 0; count < 40; ++count) {
        for (const Method method : kMethods) {
            expect_same({.count = count, .with_weight = false}, scalars_for(method));
        }
        const Scalars sgd = scalars_of({.method = Method::sgd, .weight_decay = 0.1}, 1, 1);
        expect_same({.count = count, .with_m = false}, sgd);
        expect_same({.count = count}, sgd);
        const Hyper nesterov{.method = Method::sgd, .momentum = 0.9, .nesterov = true};
        expect_same({.count = count}, scalars_of(nesterov, 1, 1));
    }
}

// Long enough for non-temporal stores, of the weight alone (in place) and of everything, with and
// without the alignment they need.
TEST_P(Targets, long_enough_for_streaming_stores) {
    for (const Method method : kMethods) {
        for (const DType weight : kTypes) {
            for (const int64_t offset : {int64_t{0}, int64_t{4}}) {
                for (const bool out_of_place : {false, true}) {
                    expect_same({.count = (1 << 16) + 77,
                                 .gradient_type = DType::bf16,
                                 .weight_type = weight,
                                 .offset = offset,
                                 .out_of_place = out_of_place},
                                scalars_for(method));
                }
            }
        }
    }
}

TEST_P(Targets, leaf_norms_have_the_tree_of_the_header) {
    for (const DType type : kTypes) {
        for (const int64_t count : {0, 1, 15, 16, 17, 63, 4095, 4096, 4097, 8192, 20000, 36865}) {
            for (const Fill fill : {Fill::ordinary, Fill::edges, Fill::any_finite}) {
                const Case c{.count = count, .gradient_type = type, .fill = fill, .offset = 3};
                Arrays arrays(c);
                const auto leaves = static_cast<size_t>(leaves_of(count));
                std::vector<float> got(leaves + 1, -1), want(leaves + 1, -1);
                leaf_norms(arrays.gradient().data(), type, count, got.data());
                leaf_norms_reference(arrays.gradient().data(), type, count, want.data());
                for (size_t i = 0; i <= leaves; ++i) {
                    EXPECT_TRUE(same_float(got[i], want[i])) << "leaf " << i << " of " << count;
                }
            }
        }
    }
}

TEST_P(Targets, a_gradient_that_is_not_finite_shows_in_its_leaf) {
    const float bad[] = {std::nanf(""), INFINITY, -INFINITY};
    for (const DType type : kTypes) {
        for (const float value : bad) {
            for (const int64_t at : {0, 17, 4096, 9001}) {
                Arrays arrays({.count = 9002, .gradient_type = type, .seed = 3});
                const uint16_t half = type == DType::bf16 ? to_bf16(value) : to_f16(value);
                unsigned char* where = arrays.gradient().data() + at * size_of(type);
                if (type == DType::f32) {
                    std::memcpy(where, &value, 4);
                } else {
                    std::memcpy(where, &half, 2);
                }
                float leaves[3];
                leaf_norms(arrays.gradient().data(), type, 9002, leaves);
                for (int64_t leaf = 0; leaf < 3; ++leaf) {
                    EXPECT_EQ(std::isfinite(leaves[leaf]), leaf != at / kLeaf);
                }
            }
        }
    }
}

TEST_P(Targets, a_nan_gradient_makes_nan_and_touches_no_neighbour) {
    for (const Method method : kMethods) {
        const Case c{.count = 41, .positive_m = method == Method::adagrad};
        Arrays got(c), want(c);
        got.gradient().put(20, std::nanf(""));
        want.gradient().put(20, std::nanf(""));
        update(got.span(), scalars_for(method));
        update_reference(want.span(), scalars_for(method));
        EXPECT_EQ(difference(got, want, c), "") << name_of(method);
        EXPECT_TRUE(std::isnan(got.out(0).get(20))) << name_of(method);
        EXPECT_FALSE(std::isnan(got.out(0).get(19)) || std::isnan(got.out(0).get(21)));
    }
}

// p' and the moments are as ferry/optim.h says, with the reference's bits.
TEST_P(Targets, an_infinite_gradient_does_what_the_header_says) {
    for (const Method method : kMethods) {
        for (const float bad : {INFINITY, -INFINITY}) {
            for (const int64_t at : {5, 40}) {  // in a whole line, in the tail
                const Case c{.count = 41, .positive_m = method == Method::adagrad};
                Arrays got(c), want(c);
                got.gradient().put(at, bad);
                want.gradient().put(at, bad);
                update(got.span(), scalars_for(method));
                update_reference(want.span(), scalars_for(method));
                EXPECT_EQ(difference(got, want, c), "") << name_of(method);
                const float p = got.out(0).get(at);
                if (method == Method::sgd) {
                    EXPECT_EQ(p, -bad);
                } else if (method == Method::lion) {
                    EXPECT_TRUE(std::isfinite(p));
                } else {
                    EXPECT_TRUE(std::isnan(p)) << name_of(method);
                }
                for (int k = 1; k <= moments_of(method); ++k)
                    EXPECT_TRUE(std::isinf(got.out(k).get(at))) << name_of(method) << k;
            }
        }
    }
}

TEST_P(Targets, an_infinite_gradient_is_a_nan_at_a_scale_or_rate_of_zero) {
    for (const Method method : kMethods) {
        const Case c{.count = 41, .positive_m = method == Method::adagrad};
        Arrays no_scale(c), no_rate(c);
        no_scale.gradient().put(7, INFINITY);
        no_rate.gradient().put(7, INFINITY);
        update(no_scale.span(), scalars_for(method, 1e-3, 0));
        update(no_rate.span(), scalars_for(method, 0));
        for (int k = 0; k <= moments_of(method); ++k)
            EXPECT_TRUE(std::isnan(no_scale.out(k).get(7))) << name_of(method) << k;
        EXPECT_EQ(std::isnan(no_rate.out(0).get(7)), method != Method::lion) << name_of(method);
    }
}

// All 2^16 values of a half as gradient; every half-way point and its neighbours as weight.
TEST_P(Targets, every_half_and_every_tie) {
    for (const DType type : {DType::bf16, DType::f16}) {
        std::vector<float> values;
        for (uint32_t half = 0; half < 0x10000; ++half) {
            const auto bits = static_cast<uint16_t>(half);
            const float value = type == DType::bf16 ? from_bf16(bits) : from_f16(bits);
            const auto next = static_cast<uint16_t>(half + 1);
            const float above = type == DType::bf16 ? from_bf16(next) : from_f16(next);
            const float tie = static_cast<float>((static_cast<double>(value) + above) / 2);
            for (const float v :
                 {value, tie, std::nextafter(tie, INFINITY), std::nextafter(tie, -INFINITY)}) {
                values.push_back(v);
            }
        }
        const auto count = static_cast<int64_t>(values.size());
        std::vector<uint16_t> rounded(values.size());
        recast(values.data(), count, type, rounded.data());
        for (size_t i = 0; i < values.size(); ++i) {
            const uint16_t want = type == DType::bf16 ? to_bf16(values[i]) : to_f16(values[i]);
            ASSERT_EQ(rounded[i], want) << std::hexfloat << values[i];
        }
        std::vector<uint16_t> halves(0x10000);
        for (uint32_t i = 0; i < 0x10000; ++i) halves[i] = finite_half(type, i);
        std::vector<float> got(0x10000), want(0x10000);
        const Scalars sgd = scalars_of({.method = Method::sgd, .lr = 1}, 1, 1);
        Span span{.count = 0x10000,
                  .gradient = halves.data(),
                  .gradient_type = type,
                  .p_in = got.data(),
                  .p = got.data()};
        update(span, sgd);
        span.p_in = span.p = want.data();
        update_reference(span, sgd);
        EXPECT_EQ(std::memcmp(got.data(), want.data(), got.size() * 4), 0);
    }
}

TEST_P(Targets, recast_of_every_size) {
    for (const DType type : kTypes) {
        for (int64_t count = 0; count <= 70; ++count) {
            const Case c{.count = count, .weight_type = type, .offset = count % 64};
            Arrays arrays(c);
            recast(arrays.in(0).floats(), count, type, arrays.weight().data());
            for (int64_t i = 0; i < count; ++i) {
                const float p = arrays.in(0).get(i);
                const uint16_t half = type == DType::bf16 ? to_bf16(p) : to_f16(p);
                const void* want = type == DType::f32 ? static_cast<const void*>(&p) : &half;
                EXPECT_EQ(std::memcmp(arrays.weight().data() + i * size_of(type), want,
                                      static_cast<size_t>(size_of(type))),
                          0);
            }
            EXPECT_TRUE(arrays.guarded());
        }
    }
}

// 2^24 random finite bit patterns for each input, and 2^20 of the edges.
TEST_P(Targets, random_bit_patterns) {
    constexpr int64_t kBlock = 1 << 18;
    const Scalars scalars[] = {scalars_for(Method::adamw), scalars_for(Method::adamw, 0.3, 1.0)};
    Spread spread(7);  // the quick run has every type of each
    for (uint64_t block = 0; block < (1 << 24) / kBlock; ++block) {
        if (!spread.takes()) continue;
        expect_same({.count = kBlock,
                     .gradient_type = kTypes[block % 3],
                     .weight_type = kTypes[block / 3 % 3],
                     .fill = Fill::any_finite,
                     .seed = block},
                    scalars[block % 2]);
    }
    const int64_t count = is_quick() ? 1 << 17 : 1 << 20;
    for (const Method method : kMethods) {
        expect_same({.count = count, .fill = Fill::edges, .seed = 99}, scalars_for(method));
        if (method == Method::adamw) continue;
        expect_same({.count = count, .fill = Fill::any_finite, .seed = 98}, scalars_for(method));
    }
}

#if defined(__x86_64__)
// Some library in the process may have switched denormals off. Moments do not notice; a weight
// would only if it were a denormal itself.
TEST_P(Targets, flush_modes_of_the_processor_change_no_moment) {
    for (const Method method : kMethods) {
        for (const Fill fill : {Fill::ordinary, Fill::edges}) {
            const Case c{.count = 10000, .fill = fill};
            Arrays got(c), want(c);
            const unsigned before = __builtin_ia32_stmxcsr();
            __builtin_ia32_ldmxcsr(before | 0x8040u);  // FTZ and DAZ
            update(got.span(), scalars_for(method));
            __builtin_ia32_ldmxcsr(before);
            update_reference(want.span(), scalars_for(method));
            for (int k = fill == Fill::ordinary ? 0 : 1; k < 3; ++k) {
                EXPECT_EQ(std::memcmp(got.out(k).data(), want.out(k).data(), 40000), 0)
                    << name_of(method) << ", "
                    << "pmv"[k];
            }
        }
    }
}
#endif

INSTANTIATE_TEST_SUITE_P(all, Targets, testing::ValuesIn(supported_targets()),
                         [](const auto& one) { return one.param; });

// A processor that has a target must have run the tests above with it.
TEST(Dispatch, no_target_of_this_processor_is_left_out) {
    std::ifstream file("/proc/cpuinfo");
    const std::string text((std::istreambuf_iterator<char>(file)), {});
    const auto has = [&](const char* flag) {
        return text.find(std::string(" ") + flag + " ") != std::string::npos;
    };
    const auto names = supported_targets();
    const std::set<std::string> known(names.begin(), names.end());
#if defined(__x86_64__)
    const auto expect = [&](const char* name, int64_t target, bool is_here) {
        const bool is_compiled = (target & (HWY_DISABLED_TARGETS)) == 0;
        EXPECT_EQ(known.count(name), is_here && is_compiled ? 1u : 0u) << name;
    };
    expect("SSE4", HWY_SSE4, has("sse4_1") && has("aes"));
    expect("AVX2", HWY_AVX2, has("avx2") && has("fma") && has("f16c"));
    expect("AVX3", HWY_AVX3, has("avx512f") && has("avx512bw") && has("avx512vl"));
#endif
    EXPECT_FALSE(known.empty());
    EXPECT_EQ(current_target(), names.front()) << "the best is not the default";
    for (const Method method : kMethods)
        EXPECT_EQ(current_target(method), names.front()) << name_of(method);
}

}  // namespace
}  // namespace ferry::optim
