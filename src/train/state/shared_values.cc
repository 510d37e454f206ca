#include "shared_values.h"

#include <algorithm>
#include <utility>
#include <vector>

namespace ferry::train {
namespace {

constexpr comm::Topic kValues{.of = "values of a tensor"};

// From their owner to everyone, block by block, array behind array; who is not the owner sends as
// many of nothing. The first array has a number for each element.
class Broadcast {
public:
    Broadcast(comm::Communicator& ranks, Executor& executor, std::span<const Width> widths,
              const ArraySink& sink)
        : ranks_(ranks),
          executor_(executor),
          widths_(widths.begin(), widths.end()),
          block_(elements_within(comm::Communicator::kAgreedBytes)),
          sink_(sink),
          gathered_(widths.size()),
          mine_(static_cast<size_t>(bytes_of(block_))),
          all_(mine_.size() * static_cast<size_t>(ranks.size())) {}

    // The owner: its parts, re-cut into blocks.
    void give(int owner, std::span<const std::span<const std::byte>> arrays) {
        int64_t count = std::ssize(arrays.front()) / widths_.front().bytes;
        for (int64_t at = 0; count > 0;) {
            const int64_t taken = std::min(count, block_ - held_);
            for (size_t a = 0; a < widths_.size(); ++a) {
                const auto part = arrays[a].subspan(static_cast<size_t>(widths_[a].of(at)),
                                                    static_cast<size_t>(widths_[a].of(taken)));
                gathered_[a].insert(gathered_[a].end(), part.begin(), part.end());
            }
            held_ += taken;
            at += taken;
            count -= taken;
            if (held_ == block_) end_block(owner);
        }
    }
    void end(int owner) {
        if (held_ > 0) end_block(owner);
    }
    // Everyone else.
    void take(int owner, int64_t count) {
        for (; count > 0; count -= std::min(count, block_)) send(owner, std::min(count, block_));
    }

private:
    int64_t bytes_of(int64_t count) const {
        int64_t bytes = 0;
        for (const Width& width : widths_) bytes += width.of(count);
        return bytes;
    }
    // Whole groups of every array.
    int64_t elements_within(int64_t most_bytes) const {
        const int64_t unit = std::ranges::max(widths_, {}, &Width::elements).elements;
        return most_bytes / bytes_of(unit) * unit;
    }

    void end_block(int owner) {
        auto to = mine_.begin();
        for (std::vector<std::byte>& array : gathered_) {
            to = std::ranges::copy(array, to).out;
            array.clear();
        }
        send(owner, std::exchange(held_, 0));
    }

    void send(int owner, int64_t count) {
        const auto bytes = static_cast<size_t>(bytes_of(count));
        const auto all = std::span(all_).first(bytes * static_cast<size_t>(ranks_.size()));
        comm::agree(ranks_, executor_, std::span(mine_).first(bytes), all, kValues);
        std::span<const std::byte> rest = all.subspan(static_cast<size_t>(owner) * bytes, bytes);
        std::vector<std::span<const std::byte>> arrays;
        for (const Width& width : widths_) {
            arrays.push_back(rest.first(static_cast<size_t>(width.of(count))));
            rest = rest.subspan(arrays.back().size());
        }
        sink_(arrays);
    }

    comm::Communicator& ranks_;
    Executor& executor_;
    const std::vector<Width> widths_;
    const int64_t block_;  // elements
    const ArraySink& sink_;
    std::vector<std::vector<std::byte>> gathered_;
    int64_t held_ = 0;  // elements gathered
    std::vector<std::byte> mine_, all_;
};

}  // namespace

void share_arrays(comm::Communicator& ranks, Executor& executor, const zero::Partition& partition,
                  const model::Layer& layer, const zero::Run& run, std::span<const Width> widths,
                  const ArraySource& mine, const ArraySink& sink, int first_rank) {
    const model::Segment& segment = zero::segment_of(layer, run.first);
    Broadcast broadcast(ranks, executor, widths, sink);
    for (int part = 0; part < partition.ranks; ++part) {
        const zero::Run shard = partition.shard(segment, part);
        const int owner = first_rank + part;
        const int64_t first = std::max(run.first, shard.first),
                      end = std::min(run.first + run.count, shard.first + shard.count);
        if (first >= end) continue;
        if (owner != ranks.rank()) {
            broadcast.take(owner, end - first);
            continue;
        }
        mine({first, end - first}, [&](std::span<const std::span<const std::byte>> arrays) {
            broadcast.give(owner, arrays);
        });
        broadcast.end(owner);
    }
}

ArraySource as_arrays(const Source& values) {
    return [&values](const zero::Run& run, const ArraySink& to) {
        values(run, [&](std::span<const float> some) {
            const std::span<const std::byte> bytes = std::as_bytes(some);
            to({&bytes, 1});
        });
    };
}

ArraySink of_arrays(const Sink& values) {
    return [&values](std::span<const std::span<const std::byte>> arrays) {
        std::vector<float> some(arrays.front().size() / sizeof(float));
        std::ranges::copy(arrays.front(), std::as_writable_bytes(std::span(some)).begin());
        values(some);
    };
}

void share_values(comm::Communicator& ranks, Executor& executor, const zero::Partition& partition,
                  const model::Layer& layer, const zero::Run& run, const Source& mine,
                  const Sink& sink, int first) {
    const Width width{sizeof(float)};
    share_arrays(ranks, executor, partition, layer, run, {&width, 1}, as_arrays(mine),
                 of_arrays(sink), first);
}

}  // namespace ferry::train
