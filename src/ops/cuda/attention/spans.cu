#include "ops/cuda/shared/launch.h"
#include "spans.h"

namespace ferry::ops::cuda {
namespace {

constexpr int kThreads = 128;

__global__ void bounds_kernel(Attention shape, SpanRoom room) {
    const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
    if (i < room.blocks && room.identity != nullptr) room.identity[i] = static_cast<int32_t>(i);
    if (i < shape.sequences * room.queries.count) {
        const int64_t query = room.queries.first + i % room.queries.count;
        int64_t low = max(shape.first_key(query), room.keys.first);
        if (shape.documents) {
            const int64_t token = i / room.queries.count * shape.sequence + query;
            low = max(low, int64_t{shape.document_start[token]});
        }
        room.low[i] = static_cast<int32_t>(low);
    }
    if (room.high != nullptr && i < shape.sequences * room.keys.count) {
        const int64_t key = room.keys.first + i % room.keys.count;
        int64_t high = min(shape.end_query(key), room.queries.first + room.queries.count);
        if (shape.documents) {
            const int64_t token = i / room.keys.count * shape.sequence + key;
            high = min(high, int64_t{shape.document_end[token]});
        }
        room.high[i] = static_cast<int32_t>(high);
    }
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
};

// A thread a block of queries or of keys.
template <bool kOfKeys>
__global__ void spans_kernel(Attention shape, SpanRoom room) {
    const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
    const int64_t own_blocks = kOfKeys ? room.key_blocks : room.query_blocks;
    if (i >= shape.sequences * room.layouts * own_blocks) return;
    const SequencePart own = kOfKeys ? room.keys : room.queries,
                       other = kOfKeys ? room.queries : room.keys;
    const int64_t size = room.block, end_of_other = other.first + other.count;
    const int64_t b = own.first / size + i % own_blocks, layout = i / own_blocks % room.layouts;
    const int64_t sequence = i / (room.layouts * own_blocks), list_index = layout * room.blocks + b;
    // Within the part.
    const int64_t first = max(b * size - own.first, int64_t{0});
    const int64_t last = min((b + 1) * size - own.first, own.count) - 1;
    List list{nullptr, kOfKeys ? static_cast<int32_t>(b) : 0,
              static_cast<int32_t>(kOfKeys ? room.blocks : b + 1)};
    if (shape.blocks.row_starts != nullptr) {
        const int32_t* starts = kOfKeys ? shape.blocks.column_starts : shape.blocks.row_starts;
        list = {kOfKeys ? shape.blocks.rows : shape.blocks.columns, starts[list_index],
                starts[list_index + 1]};
    }
    Span span;
    if constexpr (kOfKeys) {
        const int32_t* high = room.high + sequence * own.count;
        span.end = list.first([&](int64_t q) { return q * size >= high[last]; });
        span.begin =
            min(list.first([&](int64_t q) { return (q + 1) * size > other.first; }), span.end);
        const auto uncut = [&](int64_t q) { return q > b && q * size >= other.first; };
        span.whole = min(max(list.first(uncut), span.begin), span.end);
        span.whole_end =
            max(list.first([&](int64_t q) { return (q + 1) * size > high[first]; }), span.whole);
        room.of_keys[i] = span;
    } else {
        const int32_t* low = room.low + sequence * own.count;
        span.end = list.first([&](int64_t k) { return k * size >= end_of_other; });
        span.begin =
            min(list.first([&](int64_t k) { return (k + 1) * size > low[first]; }), span.end);
        if (other.count == 0) span.end = span.begin;
        const auto cut = [&](int64_t k) { return k >= b || (k + 1) * size > end_of_other; };
        span.whole_end = min(max(list.first(cut), span.begin), span.end);
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
    const int64_t blocks = kOfKeys ? room.key_blocks : room.query_blocks;
    if (b >= blocks) return;
    const Span* spans = (kOfKeys ? room.of_keys : room.of_queries) +
                        (sequence * room.layouts + order * together) * blocks;
    const auto work_of = [&](int64_t at) {
        int64_t sum = 0;
        for (int64_t g = 0; g < together; ++g) {
            const Span span = spans[g * blocks + at];
            sum += span.end - span.begin;
        }
        return sum;
    };
    const int64_t own = work_of(b);
    int64_t rank = 0;
    for (int64_t other = 0; other < blocks; ++other) {
        const int64_t work = work_of(other);
        const bool earlier = kOfKeys ? other < b : other > b;
        if (work > own || (work == own && earlier)) ++rank;
    }
    int32_t* to = (kOfKeys ? room.order_of_keys : room.order_of_queries) +
                  (sequence * orders + order) * blocks;
    to[rank] = static_cast<int32_t>(b);
}

}  // namespace

namespace {

int64_t block_of_lists(const Attention& shape) {
    constexpr int64_t kBlockOfAll = 128;
    return shape.pattern != nullptr ? shape.pattern->block : kBlockOfAll;
}

}  // namespace

SpanRoom::SpanRoom(const Attention& shape, std::byte* memory, bool backward)
    : SpanRoom(shape, {0, shape.sequence}, {0, shape.sequence}, memory, backward) {}

SpanRoom SpanRoom::largest(const Attention& shape, int64_t queries, int64_t keys, bool backward) {
    const int64_t last_of_block = block_of_lists(shape) - 1;
    return {shape, {last_of_block, queries}, {last_of_block, keys}, nullptr, backward};
}

SpanRoom::SpanRoom(const Attention& shape, const SequencePart& of_queries_part,
                   const SequencePart& of_keys_part, std::byte* memory, bool backward)
    : queries(of_queries_part), keys(of_keys_part) {
    constexpr int64_t kUnit = 256;
    const bool listed = shape.pattern != nullptr;
    block = block_of_lists(shape);
    blocks = ceil_div(shape.sequence, block);
    const auto touched = [&](const SequencePart& part) {
        return part.count == 0 ? 0 : ceil_div(part.end(), block) - part.first / block;
    };
    query_blocks = touched(queries);
    key_blocks = touched(keys);
    layouts = listed ? shape.pattern->layouts : 1;
    orders_of_keys = std::min(layouts, shape.kv_heads);
    const auto take = [&]<class T>(T*& to, int64_t count) {
        if (memory != nullptr) to = reinterpret_cast<T*>(memory + bytes_);
        bytes_ += round_up(count * static_cast<int64_t>(sizeof(T)), kUnit);
    };
    const int64_t lists = shape.sequences * layouts;
    take(low, shape.sequences * queries.count);
    take(of_queries, lists * query_blocks);
    take(order_of_queries, lists * query_blocks);
    if (!listed) take(identity, blocks);
    if (!backward) return;
    take(high, shape.sequences * keys.count);
    take(of_keys, lists * key_blocks);
    take(order_of_keys, shape.sequences * orders_of_keys * key_blocks);
}

void find_spans(const Attention& shape, const SpanRoom& room, cudaStream_t stream) {
    const int64_t tokens = shape.sequences * std::max(room.queries.count, room.keys.count);
    bounds_kernel<<<blocks_for(std::max(tokens, room.blocks), kThreads), kThreads, 0, stream>>>(
        shape, room);
    const auto lists_of = [&](int64_t blocks) {
        return blocks_for(shape.sequences * room.layouts * blocks, kThreads);
    };
    const auto orders_of = [&](int64_t orders, int64_t blocks) {
        return dim3(blocks_for(blocks, kThreads), static_cast<unsigned>(shape.sequences * orders));
    };
    spans_kernel<false><<<lists_of(room.query_blocks), kThreads, 0, stream>>>(shape, room);
    order_kernel<false>
        <<<orders_of(room.layouts, room.query_blocks), kThreads, 0, stream>>>(room, room.layouts);
    if (room.of_keys != nullptr && room.key_blocks > 0) {
        spans_kernel<true><<<lists_of(room.key_blocks), kThreads, 0, stream>>>(shape, room);
        order_kernel<true>
            <<<orders_of(room.orders_of_keys, room.key_blocks), kThreads, 0, stream>>>(
                room, room.orders_of_keys);
    }
    check_launch("borders of an attention's blocks");
}

}  // namespace ferry::ops::cuda
