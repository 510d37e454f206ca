#include "ops/attention_tiles.h"

#include <algorithm>
#include <bit>

namespace ferry::ops {
namespace {

// Tiles begin at multiples of cuDNN's own tiles of keys, so that it pads only the last one.
constexpr int64_t kUnit = 128;
// A strip much longer than the window is mostly pairs that do not see each other. One that is too
// short leaves the GPU idle.
constexpr int64_t kLeastWindowed = 2048;

int64_t power_of_two_from(int64_t least) {
    return static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(least)));
}

}  // namespace

int64_t slope_bytes(int64_t heads, int64_t queries, int64_t keys) {
    return 2 * heads * round_up(queries, 64) * round_up(keys, 128);
}

AttentionTiles::AttentionTiles(const Attention& shape, int64_t most_bytes)
    : shape_(shape), windowed_(shape.window > 0 && shape.window < shape.sequence) {
    const int64_t ratio = shape.heads / shape.kv_heads;
    const auto keys_of = [&](int64_t queries) {
        const int64_t before = windowed_ ? round_up(shape.window, kUnit) : 0;
        return std::min(shape.sequence, queries + before);
    };
    int64_t most = power_of_two_from(shape.sequence);
    if (windowed_) most = std::min(most, std::max(kLeastWindowed, power_of_two_from(shape.window)));
    while (most > kUnit && slope_bytes(ratio, most, keys_of(most)) > most_bytes) most /= 2;
    // All strips of about one length.
    const int64_t count = ceil_div(shape.sequence, most);
    most_queries_ = round_up(ceil_div(shape.sequence, count), kUnit);
    most_keys_ = keys_of(most_queries_);
    const int64_t fit = most_bytes / slope_bytes(ratio, most_queries_, most_keys_);
    for (int64_t n = 1; n <= std::min(fit, shape.kv_heads); ++n)
        if (shape.kv_heads % n == 0) kv_heads_ = n;
    if (!windowed_ && is_one(strips() - 1)) ++most_keys_;
}

AttentionTile AttentionTiles::tile(int64_t strip, int64_t index) const {
    const int64_t query = strip * most_queries_;
    const int64_t queries = std::min(most_queries_, shape_.sequence - query);
    if (windowed_) {
        const int64_t key = round_down(shape_.first_key(query), kUnit);
        return {query, queries, key, query + queries - key, true};
    }
    const bool causal = index == strip;
    const int64_t own = is_one(strip) && index == strip - 1 ? 1 : 0;
    return {query, queries, index * most_queries_, causal ? queries : most_queries_ + own, causal};
}

}  // namespace ferry::ops
