#include "shared_values.h"

#include <algorithm>
#include <vector>

namespace ferry::train {
namespace {

constexpr auto kBlock = static_cast<size_t>(comm::Communicator::kAgreedBytes) / sizeof(float);
constexpr comm::Topic kValues{.of = "values of a tensor"};

// From their owner to everyone, block by block; who is not the owner sends as many of nothing.
class Broadcast {
public:
    Broadcast(comm::Communicator& ranks, Executor& executor, const Sink& sink)
        : ranks_(ranks),
          executor_(executor),
          sink_(sink),
          all_(kBlock * static_cast<size_t>(ranks.size())) {}

    void send(int owner, size_t count, std::span<const float> block) {
        std::ranges::copy(block, mine_.begin());
        const auto all = std::span(all_).first(count * static_cast<size_t>(ranks_.size()));
        comm::agree(ranks_, executor_, std::as_bytes(std::span(mine_).first(count)),
                    std::as_writable_bytes(all), kValues);
        sink_(all.subspan(static_cast<size_t>(owner) * count, count));
    }

private:
    comm::Communicator& ranks_;
    Executor& executor_;
    const Sink& sink_;
    std::vector<float> mine_ = std::vector<float>(kBlock), all_;
};

void send_mine(Broadcast& broadcast, int owner, const zero::Run& run, const Source& mine) {
    std::vector<float> block;
    mine(run, [&](std::span<const float> piece) {
        while (!piece.empty()) {
            const size_t taken = std::min(piece.size(), kBlock - block.size());
            block.insert(block.end(), piece.begin(), piece.begin() + std::ptrdiff_t(taken));
            piece = piece.subspan(taken);
            if (block.size() < kBlock) continue;
            broadcast.send(owner, block.size(), block);
            block.clear();
        }
    });
    if (!block.empty()) broadcast.send(owner, block.size(), block);
}

}  // namespace

void share_values(comm::Communicator& ranks, Executor& executor, const zero::Partition& partition,
                  const model::Layer& layer, const zero::Run& run, const Source& mine,
                  const Sink& sink) {
    const model::Segment& segment = zero::segment_of(layer, run.first);
    Broadcast broadcast(ranks, executor, sink);
    for (int owner = 0; owner < partition.ranks; ++owner) {
        const zero::Run shard = partition.shard(segment, owner);
        const int64_t first = std::max(run.first, shard.first),
                      end = std::min(run.first + run.count, shard.first + shard.count);
        if (owner == partition.rank && first < end)
            send_mine(broadcast, owner, {first, end - first}, mine);
        for (int64_t at = first; owner != partition.rank && at < end;) {
            const auto count = std::min(static_cast<int64_t>(kBlock), end - at);
            broadcast.send(owner, static_cast<size_t>(count), {});
            at += count;
        }
    }
}

}  // namespace ferry::train
