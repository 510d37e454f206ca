// The OpenBLAS of a program that uses ferry as a library: nobody has set its environment, or
// started the program a second time.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include "better_blas.h"
#include "ops/blas_kernels.h"
#include "ops/ops.h"

namespace ferry::ops {
namespace {

int64_t threads_of_this_process() {
    using std::filesystem::directory_iterator;
    return std::ranges::distance(directory_iterator("/proc/self/task"), directory_iterator());
}

std::vector<float> product() {
    constexpr int64_t kEdge = 96;
    std::vector<float> a(kEdge * kEdge), c(a.size());
    for (size_t i = 0; i < a.size(); ++i) a[i] = 1.0f / static_cast<float>(i % 97 + 1);
    const auto view = [](std::vector<float>& m) {
        return View::of(m.data(), DType::f32, kEdge, kEdge);
    };
    Team team(1);
    make_cpu_ops(team)->gemm({.form = Form::nn, .a = view(a), .b = view(a), .c = view(c)}, nullptr);
    return c;
}

// Ends the process: what is loaded and chosen is so once in a process.
template <class Body>
void in_a_new_process(const Body& body) {
    EXPECT_EXIT(
        {
            body();
            std::_Exit(testing::Test::HasFailure() ? 1 : 0);
        },
        testing::ExitedWithCode(0), "");
}

bool runs(std::string_view core) {
    return std::ranges::any_of(
        blas_cores(), [&](const BlasCore& known) { return known.name == core && known.runs; });
}

class BlasDeathTest : public testing::Test {
protected:
    void SetUp() override {
        GTEST_FLAG_SET(death_test_style, "threadsafe");
        unsetenv("OPENBLAS_CORETYPE");
        if (blas_cores().empty()) GTEST_SKIP() << "kernels are known for x86-64 only";
    }
};

TEST_F(BlasDeathTest, ALibrarysUserGetsTheKernelsThatTheProcessorDeserves) {
    in_a_new_process([] {
        EXPECT_EQ(better_blas_core(), "");
        if (runs("SkylakeX")) {
            EXPECT_THAT(blas_core(), testing::AnyOf("SkylakeX", "Cooperlake", "Sapphirerapids"));
        } else if (runs("Haswell")) {
            EXPECT_THAT(blas_core(), testing::AnyOf("Haswell", "Zen"));
        }
        EXPECT_THAT(library_versions(), testing::HasSubstr(" " + blas_core() + " "));
    });
}

TEST_F(BlasDeathTest, LoadingItStartsNoThreadAndLeavesTheEnvironment) {
    in_a_new_process([] {
        unsetenv("OPENBLAS_NUM_THREADS");
        const int64_t before = threads_of_this_process();
        char** const variables = environ;
        product();
        EXPECT_EQ(threads_of_this_process(), before);
        EXPECT_EQ(environ, variables);
        EXPECT_EQ(std::getenv("OPENBLAS_CORETYPE"), nullptr);
        EXPECT_EQ(std::getenv("OPENBLAS_NUM_THREADS"), nullptr);
    });
}

TEST_F(BlasDeathTest, WhatTheEnvironmentSaysStandsAndIsSaid) {
    setenv("OPENBLAS_CORETYPE", "Nehalem", 1);
    in_a_new_process([] {
        setenv("OPENBLAS_CORETYPE", "Nehalem", 1);
        EXPECT_EQ(blas_core(), "Nehalem");
        if (runs("Haswell")) {
            EXPECT_NE(better_blas_core(), "");
        }
    });
    unsetenv("OPENBLAS_CORETYPE");
}

TEST_F(BlasDeathTest, OtherKernelsCanBeTakenUntilTheirOperationsAreInUse) {
    in_a_new_process([] {
        const std::string first = blas_core();
        const std::vector<float> sums = product();
        EXPECT_FALSE(take_blas_core("no such kernels"));
        EXPECT_EQ(blas_core(), first);
        for (const BlasCore& core : blas_cores()) {
            if (!take_blas_core(core.name)) continue;  // an older OpenBLAS has not got them
            EXPECT_TRUE(core.runs);
            EXPECT_EQ(blas_core(), core.name);
            const std::vector<float> others = product();
            for (size_t i = 0; i < sums.size(); ++i) ASSERT_NEAR(sums[i], others[i], 1e-4);
        }
        ASSERT_TRUE(take_blas_core(first));
        EXPECT_EQ(product(), sums);
        Team team(1);
        const auto ops = make_cpu_ops(team);
        EXPECT_TRUE(take_blas_core(first));
        EXPECT_FALSE(take_blas_core(first == "Haswell" ? "Prescott" : "Haswell"));
        EXPECT_EQ(blas_core(), first);
    });
}

}  // namespace
}  // namespace ferry::ops
