#include "shared_values.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <vector>

namespace ferry::train {
namespace {

constexpr comm::Topic kValues{.of = "values of a tensor"};

// From their owner to everyone, block by block, array behind array; who is not the owner sends as
// many of nothing. The first array has a number for each element. Some blocks are under way at a
// time: a call to the other ranks takes long beside its bytes.
class Broadcast {
public:
    Broadcast(comm::Communicator& ranks, Executor& executor, std::span<const Width> widths,
              const ArraySink& sink)
        : ranks_(ranks),
          executor_(executor),
          widths_(widths.begin(), widths.end()),
          block_(elements_within(comm::Communicator::kAgreedBytes)),
          sink_(sink) {}
    // Not before nothing reads or writes the blocks any more.
    ~Broadcast() {
        while (done_.load(std::memory_order_acquire) < sent_) executor_.wait(kForever);
    }
    Broadcast(const Broadcast&) = delete;
    Broadcast& operator=(const Broadcast&) = delete;

    // Then come so many elements of this rank's, or of that one's.
    void begin(int owner, int64_t count) {
        owner_ = owner;
        left_ = count;
        begin_block();
    }
    // The owner's parts, re-cut into blocks.
    void give(std::span<const std::span<const std::byte>> arrays) {
        const int64_t count = std::ssize(arrays.front()) / widths_.front().bytes;
        for (int64_t at = 0; at < count;) {
            Block& block = next();
            const int64_t taken = std::min(count - at, block.count - held_);
            int64_t begin = 0;  // of the array, in the block
            for (size_t a = 0; a < widths_.size(); ++a) {
                const Width& width = widths_[a];
                std::memcpy(block.mine.data() + begin + width.of(held_),
                            arrays[a].data() + width.of(at), static_cast<size_t>(width.of(taken)));
                begin += width.of(block.count);
            }
            held_ += taken;
            at += taken;
            if (held_ == block.count) send();
        }
    }
    // Everyone else, in place of give().
    void take() {
        while (left_ > 0) send();
    }
    // After all: the sink has everything.
    void end() {
        while (taken_ < sent_) take_oldest();
    }

private:
    static constexpr uint64_t kBlocks = 16;
    struct Block {
        std::vector<std::byte> mine{}, all{};
        int owner = 0;
        int64_t count = 0;  // elements
    };

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

    Block& next() { return blocks_[sent_ % kBlocks]; }
    void begin_block() {
        if (left_ == 0) return;
        if (sent_ - taken_ == kBlocks) take_oldest();
        Block& block = next();
        block.owner = owner_;
        block.count = std::min(left_, block_);
        const auto bytes = static_cast<size_t>(bytes_of(block.count));
        block.mine.resize(bytes);
        block.all.resize(bytes * static_cast<size_t>(ranks_.size()));
        held_ = 0;
    }

    void send() {
        Block& block = next();
        ranks_.all_gather_host(
            {.mine = block.mine.data(), .all = block.all.data(), .bytes = bytes_of(block.count)},
            kValues);
        ranks_.signal(done_);
        ++sent_;
        left_ -= block.count;
        begin_block();
    }

    void take_oldest() {
        while (done_.load(std::memory_order_acquire) <= taken_) executor_.wait(kForever);
        ranks_.check();
        const Block& block = blocks_[taken_ % kBlocks];
        const auto bytes = static_cast<size_t>(bytes_of(block.count));
        auto rest = std::span<const std::byte>(block.all).subspan(
            static_cast<size_t>(block.owner) * bytes, bytes);
        std::vector<std::span<const std::byte>> arrays;
        for (const Width& width : widths_) {
            arrays.push_back(rest.first(static_cast<size_t>(width.of(block.count))));
            rest = rest.subspan(arrays.back().size());
        }
        sink_(arrays);
        ++taken_;
    }

    comm::Communicator& ranks_;
    Executor& executor_;
    const std::vector<Width> widths_;
    const int64_t block_;  // elements
    const ArraySink& sink_;
    std::array<Block, kBlocks> blocks_{};
    int owner_ = 0;
    int64_t left_ = 0, held_ = 0;     // elements: of the owner's, from this block on; in this block
    uint64_t sent_ = 0, taken_ = 0;   // blocks
    std::atomic<uint64_t> done_ = 0;  // of them, in order
};

zero::Run both(const zero::Run& one, const zero::Run& other) {
    const int64_t first = std::max(one.first, other.first);
    const int64_t end = std::min(one.first + one.count, other.first + other.count);
    return {first, std::max<int64_t>(end - first, 0)};
}

}  // namespace

zero::Run own_run(const zero::Partition& partition, const model::Layer& layer,
                  const zero::Run& run) {
    return both(run, partition.shard(zero::segment_of(layer, run.first), partition.rank));
}

void share_arrays(comm::Communicator& ranks, Executor& executor, const zero::Partition& partition,
                  const model::Layer& layer, const zero::Run& run, std::span<const Width> widths,
                  const ArraySource& mine, const ArraySink& sink, int first_rank) {
    const model::Segment& segment = zero::segment_of(layer, run.first);
    Broadcast broadcast(ranks, executor, widths, sink);
    for (int part = 0; part < partition.ranks; ++part) {
        const zero::Run shared = both(run, partition.shard(segment, part));
        const int owner = first_rank + part;
        if (shared.count == 0) continue;
        broadcast.begin(owner, shared.count);
        if (owner != ranks.rank()) {
            broadcast.take();
            continue;
        }
        mine(shared,
             [&](std::span<const std::span<const std::byte>> arrays) { broadcast.give(arrays); });
    }
    broadcast.end();
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
