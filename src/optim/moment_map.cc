#include "moment_map.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>

#include "ferry/error.h"
#include "moment_cells.h"

namespace ferry::optim {
namespace {

const MomentMap& shares_of(Map map) { return map == Map::with_sign ? kWithSign : kWithoutSign; }

// As the header's lines: the oracle.
uint8_t code_of(const MomentMap& map, float share) {
    int code = 0;
    while (code + 1 < kCodes && map.share[code + 1] <= share) ++code;
    if (code + 1 < kCodes && rounds_up(share, map.share[code], map.share[code + 1])) ++code;
    return static_cast<uint8_t>(code);
}

}  // namespace

Map map_of(Method method, int moment) {
    return moment == 1 || method == Method::adagrad ? Map::without_sign : Map::with_sign;
}

float share_of(Map map, uint8_t code) { return shares_of(map).share[code]; }

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
    for (size_t i = 0; i < moments.size(); ++i)
        codes[i] = finite ? code_of(shares_of(map), moments[i] / s) : kNotFinite;
}

template <bool kSigned>
MomentCells<kSigned>::MomentCells() {
    const MomentMap& map = kSigned ? kWithSign : kWithoutSign;
    constexpr int32_t kCell = 1 << kLastBits;
    for (const bool negative : {false, true}) {
        if (negative && !kSigned) break;
        const auto code_at = [&](int32_t bits) {
            const float magnitude = std::bit_cast<float>(std::min(bits, kOne));
            return int32_t{code_of(map, negative ? -magnitude : magnitude)};
        };
        for (int32_t cell = 0; cell < kOfSign; ++cell) {
            const int32_t first = kLeast + cell * kCell;
            const int32_t code = code_at(first), last = code_at(first + kCell - 1);
            FERRY_CHECK(std::abs(last - code) <= 1, "a cell has two codes at most");
            // The least last bits of the other code, by halving.
            int32_t low = 0, high = kCell;
            while (low < high) {
                const int32_t middle = (low + high) / 2;
                if (code_at(first + middle) == code) {
                    low = middle + 1;
                } else {
                    high = middle;
                }
            }
            word[(negative ? kOfSign : 0) + cell] = code << kAtBits | low;
        }
    }
}

const MomentCells<true>& cells_with_sign() {
    static const MomentCells<true> cells;
    return cells;
}

const MomentCells<false>& cells_without_sign() {
    static const MomentCells<false> cells;
    return cells;
}

}  // namespace ferry::optim
