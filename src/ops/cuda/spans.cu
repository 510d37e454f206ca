#include "launch.h"
#include "spans.h"

namespace ferry::ops::cuda {
namespace {

constexpr int kThreads = 128;

__global__ void bounds_kernel(Attention shape, SpanRoom room) {
    const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
    if (i < room.blocks && room.identity != nullptr) room.identity[i] = static_cast<int32_t>(i);
    if (i >= shape.sequences * shape.sequence) return;
    int64_t low = shape.first_key(i % shape.sequence), high = shape.end_query(i % shape.sequence);
    if (shape.documents) {
        low = max(low, int64_t{shape.document_start[i]});
        high = min(high, int64_t{shape.document_end[i]});
    }
    room.low[i] = static_cast<int32_t>(low);
    if (room.high != nullptr) room.high[i] = static_cast<int32_t>(high);
}

// The list of a block, and the first of its places whose block has a property that, once true,
// stays true.
struct List {
    const int32_t* entries;  // null: every block is its place
    int32_t begin, end;
    __device__ int64_t at(int32_t place) const {
        return entries == nullptr ? int64_t{place} : int64_t{entries[place]};
    }
    template <class Property>
    __device__ int32_t first(const Property& property) const {
        int32_t a = begin, b = end;
        while (a < b) {
            const int32_t middle = a + (b - a) / 2;
            if (property(at(middle))) {
                b = middle;
            } else {
                a = middle + 1;
            }
        }
        return a;
    }
    __device__ bool has(int32_t place, int64_t block) const {
        return begin < end && at(place) == block;
    }
};

// A thread a block of queries or of keys.
template <bool kOfKeys>
__global__ void spans_kernel(Attention shape, SpanRoom room) {
    const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
    if (i >= shape.sequences * room.layouts * room.blocks) return;
    const int64_t b = i % room.blocks, sequence = i / (room.layouts * room.blocks);
    const int64_t list_index = i % (room.layouts * room.blocks), size = room.block;
    const int64_t first = b * size, last = min(first + size, shape.sequence) - 1;
    List list{nullptr, kOfKeys ? static_cast<int32_t>(b) : 0,
              static_cast<int32_t>(kOfKeys ? room.blocks : b + 1)};
    if (shape.blocks.row_starts != nullptr) {
        const int32_t* starts = kOfKeys ? shape.blocks.column_starts : shape.blocks.row_starts;
        list = {kOfKeys ? shape.blocks.rows : shape.blocks.columns, starts[list_index],
                starts[list_index + 1]};
    }
    Span span;
    if constexpr (kOfKeys) {
        const int32_t* high = room.high + sequence * shape.sequence;
        span.begin = list.begin;
        span.end = list.first([&](int64_t q) { return q * size >= high[last]; });
        span.whole = min(span.begin + (list.has(list.begin, b) ? 1 : 0), span.end);
        span.whole_end =
            max(list.first([&](int64_t q) { return (q + 1) * size > high[first]; }), span.whole);
        room.of_keys[i] = span;
    } else {
        const int32_t* low = room.low + sequence * shape.sequence;
        span.begin = list.first([&](int64_t k) { return (k + 1) * size > low[first]; });
        span.end = list.end;
        span.whole_end = span.end - (list.has(list.end - 1, b) ? 1 : 0);
        span.whole =
            min(list.first([&](int64_t k) { return k * size >= low[last]; }), span.whole_end);
        room.of_queries[i] = span;
    }
}

// A thread a block: how many come before it. Among equals neighbours stay neighbours, and the order
// is that of a dense mask: late queries first, early keys first.
template <bool kOfKeys>
__global__ void order_kernel(SpanRoom room, int64_t orders) {
    const int64_t b = int64_t{blockIdx.x} * kThreads + threadIdx.x;
    const int64_t sequence = blockIdx.y / orders, order = blockIdx.y % orders;
    const int64_t together = room.layouts / orders;
    if (b >= room.blocks) return;
    const Span* spans = (kOfKeys ? room.of_keys : room.of_queries) +
                        (sequence * room.layouts + order * together) * room.blocks;
    const auto work_of = [&](int64_t at) {
        int64_t sum = 0;
        for (int64_t g = 0; g < together; ++g) {
            const Span span = spans[g * room.blocks + at];
            sum += span.end - span.begin;
        }
        return sum;
    };
    const int64_t own = work_of(b);
    int64_t rank = 0;
    for (int64_t other = 0; other < room.blocks; ++other) {
        const int64_t work = work_of(other);
        const bool earlier = kOfKeys ? other < b : other > b;
        if (work > own || (work == own && earlier)) ++rank;
    }
    int32_t* to = (kOfKeys ? room.order_of_keys : room.order_of_queries) +
                  (sequence * orders + order) * room.blocks;
    to[rank] = static_cast<int32_t>(b);
}

}  // namespace

SpanRoom::SpanRoom(const Attention& shape, std::byte* memory, bool backward) {
    constexpr int64_t kBlockOfAll = 128, kUnit = 256;
    const bool listed = shape.pattern != nullptr;
    block = listed ? shape.pattern->block : kBlockOfAll;
    blocks = ceil_div(shape.sequence, block);
    layouts = listed ? shape.pattern->heads : 1;
    orders_of_keys = std::min(layouts, shape.kv_heads);
    const auto take = [&]<class T>(T*& to, int64_t count) {
        if (memory != nullptr) to = reinterpret_cast<T*>(memory + bytes_);
        bytes_ += round_up(count * static_cast<int64_t>(sizeof(T)), kUnit);
    };
    const int64_t tokens = shape.sequences * shape.sequence, lists = shape.sequences * layouts;
    take(low, tokens);
    take(of_queries, lists * blocks);
    take(order_of_queries, lists * blocks);
    if (!listed) take(identity, blocks);
    if (!backward) return;
    take(high, tokens);
    take(of_keys, lists * blocks);
    take(order_of_keys, shape.sequences * orders_of_keys * blocks);
}

void find_spans(const Attention& shape, const SpanRoom& room, cudaStream_t stream) {
    const int64_t tokens = shape.sequences * shape.sequence;
    bounds_kernel<<<blocks_for(std::max(tokens, room.blocks), kThreads), kThreads, 0, stream>>>(
        shape, room);
    const unsigned lists = blocks_for(shape.sequences * room.layouts * room.blocks, kThreads);
    const auto orders_of = [&](int64_t orders) {
        return dim3(blocks_for(room.blocks, kThreads),
                    static_cast<unsigned>(shape.sequences * orders));
    };
    spans_kernel<false><<<lists, kThreads, 0, stream>>>(shape, room);
    order_kernel<false><<<orders_of(room.layouts), kThreads, 0, stream>>>(room, room.layouts);
    if (room.of_keys != nullptr) {
        spans_kernel<true><<<lists, kThreads, 0, stream>>>(shape, room);
        order_kernel<true>
            <<<orders_of(room.orders_of_keys), kThreads, 0, stream>>>(room, room.orders_of_keys);
    }
    check_launch("borders of an attention's blocks");
}

}  // namespace ferry::ops::cuda
