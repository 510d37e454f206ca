#include "momentum_io.h"

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "base/checksum.h"

namespace ferry::train {

using planner::Chunk;

namespace {

constexpr comm::Topic kErrors{.of = "errors of momentum's codes"};

std::span<const std::byte> bytes_of(const float* values, int64_t count) {
    return std::as_bytes(std::span(values, static_cast<size_t>(count)));
}

// Appends an array's part to where one is gathered.
void append(std::vector<float>& values, std::span<const std::byte> part) {
    const auto* floats = reinterpret_cast<const float*>(part.data());
    values.insert(values.end(), floats, floats + part.size() / sizeof(float));
}

}  // namespace

MomentumIo::MomentumIo(const planner::Plan& plan, swap::Store& store, comm::Communicator& ranks,
                       Executor& executor, std::span<std::byte> arena)
    : plan_(plan), store_(store), ranks_(ranks), executor_(executor) {
    const auto& buffers = plan.buffers[static_cast<size_t>(planner::Class::feedback_staging)];
    if (buffers.count > 0)
        staging_ =
            arena.subspan(static_cast<size_t>(buffers.offset), static_cast<size_t>(buffers.bytes));
}

MomentumIo::Turn MomentumIo::turn_of(const Chunk& chunk) const {
    const model::Layer& layer = plan_.layers[static_cast<size_t>(chunk.layer)];
    const model::Segment& segment = zero::segment_of(layer, chunk.first);
    return {chunk, layer, segment, chunk.first - plan_.partition.shard(segment, chunk.owner).first};
}

template <class Body>
void MomentumIo::each_turn(const Body& body) {
    for (const Chunk& chunk : plan_.chunks)
        if (chunk.feedback != swap::kNoObject) body(turn_of(chunk));
}

zero::Feedback MomentumIo::feedback_in(const Chunk& chunk, std::span<std::byte> memory) const {
    return {reinterpret_cast<float*>(memory.data()), chunk.count, plan_.partition.ranks};
}

zero::Feedback MomentumIo::brought(const Chunk& chunk) {
    if (const auto memory = store_.in_host(chunk.feedback); !memory.empty())
        return feedback_in(chunk, memory);
    const auto bytes = static_cast<size_t>(plan_.objects[chunk.feedback].bytes);
    if (std::exchange(held_, &chunk) != &chunk) store_.get(chunk.feedback, staging_.first(bytes));
    return feedback_in(chunk, staging_);
}

template <class Body>
void MomentumIo::write(const Chunk& chunk, const Body& body) {
    if (const auto memory = store_.in_host(chunk.feedback); !memory.empty())
        return body(feedback_in(chunk, memory));
    held_ = nullptr;
    const auto bytes = static_cast<size_t>(plan_.objects[chunk.feedback].bytes);
    body(feedback_in(chunk, staging_));
    store_.put(chunk.feedback, staging_.first(bytes));
}

void MomentumIo::begin(StateIo& state) {
    const int ranks = plan_.partition.ranks;
    state.begin_arrays();
    each_turn([&](const Turn& turn) {
        const Chunk& chunk = turn.chunk;
        const std::vector<StateArray> arrays =
            state_arrays(chunk.format, plan_.compute, chunk.trainable);
        std::vector<Width> widths;
        for (const StateArray& array : arrays) widths.push_back(array.width);
        std::vector<float> first, second;
        const ArraySink take = [&](std::span<const std::span<const std::byte>> parts) {
            for (size_t a = 0; a < arrays.size(); ++a) {
                if (arrays[a].what == StateArray::What::first_moment) append(first, parts[a]);
                if (arrays[a].what == StateArray::What::second_moment) append(second, parts[a]);
            }
        };
        for (int rank = 0; rank < ranks; ++rank) {
            const int64_t from = plan_.partition.shard(turn.segment, rank).first + turn.within;
            share_arrays(
                ranks_, executor_, plan_.partition, turn.layer, {from, chunk.count}, widths,
                [&](const zero::Run& run, const ArraySink& to) {
                    state.read_arrays(chunk.layer, run.first, run.count, to);
                },
                take);
        }
        write(chunk, [&](const zero::Feedback& feedback) {
            zero::mark_untouched(first.data(), second.data(), ranks * chunk.count,
                                 feedback.momentum(0));
            std::fill_n(feedback.error(0), (ranks + 1) * chunk.count, 0.0f);
        });
    });
}

void MomentumIo::restore(const Fill& fill) {
    const int ranks = plan_.partition.ranks, mine = plan_.partition.rank;
    const std::vector<StateArray> errors = error_arrays(ranks);
    each_turn([&](const Turn& turn) {
        const Chunk& chunk = turn.chunk;
        const auto read = [&](const StateArray& array, int rank, float* values) {
            const int64_t from = plan_.partition.shard(turn.segment, rank).first + turn.within;
            fill(turn.layer, array, from,
                 std::as_writable_bytes(std::span(values, static_cast<size_t>(chunk.count))));
        };
        std::vector<float> first(static_cast<size_t>(chunk.count)), second(first.size());
        write(chunk, [&](const zero::Feedback& feedback) {
            std::fill_n(feedback.error(0), (ranks + 1) * chunk.count, 0.0f);
            for (int rank = 0; rank < ranks; ++rank) {
                std::ranges::fill(first, 0.0f);
                std::ranges::fill(second, 0.0f);
                for (const StateArray& array :
                     state_arrays(chunk.format, plan_.compute, chunk.trainable)) {
                    if (array.what == StateArray::What::first_moment)
                        read(array, rank, first.data());
                    if (array.what == StateArray::What::second_moment)
                        read(array, rank, second.data());
                }
                zero::mark_untouched(first.data(), second.data(), chunk.count,
                                     feedback.momentum(rank));
                read(errors[static_cast<size_t>(mine)], rank, feedback.error(rank));
            }
            read(errors.back(), mine, feedback.owner_error());
        });
    });
}

void MomentumIo::read_errors(int64_t layer, const model::Tensor& tensor, const ArraySink& sink) {
    const zero::Partition& partition = plan_.partition;
    const model::Layer& shape = plan_.layers[static_cast<size_t>(layer)];
    const model::Segment& segment = zero::segment_of(shape, tensor.offset);
    const int64_t mine_first = partition.shard(segment, partition.rank).first;
    constexpr int64_t kBlock = comm::Communicator::kAgreedBytes / 8;
    std::vector<float> mine(2 * kBlock), all(mine.size() * static_cast<size_t>(partition.ranks));
    const auto share = [&](const Turn& turn, int owner, int64_t at, int64_t count) {
        const zero::Feedback feedback = brought(turn.chunk);
        const int64_t from = at - turn.within;
        std::copy_n(feedback.error(owner) + from, count, mine.begin());
        std::copy_n(feedback.owner_error() + from, count, mine.begin() + count);
        const auto values = static_cast<size_t>(2 * count);
        comm::agree(ranks_, executor_, std::as_bytes(std::span(mine).first(values)),
                    std::as_writable_bytes(
                        std::span(all).first(values * static_cast<size_t>(partition.ranks))),
                    kErrors);
        std::vector<std::span<const std::byte>> arrays;
        for (int rank = 0; rank < partition.ranks; ++rank)
            arrays.push_back(bytes_of(all.data() + rank * 2 * count, count));
        arrays.push_back(bytes_of(all.data() + (2 * owner + 1) * count, count));
        sink(arrays);
    };
    held_ = nullptr;
    for (int owner = 0; owner < partition.ranks; ++owner) {
        const zero::Run shard = partition.shard(segment, owner);
        const int64_t end = std::min(tensor.offset + tensor.count - shard.first, shard.count);
        int64_t at = std::max<int64_t>(tensor.offset - shard.first, 0);
        for (const Chunk& chunk : plan_.chunks_of(layer)) {
            const int64_t begin = chunk.first - mine_first;
            const bool here = chunk.feedback != swap::kNoObject && at >= begin;
            while (here && at < std::min(end, begin + chunk.count)) {
                const int64_t count = std::min({kBlock, end - at, begin + chunk.count - at});
                share(turn_of(chunk), owner, at, count);
                at += count;
            }
        }
    }
}

uint64_t MomentumIo::hash(uint64_t before) {
    uint64_t hash = before;
    held_ = nullptr;
    const auto fold = [&](const float* leaf) {
        const std::array<uint64_t, 2> pair{hash, checksum(bytes_of(leaf, optim::kLeaf))};
        hash = checksum(std::as_bytes(std::span(pair)));
    };
    each_turn([&](const Turn& turn) {
        const zero::Feedback feedback = brought(turn.chunk);
        for (int64_t at = 0; at < turn.chunk.count; at += optim::kLeaf) {
            for (int rank = 0; rank < feedback.ranks; ++rank) fold(feedback.error(rank) + at);
            fold(feedback.owner_error() + at);
        }
    });
    return hash;
}

}  // namespace ferry::train
