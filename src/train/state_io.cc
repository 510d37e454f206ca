#include "state_io.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>

namespace ferry::train {

using planner::Chunk;

namespace {

constexpr int64_t kPiece = 64 * optim::kLeaf;  // a thread's at a time: 1 MiB of fp32

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
    const StateFormat& kept = plan.state;
    optim::Span span{.count = count, .moment_type = kept.moment_type};
    if (kept.split) {
        span.low_in = reinterpret_cast<const uint16_t*>(in);
        span.low = reinterpret_cast<uint16_t*>(out);
    } else {
        span.p_in = reinterpret_cast<const float*>(in);
        span.p = reinterpret_cast<float*>(out);
    }
    const int64_t m = count * kept.master_bytes(), v = m + count * size_of(kept.moment_type);
    if (kept.moments > 0) span.m_in = in + m, span.m = out + m;
    if (kept.moments > 1) span.v_in = in + v, span.v = out + v;
    return span;
}

int64_t update_bytes(const planner::Plan& plan, int64_t count) {
    return count * planner::update_bytes(plan.state, plan.compute, plan.wire);
}

uint64_t StateIo::initialise(const Fill& fill, float moment) {
    uint64_t frozen = 0;
    for (const Chunk& chunk : plan_.chunks) {
        fill_master(chunk, fill);
        if (!chunk.trainable) frozen = fold(frozen, weight_bytes(chunk));
        store_.put(chunk.weight, weight_bytes(chunk));
        if (!chunk.trainable) continue;
        const optim::Span arrays = state_span(plan_, chunk.count, state_.data(), state_.data());
        fill_moments(arrays.m, chunk.count, moment);
        fill_moments(arrays.v, chunk.count, 0);
        store_.put(chunk.state, state_bytes(chunk));
    }
    return frozen;
}

uint64_t StateIo::restore(const Fill& fill) {
    for (const Chunk& chunk : plan_.chunks) {
        if (!chunk.trainable) continue;
        store_.get(chunk.state, state_bytes(chunk));
        if (plan_.state.split) {  // the weight is half of what is stored
            store_.get(chunk.weight, weight_bytes(chunk));
        } else {
            recast(chunk);
            store_.put(chunk.weight, weight_bytes(chunk));
        }
    }
    // Only now, when all is proved: their slots may be those of an older version of a split master.
    uint64_t frozen = 0;
    for (const Chunk& chunk : plan_.chunks) {
        if (chunk.trainable) continue;
        fill_master(chunk, fill);
        frozen = fold(frozen, weight_bytes(chunk));
        store_.put(chunk.weight, weight_bytes(chunk));
    }
    return frozen;
}

void StateIo::fill_master(const Chunk& chunk, const Fill& fill) {
    const model::Layer& layer = plan_.layers[static_cast<size_t>(chunk.layer)];
    team_.parallel(ceil_div(chunk.count, kPiece), [&](int64_t piece) {
        const int64_t at = piece * kPiece, count = std::min(kPiece, chunk.count - at);
        std::vector<float> p(static_cast<size_t>(count));
        fill(layer, chunk.first + at, p);
        store_master(chunk, at, p);
    });
}

void StateIo::recast(const Chunk& chunk) {
    const auto* p = reinterpret_cast<const float*>(state_.data());
    team_.parallel(ceil_div(chunk.count, kPiece), [&](int64_t piece) {
        const int64_t at = piece * kPiece, count = std::min(kPiece, chunk.count - at);
        optim::recast(p + at, count, plan_.compute, weight_.data() + at * size_of(plan_.compute));
    });
}

void StateIo::store_master(const Chunk& chunk, int64_t at, std::span<const float> p) {
    std::byte* weight = weight_.data() + at * size_of(plan_.compute);
    // A replica is what its owner's weight is.
    if (!plan_.state.split || (!chunk.trainable && !chunk.replica)) {
        optim::recast(p.data(), std::ssize(p), plan_.compute, weight);
        if (chunk.trainable) std::memcpy(state_.data() + at * 4, p.data(), p.size_bytes());
        return;
    }
    auto* weights = reinterpret_cast<uint16_t*>(weight);
    auto* low = reinterpret_cast<uint16_t*>(state_.data()) + at;
    for (size_t i = 0; i < p.size(); ++i) {
        const optim::Halves halves = optim::split(std::bit_cast<uint32_t>(p[i]));
        weights[i] = halves.weight;
        low[i] = halves.low;
    }
}

void StateIo::load_master(int64_t at, std::span<float> p) const {
    if (!plan_.state.split) {
        std::memcpy(p.data(), state_.data() + at * 4, p.size_bytes());
        return;
    }
    const auto* weights = reinterpret_cast<const uint16_t*>(weight_.data()) + at;
    const auto* low = reinterpret_cast<const uint16_t*>(state_.data()) + at;
    for (size_t i = 0; i < p.size(); ++i)
        p[i] = std::bit_cast<float>(optim::join({weights[i], low[i]}));
}

void StateIo::fill_moments(void* array, int64_t count, float value) const {
    if (!array) return;
    if (plan_.state.moment_type == DType::f32)
        std::fill_n(static_cast<float*>(array), count, value);
    else
        std::fill_n(static_cast<uint16_t*>(array), count, to_bf16(value));
}

uint64_t StateIo::hash() {
    uint64_t hash = 0;
    std::array<float, optim::kLeaf> p;
    const auto fold_leaf = [&](const void* array, int64_t leaf, DType type) {
        const auto bytes = static_cast<size_t>(optim::kLeaf * size_of(type));
        const auto* from = static_cast<const std::byte*>(array);
        if (from) hash = fold(hash, {from + static_cast<size_t>(leaf) * bytes, bytes});
    };
    for (const Chunk& chunk : plan_.chunks) {
        if (!plan_.owns(chunk)) continue;
        store_.get(chunk.weight, weight_bytes(chunk));
        if (chunk.trainable) store_.get(chunk.state, state_bytes(chunk));
        const optim::Span arrays = state_span(plan_, chunk.count, state_.data(), state_.data());
        for (int64_t leaf = 0; leaf < chunk.count / optim::kLeaf; ++leaf) {
            if (chunk.trainable) {
                load_master(leaf * optim::kLeaf, p);
                fold_leaf(p.data(), 0, DType::f32);
                fold_leaf(arrays.m, leaf, plan_.state.moment_type);
                fold_leaf(arrays.v, leaf, plan_.state.moment_type);
            }
            fold_leaf(weight_.data(), leaf, plan_.compute);
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
        if (!chunk.trainable || plan_.state.split) store_.get(chunk.weight, weight_bytes(chunk));
        if (!chunk.trainable) return widen(weight_.data(), plan_.compute, chunk.count);
        store_.get(chunk.state, state_bytes(chunk));
        std::vector<float> master(static_cast<size_t>(chunk.count));
        load_master(0, master);
        return master;
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
