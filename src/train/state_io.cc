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

void StateIo::initialise(const Fill& fill, float moment) {
    constexpr int64_t kPiece = 64 * optim::kLeaf;  // 1 MiB of a file
    for (const Chunk& chunk : plan_.chunks) {
        const model::Layer& layer = plan_.layers[static_cast<size_t>(chunk.layer)];
        auto* p = reinterpret_cast<float*>(state_.data());
        team_.parallel(ceil_div(chunk.count, kPiece), [&](int64_t piece) {
            const int64_t at = piece * kPiece, count = std::min(kPiece, chunk.count - at);
            fill(layer, chunk.first + at, {p + at, static_cast<size_t>(count)});
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
void StateIo::gather(int64_t layer, int64_t first, int64_t count, const Sink& sink,
                     const Load& load) {
    const int64_t last = first + count;
    for (const Chunk& chunk : plan_.chunks_of(layer)) {
        const int64_t begin = std::max(first, chunk.first),
                      end = std::min(last, chunk.first + chunk.count);
        if (begin >= end) continue;
        const std::vector<float> values = load(chunk);
        sink(std::span(values).subspan(static_cast<size_t>(begin - chunk.first),
                                       static_cast<size_t>(end - begin)));
    }
}

void StateIo::read(int64_t layer, int64_t first, int64_t count, const Sink& sink) {
    gather(layer, first, count, sink, [&](const Chunk& chunk) {
        if (!chunk.trainable) {
            store_.get(chunk.weight, weight_bytes(chunk));
            return widen(weight_.data(), plan_.compute, chunk.count);
        }
        store_.get(chunk.state, state_bytes(chunk));
        return widen(state_.data(), DType::f32, chunk.count);
    });
}

void StateIo::read_gradient(int64_t layer, int64_t first, int64_t count, const Sink& sink) {
    gather(layer, first, count, sink, [&](const Chunk& chunk) {
        if (!chunk.trainable) return std::vector<float>(static_cast<size_t>(chunk.count));
        store_.get(chunk.gradient,
                   state_.first(static_cast<size_t>(chunk.count * size_of(plan_.wire))));
        return widen(state_.data(), plan_.wire, chunk.count);
    });
}

}  // namespace ferry::train
