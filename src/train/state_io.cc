#include "state_io.h"

#include <algorithm>
#include <cstring>

#include "ferry/optim.h"

namespace ferry::train {

using planner::Chunk;

namespace {

uint64_t fold(uint64_t hash, std::span<const std::byte> bytes) {
    const std::array<uint64_t, 2> pair{hash, checksum(bytes)};
    return checksum(std::as_bytes(std::span(pair)));
}

}  // namespace

void StateIo::initialise(const model::Shape& shape, uint32_t seed) {
    for (const Chunk& chunk : plan_.chunks) {
        const model::Layer& layer = plan_.layers[static_cast<size_t>(chunk.layer)];
        auto* p = reinterpret_cast<float*>(state_.data());
        team_.parallel(chunk.count / optim::kLeaf, [&](int64_t leaf) {
            const int64_t at = leaf * optim::kLeaf;
            model::initialise(shape, layer, chunk.layer, seed, chunk.first + at,
                              {p + at, static_cast<size_t>(optim::kLeaf)});
        });
        optim::recast(p, chunk.count, plan_.compute, weight_.data());
        store_.put(chunk.weight, weight_bytes(chunk));
        if (!chunk.trainable) continue;
        std::memset(p + chunk.count, 0, static_cast<size_t>(2 * chunk.state_part_bytes()));
        store_.put(chunk.state, state_bytes(chunk));
    }
}

uint64_t StateIo::hash() {
    uint64_t hash = 0;
    for (const Chunk& chunk : plan_.chunks) {
        store_.get(chunk.weight, weight_bytes(chunk));
        if (chunk.trainable) store_.get(chunk.state, state_bytes(chunk));
        const size_t leaf_bytes = optim::kLeaf * 4, weight_leaf = optim::kLeaf * static_cast<size_t>(size_of(plan_.compute));
        for (int64_t leaf = 0; leaf < chunk.count / optim::kLeaf; ++leaf) {
            const auto l = static_cast<size_t>(leaf);
            for (size_t part = 0; chunk.trainable && part < 3; ++part) {
                const size_t at = part * static_cast<size_t>(chunk.state_part_bytes()) + l * leaf_bytes;
                hash = fold(hash, state_.subspan(at, leaf_bytes));
            }
            hash = fold(hash, weight_.subspan(l * weight_leaf, weight_leaf));
        }
    }
    return hash;
}

void StateIo::widen(const Chunk& chunk, std::span<float> out) const {
    if (chunk.trainable || plan_.compute == DType::f32) {
        const auto* p = reinterpret_cast<const float*>(chunk.trainable ? state_.data() : weight_.data());
        std::copy(p, p + chunk.count, out.begin());
        return;
    }
    const auto* bits = reinterpret_cast<const uint16_t*>(weight_.data());
    for (size_t i = 0; i < out.size(); ++i) {
        out[i] = plan_.compute == DType::bf16 ? from_bf16(bits[i]) : from_f16(bits[i]);
    }
}

void StateIo::read(int64_t layer, int64_t first, std::span<float> out) {
    const int64_t last = first + static_cast<int64_t>(out.size());
    std::vector<float> values;
    for (const Chunk& chunk : plan_.chunks_of(layer)) {
        const int64_t begin = std::max(first, chunk.first), end = std::min(last, chunk.first + chunk.count);
        if (begin >= end) continue;
        chunk.trainable ? store_.get(chunk.state, state_bytes(chunk)) : store_.get(chunk.weight, weight_bytes(chunk));
        values.resize(static_cast<size_t>(chunk.count));
        widen(chunk, values);
        std::copy(values.begin() + (begin - chunk.first), values.begin() + (end - chunk.first),
                  out.begin() + (begin - first));
    }
}

}  // namespace ferry::train
