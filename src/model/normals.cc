// Logarithm and cosine of a vector library differ from the C library's in the last bits of a
// double. Rounded to float both are the same, except for a few in ten million whose double lies
// next to the middle of two floats. The C library computes those (Ziv, "Fast evaluation of
// elementary mathematical functions with correctly rounded last bit", 1991).
#include "base/simd_targets.h"
//
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "model/normals.cc"
#include "hwy/foreach_target.h"
//
#include "base/philox-inl.h"
#include "hwy/contrib/math/math-inl.h"
#include "hwy/highway.h"
//
#include <numbers>

#include "model/model.h"
#include "normals.h"

HWY_BEFORE_NAMESPACE();
namespace ferry::model::HWY_NAMESPACE {
using ferry::HWY_NAMESPACE::philox;
namespace hn = hwy::HWY_NAMESPACE;

using Wide = hn::ScalableTag<uint64_t>;
using Real = hn::ScalableTag<double>;
using VW = hn::Vec<Wide>;
using VR = hn::Vec<Real>;

// Exact, of values below 2^52.
HWY_INLINE VR to_double(VW value) {
    const Wide wide;
    const Real real;
    const VW exponent = hn::Set(wide, 0x4330000000000000u);  // of 2^52
    return hn::Sub(hn::BitCast(real, hn::Or(value, exponent)), hn::Set(real, 0x1p52));
}

void PhiloxNormals(PhiloxKey key, uint64_t site, uint64_t first, float* out, int64_t count) {
    const Wide wide;
    const Real real;
    const hn::Rebind<float, Real> narrow;
    const auto lanes = static_cast<int64_t>(hn::Lanes(wide));
    const auto alone = [&](int64_t i) {
        const uint64_t element = first + static_cast<uint64_t>(i);
        return philox_normal(
            key, {static_cast<uint32_t>(element >> 32), static_cast<uint32_t>(site >> 32),
                  static_cast<uint32_t>(site), static_cast<uint32_t>(element)});
    };
    const VW low = hn::Set(wide, 0xffffffffu);
    int64_t i = 0;
    for (; i + lanes <= count; i += lanes) {
        const VW element =
            hn::Add(hn::Set(wide, first + static_cast<uint64_t>(i)), hn::Iota(wide, 0));
        VW w0 = hn::ShiftRight<32>(element), w1 = hn::Set(wide, site >> 32);
        VW w2 = hn::Set(wide, site), w3 = element;
        philox(key, w0, w1, w2, w3);
        // As philox_normal() has it: every step but the two functions is exact or rounds alike.
        const VR high = hn::Mul(to_double(hn::And(w0, low)), hn::Set(real, 0x1p21));
        const VR number = hn::Add(high, to_double(hn::ShiftRight<11>(hn::And(w1, low))));
        const VR u = hn::Mul(hn::Add(number, hn::Set(real, 0.5)), hn::Set(real, 0x1p-53));
        const VR turn = hn::Mul(to_double(hn::And(w2, low)), hn::Set(real, 0x1p-32));
        const VR radius = hn::Sqrt(hn::Mul(hn::Set(real, -2), hn::Log(real, u)));
        const VR angle = hn::Mul(hn::Set(real, 2 * std::numbers::pi), turn);
        const VR normal = hn::Mul(radius, hn::Cos(real, angle));
        // A hundred times what both functions are off by, in all.
        const VR off = hn::Mul(radius, hn::Set(real, 1e-13));
        const auto least = hn::DemoteTo(narrow, hn::Sub(normal, off));
        const auto most = hn::DemoteTo(narrow, hn::Add(normal, off));
        hn::StoreU(least, narrow, out + i);
        // Near 1 the logarithm is small: what it is off by then, nobody has to know.
        const auto sure = hn::Gt(hn::DemoteTo(narrow, radius), hn::Set(narrow, 1e-4F));
        if (hn::AllTrue(narrow, hn::And(hn::Eq(least, most), sure))) continue;
        for (int64_t lane = i; lane < i + lanes; ++lane) out[lane] = alone(lane);
    }
    for (; i < count; ++i) out[i] = alone(i);
}

}  // namespace ferry::model::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ferry::model {

HWY_EXPORT(PhiloxNormals);
void philox_normals(PhiloxKey key, uint64_t site, uint64_t first, std::span<float> out) {
    HWY_DYNAMIC_DISPATCH(PhiloxNormals)
    (key, site, first, out.data(), static_cast<int64_t>(out.size()));
}

}  // namespace ferry::model
#endif
