#include "moment_map.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "ferry/error.h"
#include "internal.h"
#include "moment_cells.h"

namespace ferry::optim {
namespace {

const MomentMap& map_for(Map map) { return map == Map::with_sign ? kWithSign : kWithoutSign; }

// The last distance that begins at x or before: the oracle.
int distance_of(const MomentMap& map, float x) {
    const int most = map.first_of(kStretches - 1);
    int d = 0;
    while (d < most && map.begin[d + 1] <= x) ++d;
    return d;
}

uint8_t code_of(const MomentMap& map, float moment, float reciprocal) {
    const int d = distance_of(map, std::fma(std::fabs(moment), reciprocal, kShareShift));
    const bool below = map.has_sign && std::signbit(moment);
    const int code = below ? map.zero() - d : map.zero() + d;
    return static_cast<uint8_t>(std::max(code, 0));
}

}  // namespace

Map map_of(Method method, int moment) {
    return moment == 1 || method == Method::adagrad ? Map::without_sign : Map::with_sign;
}

float share_of(Map map, uint8_t code) { return map_for(map).share[code]; }

float moment_of(Map map, uint8_t code, float scale) {
    const MomentMap& of = map_for(map);
    const int d = code - of.zero(), distance = std::abs(d);
    int stretch = 0;
    while (of.first_of(stretch + 1) <= distance) ++stretch;
    const auto place = static_cast<float>(of.has_sign ? 4 * d : d + 1);
    const float base = std::copysign(of.base[stretch] * scale, d < 0 ? -1.0f : 1.0f);
    const float moment = std::fma(place, of.rise[stretch] * scale, -base);
    return !of.has_sign && code == 0 ? moment + kLeastSquare : moment;
}

void encode_block(Map map, std::span<const float> moments, uint8_t* codes, float* scale) {
    float largest = 0;
    bool finite = true;
    for (const float moment : moments) {
        finite = finite && std::isfinite(moment);
        largest = std::max(largest, std::fabs(moment));
    }
    const float s =
        finite ? std::max(largest, kLeastScale) : std::numeric_limits<float>::quiet_NaN();
    std::memcpy(scale, &s, sizeof(s));
    const float shrink = s > kLargeScale ? kShrink : 1.0f, reciprocal = 1 / (s * shrink);
    for (size_t i = 0; i < moments.size(); ++i)
        codes[i] = finite ? code_of(map_for(map), moments[i] * shrink, reciprocal) : kNotFinite;
}

template <bool kSigned>
MomentCells<kSigned>::MomentCells() {
    const MomentMap& map = kSigned ? kWithSign : kWithoutSign;
    constexpr int32_t kCell = 1 << kLastBits;
    const auto distance_at = [&](int32_t bits) {
        return distance_of(map, std::bit_cast<float>(bits));
    };
    for (int32_t cell = 0; cell < kCount; ++cell) {
        const int32_t first = kLeast + cell * kCell;
        const int32_t d = distance_at(first), last = distance_at(first + kCell - 1);
        FERRY_CHECK(last - d <= 1, "a cell has two codes at most");
        // The least last bits of the other code, by halving.
        int32_t low = 0, high = kCell;
        while (low < high) {
            const int32_t middle = (low + high) / 2;
            if (distance_at(first + middle) == d) {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        word[cell] = d << kAtBits | low;
    }
}

const MomentCells<true>& cells_with_sign() {
    static const MomentCells<true> kCells;
    return kCells;
}

const MomentCells<false>& cells_without_sign() {
    static const MomentCells<false> kCells;
    return kCells;
}

}  // namespace ferry::optim
