#include "momentum_io.h"

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "base/checksum.h"
#include "train/kernels/weight_alone.h"

namespace ferry::train {

using planner::Chunk;

namespace {

constexpr comm::Topic kErrors{.of = "errors of momentum's codes"};

std::span<const std::byte> bytes_of(const float* values, int64_t count) {
    return std::as_bytes(std::span(values, static_cast<size_t>(count)));
}

constexpr comm::Topic kMoments{.of = "moments"};

// Appends an array's part to where one is gathered.
void append(std::vector<float>& values, std::span<const std::byte> part) {
    const auto* floats = reinterpret_cast<const float*>(part.data());
    values.insert(values.end(), floats, floats + part.size() / sizeof(float));
}

// All but the momentum.
void begin_without_errors(const zero::Feedback& feedback) {
    const int64_t arrays =
        zero::feedback_bytes(1, feedback.ranks, feedback.local_steps) / 4 - feedback.ranks;
    std::fill_n(feedback.error(0), arrays * feedback.count, 0.0f);
}

}  // namespace

bool has_errors(const planner::Plan& plan, const MomentumSchedule& momentum,
                int64_t moment_updates) {
    return plan.has_feedback() && moment_updates >= momentum.first();
}

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
    return {reinterpret_cast<float*>(memory.data()), chunk.count, plan_.partition.ranks,
            plan_.partition.codecs.local_steps};
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

// Of the owner's run alone where the state is sharded, else of all of them.
void MomentumIo::set_momentum(const Turn& turn, StateIo& state, float* momentum) const {
    const Chunk& chunk = turn.chunk;
    const std::vector<StateArray> arrays =
        state_arrays(chunk.format, plan_.compute, chunk.trainable);
    const bool sharded = plan_.partition.sharding.state;
    const int mine = plan_.partition.rank;
    for (int rank = sharded ? mine : 0; rank < (sharded ? mine + 1 : plan_.partition.ranks);
         ++rank) {
        std::vector<float> first, second;
        const int64_t from = plan_.partition.shard(turn.segment, rank).first + turn.within;
        state.read_arrays(chunk.layer, from, chunk.count,
                          [&](std::span<const std::span<const std::byte>> parts) {
                              for (size_t a = 0; a < arrays.size(); ++a) {
                                  if (arrays[a].what == StateArray::What::first_moment)
                                      append(first, parts[a]);
                                  if (arrays[a].what == StateArray::What::second_moment)
                                      append(second, parts[a]);
                              }
                          });
        zero::mark_untouched(first.data(), second.data(), chunk.count,
                             momentum + rank * chunk.count);
    }
}

// Every rank's run of a turn, of which this rank has its own.
void MomentumIo::gather(const Chunk& chunk, float* momentum) {
    const int ranks = plan_.partition.ranks, mine = plan_.partition.rank;
    constexpr int64_t kBlock = comm::Communicator::kAgreedBytes / 4;
    std::vector<float> all(static_cast<size_t>(kBlock * ranks));
    for (int64_t at = 0; at < chunk.count; at += kBlock) {
        const int64_t count = std::min(kBlock, chunk.count - at);
        comm::agree(
            ranks_, executor_, bytes_of(momentum + mine * chunk.count + at, count),
            std::as_writable_bytes(std::span(all).first(static_cast<size_t>(count * ranks))),
            kMoments);
        for (int rank = 0; rank < ranks; ++rank)
            std::copy_n(all.begin() + rank * count, count, momentum + rank * chunk.count + at);
        ++sent_.calls;
        sent_.sent_bytes += (ranks - 1) * count * 4;
    }
    sent_.raw_bytes = sent_.sent_bytes;
}

void MomentumIo::begin(StateIo& state, bool off) {
    state.begin_arrays();
    held_ = nullptr;
    each_turn([&](const Turn& turn) {
        const Chunk& chunk = turn.chunk;
        if (off) brought(chunk);
        std::vector<float> momentum(static_cast<size_t>(plan_.partition.ranks * chunk.count));
        set_momentum(turn, state, momentum.data());
        if (plan_.partition.sharding.state) gather(chunk, momentum.data());
        write(chunk, [&](const zero::Feedback& feedback) {
            std::ranges::copy(momentum, feedback.momentum(0));
            if (!off) begin_without_errors(feedback);
        });
    });
}

void MomentumIo::restore(const Fill& fill) {
    const int ranks = plan_.partition.ranks, mine = plan_.partition.rank;
    const std::vector<StateArray> errors = error_arrays(plan_.partition);
    each_turn([&](const Turn& turn) {
        const Chunk& chunk = turn.chunk;
        const auto read = [&](const StateArray& array, int rank, float* values) {
            const int64_t from = plan_.partition.shard(turn.segment, rank).first + turn.within;
            fill(turn.layer, array, from,
                 std::as_writable_bytes(std::span(values, static_cast<size_t>(chunk.count))));
        };
        const auto read_mine = [&](StateArray::What what, int rank, float* values) {
            const auto first = std::ranges::find(errors, what, &StateArray::what);
            read(*(first + mine), rank, values);
        };
        std::vector<float> first(static_cast<size_t>(chunk.count)), second(first.size());
        write(chunk, [&](const zero::Feedback& feedback) {
            begin_without_errors(feedback);
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
                read_mine(StateArray::What::error, rank, feedback.error(rank));
                if (!feedback.local_steps) continue;
                read_mine(StateArray::What::alone, rank, feedback.momentum(rank));
                read_mine(StateArray::What::moved, rank, feedback.moved(rank));
            }
            read(*std::ranges::find(errors, StateArray::What::owner_error, &StateArray::what), mine,
                 feedback.owner_error());
        });
    });
}

void MomentumIo::restore_weights(StateIo& state, const ScalarsByKind& scalars) {
    held_ = nullptr;
    each_turn([&](const Turn& turn) {
        const zero::Feedback feedback = brought(turn.chunk);
        for (int rank = 0; rank < feedback.ranks; ++rank) {
            const int64_t from = plan_.partition.shard(turn.segment, rank).first + turn.within;
            const auto chunks = plan_.chunks_of(turn.chunk.layer);
            const auto chunk = std::ranges::find(chunks, from, &Chunk::first);
            state.rewrite_weight(*chunk, [&](optim::Span span) {
                span.gradient = feedback.moved(rank);
                for (int64_t at = 0; at < span.count; at += optim::kLeaf)
                    update_weight_alone(span, at, optim::kLeaf,
                                        scalars[static_cast<size_t>(kind_of(*chunk))]);
            });
        }
    });
}

void MomentumIo::read_errors(int64_t layer, const model::Tensor& tensor, const ArraySink& sink) {
    const zero::Partition& partition = plan_.partition;
    const model::Layer& shape = plan_.layers[static_cast<size_t>(layer)];
    const model::Segment& segment = zero::segment_of(shape, tensor.offset);
    const int64_t mine_first = partition.shard(segment, partition.rank).first;
    constexpr int64_t kBlock = comm::Communicator::kAgreedBytes / 16;
    const int64_t kinds = partition.codecs.local_steps ? 4 : 2;
    std::vector<float> mine(4 * kBlock), all(mine.size() * static_cast<size_t>(partition.ranks));
    const auto share = [&](const Turn& turn, int owner, int64_t at, int64_t count) {
        const zero::Feedback feedback = brought(turn.chunk);
        const int64_t from = at - turn.within;
        std::copy_n(feedback.error(owner) + from, count, mine.begin());
        std::copy_n(feedback.owner_error() + from, count, mine.begin() + count);
        if (feedback.local_steps) {
            std::copy_n(feedback.momentum(owner) + from, count, mine.begin() + 2 * count);
            std::copy_n(feedback.moved(owner) + from, count, mine.begin() + 3 * count);
        }
        const auto values = static_cast<size_t>(kinds * count);
        comm::agree(ranks_, executor_, std::as_bytes(std::span(mine).first(values)),
                    std::as_writable_bytes(
                        std::span(all).first(values * static_cast<size_t>(partition.ranks))),
                    kErrors);
        std::vector<std::span<const std::byte>> arrays;
        const auto add = [&](int rank, int64_t kind) {
            arrays.push_back(bytes_of(all.data() + (rank * kinds + kind) * count, count));
        };
        for (int rank = 0; rank < partition.ranks; ++rank) add(rank, 0);
        add(owner, 1);
        for (int64_t kind = 2; kind < kinds; ++kind)
            for (int rank = 0; rank < partition.ranks; ++rank) add(rank, kind);
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
            for (int rank = 0; rank < feedback.ranks; ++rank) {
                fold(feedback.error(rank) + at);
                if (!feedback.local_steps) continue;
                fold(feedback.momentum(rank) + at);
                fold(feedback.moved(rank) + at);
            }
            fold(feedback.owner_error() + at);
        }
    });
    return hash;
}

}  // namespace ferry::train
