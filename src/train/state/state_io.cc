#include "state_io.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <numeric>
#include <utility>

#include "base/checksum.h"

namespace ferry::train {

using planner::Chunk;

namespace {

constexpr int64_t kPartMost = 64 * optim::kLeaf;  // a thread's at a time: 1 MiB of fp32
// By all threads, where it is read from files, and where it is given to a checkpoint.
constexpr int64_t kFilledAtOnce = 512 * optim::kLeaf, kGivenAtOnce = 256 * optim::kLeaf;

uint64_t fold(uint64_t hash, uint64_t sum) {
    const std::array<uint64_t, 2> pair{hash, sum};
    return checksum(std::as_bytes(std::span(pair)));
}
uint64_t fold(uint64_t hash, std::span<const std::byte> bytes) {
    return fold(hash, checksum(bytes));
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

// Another rank's shard is none of it.
bool is_frozen(const Chunk& chunk) { return !chunk.trainable && !chunk.replica; }

// The moments in a chunk's state; null: `what` is none of them.
void* moments_in(const optim::Span& state, StateArray::What what) {
    switch (what) {
        case StateArray::What::first_moment:
            return state.m;
        case StateArray::What::first_scale:
            return state.m_scale;
        case StateArray::What::second_moment:
            return state.v;
        case StateArray::What::second_scale:
            return state.v_scale;
        case StateArray::What::weight:
        case StateArray::What::master:
        case StateArray::What::error:
        case StateArray::What::owner_error:
        case StateArray::What::alone:
        case StateArray::What::moved:
            break;
    }
    return nullptr;
}

}  // namespace

std::vector<StateIo::Staging> StateIo::staging_of(const planner::Plan& plan,
                                                  std::span<std::byte> arena) {
    const auto& states = plan.buffers[static_cast<size_t>(planner::Class::state_staging)];
    const auto& weights = plan.buffers[static_cast<size_t>(planner::Class::weight_staging)];
    const auto buffer = [&](const planner::Buffers& b, int64_t index) {
        return arena.subspan(static_cast<size_t>(b.offset + index * b.bytes),
                             static_cast<size_t>(b.bytes));
    };
    std::vector<Staging> staging;
    for (int64_t i = 0; i < std::min(states.count, weights.count); ++i)
        staging.push_back({buffer(states, i), buffer(weights, i)});
    return staging;
}

StateIo::Staging StateIo::place_of(const Chunk& chunk, const Staging& staging) {
    Staging place{.state = {}, .weight = store_.in_host(chunk.weight)};
    if (place.weight.empty())
        place.weight =
            staging.weight.first(static_cast<size_t>(chunk.count * size_of(plan_.compute)));
    if (!chunk.trainable) return place;
    place.state = store_.in_host(chunk.state);
    if (place.state.empty())
        place.state = staging.state.first(static_cast<size_t>(planner::state_bytes(chunk)));
    return place;
}

StateIo::Staging StateIo::brought(const Chunk& chunk, bool state, bool weight) {
    const Staging place = place_of(chunk, staging_[0]);
    if (weight && store_.in_host(chunk.weight).empty()) store_.get(chunk.weight, place.weight);
    if (state && store_.in_host(chunk.state).empty()) store_.get(chunk.state, place.state);
    return place;
}

int64_t StateIo::bytes() const {
    int64_t all = 0;
    for (const Chunk& chunk : plan_.chunks) all += bytes_of(chunk);
    return all;
}

int64_t StateIo::bytes_of(const Chunk& chunk) const {
    return chunk.count * size_of(plan_.compute) +
           (chunk.trainable ? planner::state_bytes(chunk) : 0);
}

bool StateIo::lies_in_host(const Chunk& chunk) const {
    return !store_.in_host(chunk.weight).empty() &&
           (!chunk.trainable || !store_.in_host(chunk.state).empty());
}

bool StateIo::lies_on(swap::Tier tier, const Chunk& chunk) const {
    const auto there = [&](swap::ObjectId object) { return plan_.objects[object].home == tier; };
    return there(chunk.weight) || (chunk.trainable && there(chunk.state));
}

int64_t StateIo::begin_put(const Chunk& chunk, const Staging& from) {
    const bool weight = store_.in_host(chunk.weight).empty();
    const bool state = chunk.trainable && store_.in_host(chunk.state).empty();
    if (weight) store_.begin_put(chunk.weight, from.weight);
    if (state) store_.begin_put(chunk.state, from.state);
    return int64_t{weight} + int64_t{state};
}

template <class Body>
void StateIo::in_parts(Team& team, int64_t first, int64_t count, const Body& body) {
    const int64_t share = round_up(ceil_div(count, int64_t{2} * team.threads()), optim::kLeaf);
    const int64_t part = std::min(share, kPartMost);
    team.parallel(ceil_div(count, part), [&](int64_t index) {
        body(first + index * part, std::min(part, count - index * part));
    });
}

std::vector<StateIo::ChunkRun> StateIo::parts_of(std::span<const size_t> turns) const {
    std::vector<ChunkRun> parts;
    for (const size_t index : turns) {
        const Chunk& chunk = plan_.chunks[index];
        for (int64_t at = 0; at < chunk.count; at += kFilledAtOnce)
            parts.push_back({&chunk, at, std::min(kFilledAtOnce, chunk.count - at)});
    }
    return parts;
}

// Beside each chunk that a drive takes, its share of the others: the drives write all the time.
// Among both those that the device takes come first, as page-locking waits for the last copy to it.
std::vector<size_t> StateIo::in_turns() const {
    std::vector<size_t> stored, kept, turns;
    for (const bool on_device : {true, false}) {
        for (size_t i = 0; i < plan_.chunks.size(); ++i) {
            const Chunk& chunk = plan_.chunks[i];
            if (lies_on(swap::Tier::device, chunk) != on_device) continue;
            (lies_on(swap::Tier::nvme, chunk) ? stored : kept).push_back(i);
        }
    }
    auto next = kept.begin();
    for (size_t i = 0; i < stored.size(); ++i) {
        turns.push_back(stored[i]);
        const auto until =
            kept.begin() + std::ssize(kept) * static_cast<int64_t>(i + 1) / std::ssize(stored);
        turns.insert(turns.end(), next, until);
        next = until;
    }
    turns.insert(turns.end(), next, kept.end());
    return turns;
}

StateIo::FirstMoment StateIo::first_moment_of(const optim::Hyper& hyper) {
    return {optim::initial_moment(hyper), optim::map_of(hyper.method, 0)};
}

uint64_t StateIo::initialise(const Contents& contents, const Watch& watch, StartUp& start_up) {
    std::vector<uint64_t> sums(plan_.chunks.size());  // hashes of the frozen chunks
    std::vector<int64_t> begun(staging_.size());      // puts from each, the last time
    int64_t filled = 0;
    const int64_t all = bytes();
    size_t turn = 0;
    auto to_copy = std::ranges::count_if(
        plan_.chunks, [&](const Chunk& chunk) { return lies_on(swap::Tier::device, chunk); });
    if (to_copy == 0) watch.copied();
    const std::vector<size_t> turns = in_turns();
    const std::vector<ChunkRun> parts = parts_of(turns);
    auto part = parts.begin();
    if (contents.begin) contents.begin(parts);
    for (const size_t index : turns) {
        const Chunk& chunk = plan_.chunks[index];
        const bool put = !lies_in_host(chunk);
        if (put) {
            turn = (turn + 1) % staging_.size();
            begun[turn] = 0;
            store_.end_puts(std::accumulate(begun.begin(), begun.end(), int64_t{0}));
        }
        const Staging place = place_of(chunk, staging_[turn]);
        watch.before_filled(place.state);
        watch.before_filled(place.weight);
        for (; part != parts.end() && part->chunk == &chunk; ++part) {
            if (contents.next) contents.next();
            in_parts(part->at, part->count, [&](int64_t at, int64_t count) {
                fill_part(chunk, place, at, count, contents);
            });
        }
        if (is_frozen(chunk)) sums[index] = checksum(place.weight);
        if (put) begun[turn] = begin_put(chunk, place);
        if (lies_on(swap::Tier::device, chunk) && --to_copy == 0) watch.copied();
        start_up.at("first contents", filled += bytes_of(chunk), all);
    }
    store_.end_puts(0);
    uint64_t frozen = 0;
    for (size_t i = 0; i < sums.size(); ++i)
        if (is_frozen(plan_.chunks[i])) frozen = fold(frozen, sums[i]);
    return frozen;
}

std::optional<uint64_t> StateIo::restore(const Fill& fill, const std::function<bool()>& proved) {
    for (const Chunk& chunk : plan_.chunks) {
        if (!chunk.trainable) continue;
        const Staging place = brought(chunk, true, plan_.state.split);
        if (plan_.state.split) continue;  // the weight is half of what is stored
        const auto* p = reinterpret_cast<const float*>(place.state.data());
        in_parts(0, chunk.count, [&](int64_t at, int64_t count) {
            optim::recast(p + at, count, plan_.compute,
                          place.weight.data() + at * size_of(plan_.compute));
        });
        if (store_.in_host(chunk.weight).empty()) store_.put(chunk.weight, place.weight);
    }
    // Only now, when all is proved: their slots may be those of an older version of a split master.
    if (!proved()) return {};
    uint64_t frozen = 0;
    for (const Chunk& chunk : plan_.chunks) {
        if (!is_frozen(chunk)) continue;
        const Staging place = place_of(chunk, staging_[0]);
        in_parts(0, chunk.count,
                 [&](int64_t at, int64_t count) { fill_part(chunk, place, at, count, {fill}); });
        frozen = fold(frozen, place.weight);
        begin_put(chunk, place);
        store_.end_puts(0);
    }
    return frozen;
}

void StateIo::restore_replicas(const Share& share) {
    for (int64_t layer = 0; layer < std::ssize(plan_.layers); ++layer) {
        for (const model::Segment& segment : plan_.layers[static_cast<size_t>(layer)].segments) {
            if (!segment.trainable) continue;
            int64_t at = segment.offset;
            share(
                layer, {segment.offset, segment.count},
                [&](const zero::Run& run, const Sink& to) {
                    read(layer, run.first, run.count, to);
                },
                [&](std::span<const float> master) {
                    take_replicas(layer, at, master);
                    at += std::ssize(master);
                });
        }
    }
}

void StateIo::take_replicas(int64_t layer, int64_t first, std::span<const float> master) {
    const int64_t last = first + std::ssize(master);
    for (const Chunk& chunk : plan_.chunks_of(layer)) {
        const int64_t end_of_chunk = chunk.first + chunk.count;
        const int64_t begin = std::max(first, chunk.first), end = std::min(last, end_of_chunk);
        if (!chunk.replica || begin >= end) continue;
        const Staging place = place_of(chunk, staging_[0]);
        cast(master.subspan(static_cast<size_t>(begin - first), static_cast<size_t>(end - begin)),
             place.weight.data() + (begin - chunk.first) * size_of(plan_.compute));
        if (end < end_of_chunk) continue;  // no other chunk takes the staging memory before
        begin_put(chunk, place);
        store_.end_puts(0);
    }
}

void StateIo::cast(std::span<const float> master, std::byte* weights) const {
    if (!plan_.state.split)
        return optim::recast(master.data(), std::ssize(master), plan_.compute, weights);
    auto* const halves = reinterpret_cast<uint16_t*>(weights);
    for (size_t i = 0; i < master.size(); ++i)
        halves[i] = optim::split(plan_.compute, master[i]).weight;
}

void StateIo::fill_part(const Chunk& chunk, const Staging& to, int64_t at, int64_t count,
                        const Contents& contents) const {
    const model::Layer& layer = plan_.layers[static_cast<size_t>(chunk.layer)];
    std::byte* weight = to.weight.data() + at * size_of(plan_.compute);
    const bool in_place = chunk.trainable && !plan_.state.split;
    std::vector<float> made(in_place ? 0 : static_cast<size_t>(count));
    const std::span<float> p = in_place ? std::span(reinterpret_cast<float*>(to.state.data()) + at,
                                                    static_cast<size_t>(count))
                                        : std::span(made);
    contents.master(layer, chunk.first + at, p);
    // A replica is what its owner's weight is.
    if (!plan_.state.split || (!chunk.trainable && !chunk.replica)) {
        optim::recast(p.data(), count, plan_.compute, weight);
    } else {
        auto* weights = reinterpret_cast<uint16_t*>(weight);
        auto* low = chunk.trainable ? reinterpret_cast<uint16_t*>(to.state.data()) + at : nullptr;
        for (size_t i = 0; i < p.size(); ++i) {
            const optim::Halves halves = optim::split(plan_.compute, p[i]);
            weights[i] = halves.weight;
            if (low) low[i] = halves.low;
        }
    }
    if (!chunk.trainable) return;
    const MomentType type = chunk.format.moment_type;
    const optim::Span arrays =
        state_span(chunk.format, chunk.count, to.state.data(), to.state.data());
    fill_moments(arrays.m, arrays.m_scale, type, at, count, contents.first_moment);
    fill_moments(arrays.v, arrays.v_scale, type, at, count, {0, optim::Map::without_sign});
    if (contents.moments) read_moments(chunk, to, at, count, contents);
}

void StateIo::read_moments(const Chunk& chunk, const Staging& to, int64_t at, int64_t count,
                           const Contents& contents) const {
    const optim::Span state =
        state_span(chunk.format, chunk.count, to.state.data(), to.state.data());
    const model::Layer& layer = plan_.layers[static_cast<size_t>(chunk.layer)];
    for (const StateArray& array : state_arrays(chunk.format, plan_.compute, true)) {
        auto* const data = static_cast<std::byte*>(moments_in(state, array.what));
        if (data)
            contents.moments(
                layer, array, chunk.first + at,
                {data + array.width.of(at), static_cast<size_t>(array.width.of(count))});
    }
}

void StateIo::load_master(const Staging& from, int64_t at, std::span<float> p) const {
    if (!plan_.state.split) {
        std::memcpy(p.data(), from.state.data() + at * 4, p.size_bytes());
        return;
    }
    const auto* weights = reinterpret_cast<const uint16_t*>(from.weight.data()) + at;
    const auto* low = reinterpret_cast<const uint16_t*>(from.state.data()) + at;
    for (size_t i = 0; i < p.size(); ++i) p[i] = optim::join(plan_.compute, {weights[i], low[i]});
}

void StateIo::fill_moments(void* array, float* scales, MomentType type, int64_t at, int64_t count,
                           const FirstMoment& moment) {
    if (!array) return;
    switch (type) {
        case MomentType::f32:
            std::fill_n(static_cast<float*>(array) + at, count, moment.value);
            return;
        case MomentType::bf16:
            std::fill_n(static_cast<uint16_t*>(array) + at, count, to_bf16(moment.value));
            return;
        case MomentType::int8:
            break;
    }
    uint8_t code = 0;
    float scale = 0;
    optim::encode_block(moment.map, {&moment.value, 1}, &code, &scale);
    std::fill_n(static_cast<uint8_t*>(array) + at, count, code);
    std::fill_n(scales + at / kMomentBlock, count / kMomentBlock, scale);
}

uint64_t StateIo::hash() {
    constexpr size_t kArrays = 6;  // a leaf's: master, moments, their scales, compute weight
    uint64_t hash = 0;
    std::vector<std::array<uint64_t, kArrays>> sums;
    for (const Chunk& chunk : plan_.chunks) {
        if (!plan_.owns(chunk)) continue;
        const Staging place = brought(chunk, chunk.trainable, true);
        const optim::Span arrays =
            state_span(chunk.format, chunk.count, place.state.data(), place.state.data());
        sums.assign(static_cast<size_t>(chunk.count / optim::kLeaf), {});
        in_parts(0, chunk.count, [&](int64_t at, int64_t count) {
            std::array<float, optim::kLeaf> p;
            const auto sum_of = [](const void* array, int64_t leaf, int64_t leaf_bytes) {
                const auto* from = static_cast<const std::byte*>(array) + leaf * leaf_bytes;
                return checksum({from, static_cast<size_t>(leaf_bytes)});
            };
            const MomentType type = chunk.format.moment_type;
            const int64_t moments = optim::kLeaf * size_of(type),
                          scales = scale_bytes(type, optim::kLeaf);
            for (int64_t leaf = at / optim::kLeaf; leaf < (at + count) / optim::kLeaf; ++leaf) {
                auto& of_leaf = sums[static_cast<size_t>(leaf)];
                if (chunk.trainable) {
                    load_master(place, leaf * optim::kLeaf, p);
                    of_leaf[0] = sum_of(p.data(), 0, optim::kLeaf * 4);
                    if (arrays.m) of_leaf[1] = sum_of(arrays.m, leaf, moments);
                    if (arrays.v) of_leaf[2] = sum_of(arrays.v, leaf, moments);
                    if (arrays.m_scale) of_leaf[3] = sum_of(arrays.m_scale, leaf, scales);
                    if (arrays.v_scale) of_leaf[4] = sum_of(arrays.v_scale, leaf, scales);
                }
                of_leaf[5] =
                    sum_of(place.weight.data(), leaf, optim::kLeaf * size_of(plan_.compute));
            }
        });
        const auto kept = [&](const void* array) { return chunk.trainable && array != nullptr; };
        const std::array<bool, kArrays> there{chunk.trainable,      kept(arrays.m),
                                              kept(arrays.v),       kept(arrays.m_scale),
                                              kept(arrays.v_scale), true};
        for (const auto& of_leaf : sums) {
            for (size_t k = 0; k < kArrays; ++k)
                if (there[k]) hash = fold(hash, of_leaf[k]);
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
        const Staging place =
            brought(chunk, chunk.trainable, !chunk.trainable || plan_.state.split);
        if (!chunk.trainable) return widen(place.weight.data(), plan_.compute, chunk.count);
        std::vector<float> master(static_cast<size_t>(chunk.count));
        load_master(place, 0, master);
        return master;
    });
}

void StateIo::rewrite_weight(const Chunk& chunk,
                             const std::function<void(const optim::Span&)>& write) {
    const Staging place = brought(chunk, true, false);
    optim::Span span =
        state_span(chunk.format, chunk.count, place.state.data(), place.state.data());
    span.weight = place.weight.data();
    span.weight_type = plan_.compute;
    span.layer = static_cast<uint32_t>(chunk.layer);
    span.element = chunk.first;
    write(span);
    if (store_.in_host(chunk.weight).empty()) store_.put(chunk.weight, place.weight);
}

void StateIo::read_arrays(int64_t layer, int64_t first, int64_t count, const ArraySink& sink) {
    const int64_t last = first + count;
    for (const Chunk& chunk : plan_.chunks_of(layer)) {
        const int64_t begin = std::max(first, chunk.first) - chunk.first,
                      end = std::min(last, chunk.first + chunk.count) - chunk.first;
        if (begin >= end) continue;
        FERRY_CHECK(chunk.trainable || !chunk.replica, "the state of another rank's chunk");
        const Staging place = held(chunk);
        for (int64_t at = begin; at < end; at += kGivenAtOnce)
            give_arrays(chunk, place, at, std::min(kGivenAtOnce, end - at), sink);
    }
}

StateIo::Staging StateIo::held(const Chunk& chunk) {
    if (held_ == &chunk) return held_place_;
    if (passing_ && chunk.trainable) {
        const UpdatedChunks::UpdatedBytes place = passing_->take(chunk);
        // Its update failed, which the store tells; a later chunk's came through before that.
        if (place.state.empty()) throw PassingState::Closed();
        held_place_ = {.state = place.state, .weight = place.weight};
    } else {
        held_place_ = brought(chunk, chunk.trainable, !chunk.trainable || plan_.state.split);
    }
    held_ = &chunk;
    return held_place_;
}

void StateIo::give_arrays(const Chunk& chunk, const Staging& from, int64_t at, int64_t count,
                          const ArraySink& sink) {
    const optim::Span state =
        state_span(chunk.format, chunk.count, from.state.data(), from.state.data());
    const int64_t width = size_of(plan_.compute);
    const bool casts = chunk.trainable && !plan_.state.split;
    if (chunk.trainable && plan_.state.split) {
        master_.resize(static_cast<size_t>(count));
        in_parts(*arrays_team_, at, count, [&](int64_t first, int64_t elements) {
            load_master(from, first,
                        std::span(master_).subspan(static_cast<size_t>(first - at),
                                                   static_cast<size_t>(elements)));
        });
    }
    const float* const master =
        casts ? reinterpret_cast<const float*>(from.state.data()) + at : master_.data();
    const auto weight = [&]() -> const std::byte* {
        if (!casts) return from.weight.data() + at * width;
        cast_.resize(static_cast<size_t>(count * width));
        in_parts(*arrays_team_, 0, count, [&](int64_t first, int64_t elements) {
            optim::recast(master + first, elements, plan_.compute, cast_.data() + first * width);
        });
        return cast_.data();
    };
    const auto stored = [&](const StateArray& array) {
        if (array.what == StateArray::What::weight) return weight();
        if (array.what == StateArray::What::master)
            return reinterpret_cast<const std::byte*>(master);
        const auto* const all = static_cast<const std::byte*>(moments_in(state, array.what));
        return all + array.width.of(at);
    };
    std::vector<std::span<const std::byte>> arrays;
    for (const StateArray& array : state_arrays(chunk.format, plan_.compute, chunk.trainable))
        arrays.emplace_back(stored(array), static_cast<size_t>(array.width.of(count)));
    sink(arrays);
}

void StateIo::read_gradient(int64_t layer, int64_t first, int64_t count, const Sink& sink) {
    gather(layer, first, count, sink, [&](const Chunk& chunk) {
        if (!chunk.trainable) return std::vector<float>(static_cast<size_t>(chunk.count));
        const auto bytes = static_cast<size_t>(chunk.count * size_of(plan_.wire));
        const std::span<std::byte> gradient = staging_[0].state.first(bytes);
        store_.get(chunk.gradient, gradient);
        return widen(gradient.data(), plan_.wire, chunk.count);
    });
}

}  // namespace ferry::train
