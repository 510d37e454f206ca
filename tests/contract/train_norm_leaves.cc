// The gradient's norm leaves are computed on the device by ops, and on the host by optim: one
// value.
#include <gtest/gtest.h>

#include <bit>

#include "base/random.h"
#include "ferry/optim.h"
#include "ops/ops.h"
#include "tests/support/mirrored_ops.h"

namespace ferry {
namespace {

// Values whose exponents (of 255) lie from `lowest` on, with zeros among them.
std::vector<float> gradients(int64_t count, uint32_t lowest) {
    std::vector<float> values(static_cast<size_t>(count));
    for (size_t i = 0; i < values.size(); ++i) {
        const auto bits = philox({11, Purpose::test}, {static_cast<uint32_t>(i), 0, 0, 0});
        const uint32_t exponent = lowest + bits[1] % 40;
        values[i] =
            i % 97 == 0 ? 0.F : std::bit_cast<float>((bits[0] & 0x807fffffu) | (exponent << 23));
    }
    return values;
}

void compare(ops::Ops& ops, DType wire, int64_t count, uint32_t lowest) {
    const std::vector<float> accumulator = gradients(count, lowest);
    std::vector<std::byte> rounded(static_cast<size_t>(count * 4));
    const auto leaves = static_cast<size_t>(ceil_div(count, optim::kLeaf));
    std::vector<float> device(leaves), host(leaves), simd(leaves);
    ops.round_gradient(accumulator.data(), count, wire, rounded.data(), device.data());
    optim::leaf_norms_reference(rounded.data(), wire, count, host.data());
    optim::leaf_norms(rounded.data(), wire, count, simd.data());
    EXPECT_EQ(device, host) << name_of(wire) << " " << count << " " << lowest;
    EXPECT_EQ(simd, host) << name_of(wire) << " " << count << " " << lowest;
}

TEST(NormLeaves, AreTheSameBitsFromOpsAndOptim) {
    Team team(2);
    const auto fast = ops::make_cpu_ops(team), reference = ops::make_reference_ops();
    std::string no_gpu;
    const auto gpu = ops::make_mirrored_ops(no_gpu);
    for (const DType wire : {DType::f32, DType::bf16, DType::f16}) {
        for (const int64_t count : {int64_t{1}, int64_t{4095}, int64_t{4096}, int64_t{40961}}) {
            for (const uint32_t lowest :
                 {0U, 20U, 50U, 90U}) {  // 67 is 2^-60: below it counts as zero
                compare(*fast, wire, count, lowest);
                compare(*reference, wire, count, lowest);
                if (gpu) compare(*gpu, wire, count, lowest);
            }
        }
    }
}

}  // namespace
}  // namespace ferry
