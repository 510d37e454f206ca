// The fixture of the contract suites of Ops: every implementation, for every type, beside the
// oracle.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "ops/ops.h"
#include "tests/support/matrix.h"
#include "tests/support/mirrored_ops.h"

namespace ferry::ops {

constexpr int kGpu = -1;

struct Implementation {
    const char* name;
    int threads;  // 0: the reference itself; kGpu: the first GPU
};

class OpsContract : public testing::TestWithParam<std::tuple<Implementation, DType>> {
protected:
    void SetUp() override {
        const int threads = std::get<0>(GetParam()).threads;
        std::string why;
        if (threads > 0) team_ = std::make_unique<Team>(threads);
        ops_ = threads == kGpu ? make_mirrored_ops(why)
               : team_         ? make_cpu_ops(*team_)
                               : make_reference_ops();
        if (!ops_) GTEST_SKIP() << why;
    }
    DType type() const { return std::get<1>(GetParam()); }
    Ops& ops() { return *ops_; }
    Ops& oracle() { return *oracle_; }

private:
    std::unique_ptr<Team> team_;
    std::unique_ptr<Ops> ops_, oracle_ = make_reference_ops();
};

inline auto every_implementation_and_type() {
    return testing::Combine(
        testing::Values(Implementation{"reference", 0}, Implementation{"cpu", 1},
                        Implementation{"cpu_two_threads", 2}, Implementation{"cuda", kGpu}),
        testing::Values(DType::f32, DType::bf16, DType::f16));
}

inline std::string name_of_case(const testing::TestParamInfo<OpsContract::ParamType>& info) {
    return std::string(std::get<0>(info.param).name) + "_" +
           std::string(name_of(std::get<1>(info.param)));
}

// Of a rotation: theta^(-2 i / head_dim), theta 10,000.
inline std::vector<double> frequencies_of(int64_t head_dim) {
    std::vector<double> f;
    for (int64_t i = 0; i < head_dim / 2; ++i)
        f.push_back(std::pow(1e4, -2.0 * static_cast<double>(i) / static_cast<double>(head_dim)));
    return f;
}

// Two sequences of five tokens, of two documents and of one.
inline const std::vector<int32_t> kDocumentStarts{0, 0, 2, 2, 2, 0, 0, 0, 0, 0};

}  // namespace ferry::ops
