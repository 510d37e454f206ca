#include "state_io.h"

#include <algorithm>

namespace ferry::train {

using planner::Chunk;

namespace {

uint64_t fold(uint64_t hash, std::span<const std::byte> bytes) {
    const std::array<uint64_t, 2> pair{hash, checksum(bytes)};
    return checksum(std::as_bytes(std::span(pair)));
}

std::vector<float> widen(const std::byte* values, DType type, int64_t count) {
    std::vector<float> wide(static_cast<size_t>(count));
    const auto* floats = reinterpret_cast<const float*>(values);
    const auto* halves = reinterpret_cast<const uint16_t*>(values);
    for (size_t i = 0; i < wide.size(); ++i) {
        switch (type) {
            case DType::f32:
                wide[i] = floats[i];
                break;
            case DType::bf16:
                wide[i] = from_bf16(halves[i]);
                break;
            case DType::f16:
                wide[i] = from_f16(halves[i]);
                break;
        }
    }
    return wide;
}

}  // namespace

optim::Span state_span(const planner::Plan& plan, int64_t count, const std::byte* in,
                       std::byte* out) {
    const auto* from = reinterpret_cast<const float*>(in);
    auto* to = reinterpret_cast<float*>(out);
    optim::Span span{.count = count, .p_in = from, .p = to};
    if (plan.state_parts > 1) span.m_in = from + count, span.m = to + count;
    if (plan.state_parts > 2) span.v_in = from + 2 * count, span.v = to + 2 * count;
    return span;
}

void StateIo::initialise(const model::Shape& shape, uint32_t seed, float moment) {
    for (const Chunk& chunk : plan_.chunks) {
        const model::Layer& layer = plan_.layers[static_cast<size_t>(chunk.layer)];
        auto* p = reinterpret_cast<float*>(state_.data());
        team_.parallel(chunk.count / optim::kLeaf, [&](int64_t leaf) {
            const int64_t at = leaf * optim::kLeaf;
            model::initialise(shape, layer, seed, chunk.first + at,
                              {p + at, static_cast<size_t>(optim::kLeaf)});
        });
        optim::recast(p, chunk.count, plan_.compute, weight_.data());
        store_.put(chunk.weight, weight_bytes(chunk));
        if (!chunk.trainable) continue;
        for (int64_t part = 1; part < plan_.state_parts; ++part)
            std::fill_n(p + part * chunk.count, chunk.count, part == 1 ? moment : 0.0f);
        store_.put(chunk.state, state_bytes(chunk));
    }
}

uint64_t StateIo::hash() {
    uint64_t hash = 0;
    const auto parts = static_cast<size_t>(plan_.state_parts);
    for (const Chunk& chunk : plan_.chunks) {
        store_.get(chunk.weight, weight_bytes(chunk));
        if (chunk.trainable) store_.get(chunk.state, state_bytes(chunk));
        const size_t leaf_bytes = optim::kLeaf * 4,
                     weight_leaf = optim::kLeaf * static_cast<size_t>(size_of(plan_.compute));
        for (int64_t leaf = 0; leaf < chunk.count / optim::kLeaf; ++leaf) {
            const auto l = static_cast<size_t>(leaf);
            for (size_t part = 0; chunk.trainable && part < parts; ++part) {
                const size_t at =
                    part * static_cast<size_t>(chunk.state_part_bytes()) + l * leaf_bytes;
                hash = fold(hash, state_.subspan(at, leaf_bytes));
            }
            hash = fold(hash, weight_.subspan(l * weight_leaf, weight_leaf));
        }
    }
    return hash;
}

template <class Load>
void StateIo::gather(int64_t layer, int64_t first, std::span<float> out, const Load& load) {
    const int64_t last = first + static_cast<int64_t>(out.size());
    for (const Chunk& chunk : plan_.chunks_of(layer)) {
        const int64_t begin = std::max(first, chunk.first),
                      end = std::min(last, chunk.first + chunk.count);
        if (begin >= end) continue;
        const std::vector<float> values = load(chunk);
        if (values.empty()) continue;
        std::copy(values.begin() + (begin - chunk.first), values.begin() + (end - chunk.first),
                  out.begin() + (begin - first));
    }
}

void StateIo::read(int64_t layer, int64_t first, std::span<float> out) {
    gather(layer, first, out, [&](const Chunk& chunk) {
        if (!chunk.trainable) {
            store_.get(chunk.weight, weight_bytes(chunk));
            return widen(weight_.data(), plan_.compute, chunk.count);
        }
        store_.get(chunk.state, state_bytes(chunk));
        return widen(state_.data(), DType::f32, chunk.count);
    });
}

void StateIo::read_gradient(int64_t layer, int64_t first, std::span<float> out) {
    gather(layer, first, out, [&](const Chunk& chunk) -> std::vector<float> {
        if (!chunk.trainable) return {};
        store_.get(chunk.gradient,
                   state_.first(static_cast<size_t>(chunk.count * size_of(plan_.wire))));
        return widen(state_.data(), plan_.wire, chunk.count);
    });
}

}  // namespace ferry::train
