// Embedding rows, and their gradient summed per row in token order without atomics.
#include <algorithm>
#include <cub/device/device_radix_sort.cuh>

#include "ops/cuda/shared/kernels.h"
#include "ops/cuda/shared/launch.h"
#include "ops/cuda/shared/pack.h"

namespace ferry::ops::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void own_rows_kernel(const int32_t* tokens, int64_t count, int64_t first, int64_t rows,
                                int32_t* own) {
    const int64_t t = int64_t{blockIdx.x} * kThreads + threadIdx.x;
    if (t >= count) return;
    const int64_t row = tokens[t] - first;
    own[t] = row >= 0 && row < rows ? static_cast<int32_t>(row) : -1;
}

__global__ void embed_kernel(const int32_t* tokens, ConstView table, ConstView positions,
                             const int32_t* document_start, View x) {
    const auto [row, col, count] = cell_of(x.cols);
    if (count <= 0) return;
    const int32_t token = tokens[row];
    if (token < 0) return store_pack({{}, count}, x, row, col);
    const RawPack raw = fetch_pack(table, token, col, count);
    Pack pack = widen_pack(raw, table.type, count);
    if (positions.data != nullptr) {
        const int64_t before = document_start == nullptr ? 0 : document_start[row];
        const Pack added = load_pack(positions, row % positions.rows - before, col, count);
#pragma unroll
        for (int k = 0; k < kPack; ++k) pack.at[k] += added.at[k];
    }
    store_pack(pack, x, row, col);
}

// A thread an element of a position's row.
__global__ void positions_backward_kernel(ConstView dx, int64_t sequence, float* gradient) {
    const int64_t col = int64_t{blockIdx.y} * kThreads + threadIdx.x, position = blockIdx.x;
    if (col >= dx.cols) return;
    float sum = gradient[position * dx.cols + col];
    for (int64_t row = position; row < dx.rows; row += sequence) sum += load(dx, row, col);
    gradient[position * dx.cols + col] = sum;
}

// ---------------------------------------------------------------- sums by key

// Rows in the order of their keys, and of rows where keys are equal, so that a key's rows are added
// in the order of the tokens: a stable sort, then a walk over each run of equal keys.
struct Order {
    int32_t *keys, *rows;
};

// What a sort needs beside its results: what it sorts, and CUB's temporary storage.
struct SortRoom {
    Order given, sorted;
    void* temporary;
    size_t temporary_bytes;
    int64_t bytes;
};
SortRoom sort_room(std::byte* scratch, int64_t rows) {
    constexpr int64_t kUnit = 256;
    SortRoom room{};
    const auto take = [&](int64_t bytes) {
        std::byte* at = scratch == nullptr ? nullptr : scratch + room.bytes;
        room.bytes += round_up(bytes, kUnit);
        return at;
    };
    for (int32_t** part :
         {&room.given.keys, &room.given.rows, &room.sorted.keys, &room.sorted.rows})
        *part = reinterpret_cast<int32_t*>(take(rows * 4));
    check_launch("sort of keys",
                 cub::DeviceRadixSort::SortPairs(nullptr, room.temporary_bytes, room.given.keys,
                                                 room.sorted.keys, room.given.rows,
                                                 room.sorted.rows, static_cast<int>(rows)));
    room.temporary = take(static_cast<int64_t>(room.temporary_bytes));
    return room;
}

// Keys: tokens, or positions within documents where there are none.
__global__ void keys_kernel(const int32_t* tokens, int64_t sequence, const int32_t* document_start,
                            Order given, int64_t rows) {
    const int64_t row = int64_t{blockIdx.x} * kThreads + threadIdx.x;
    if (row >= rows) return;
    given.keys[row] = tokens != nullptr
                          ? tokens[row]
                          : static_cast<int32_t>(row % sequence) - document_start[row];
    given.rows[row] = static_cast<int32_t>(row);
}

// kVector elements that follow each other, as they lie in memory.
template <DType kType, int kVector>
struct Neighbours {
    static constexpr bool kWide = kType == DType::f32;
    static constexpr int kWords = kVector == 1 || kWide ? kVector : kVector / 2;
    uint32_t words[kWords];
    static bool may_load(const void* at) {
        return kVector == 1 || reinterpret_cast<uintptr_t>(at) % (kWords * 4) == 0;
    }
    __device__ void fetch(const ConstView& v, int64_t row, int64_t col) {
        const int64_t i = row * v.ld + col;
        if constexpr (kVector == 1) {
            words[0] = kWide ? static_cast<const uint32_t*>(v.data)[i]
                             : uint32_t{static_cast<const uint16_t*>(v.data)[i]};
        } else if constexpr (kWide) {
            const auto raw =
                *reinterpret_cast<const uint4*>(static_cast<const uint32_t*>(v.data) + i);
            words[0] = raw.x, words[1] = raw.y, words[2] = raw.z, words[3] = raw.w;
        } else {
            const auto raw =
                *reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(v.data) + i);
            words[0] = raw.x, words[1] = raw.y;
        }
    }
    __device__ float at(int k) const {
        if constexpr (kWide) return __uint_as_float(words[k]);
        const auto half = static_cast<uint16_t>(words[k / 2] >> (k % 2 * 16));
        if constexpr (kType == DType::bf16) return __uint_as_float(uint32_t{half} << 16);
        return __half2float(__ushort_as_half(half));
    }
};

constexpr int kAtOnce = 16;  // rows whose loads are under way together; they are added in order
constexpr int kOfBlock = 4;  // places in the order; a block adds the runs that begin there

template <int kCount>
__device__ void copy_floats(const float* from, float* to) {
    if constexpr (kCount == 4) {
        *reinterpret_cast<float4*>(to) = *reinterpret_cast<const float4*>(from);
    } else {
        static_assert(kCount == 1);
        *to = *from;
    }
}

// Adds rows to a thread's kVector columns: `count` of them whose numbers are in `mine`, a lane's
// each, and, where there are `more`, those of `key` from place `next` on. All threads of a warp
// together.
template <DType kType, int kVector>
__device__ void add_rows_of(Order order, int32_t key, int32_t mine, int count, bool more,
                            int64_t next, const ConstView& dx, int64_t col, float (&sum)[kVector]) {
    using P = Neighbours<kType, kVector>;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const bool has = col < dx.cols;
    while (true) {
        int32_t following = -1;
        if (more && next + lane < dx.rows && order.keys[next + lane] == key)
            following = order.rows[next + lane];
        for (int m = 0; m < count; m += kAtOnce) {
            P ahead[kAtOnce];
#pragma unroll
            for (int n = 0; n < kAtOnce; ++n) {
                const int32_t of = __shfl_sync(0xffffffffu, mine, min(m + n, 31));
                if (m + n < count && has) ahead[n].fetch(dx, of, col);
            }
#pragma unroll
            for (int n = 0; n < kAtOnce; ++n) {
                if (m + n >= count) break;
#pragma unroll
                for (int k = 0; k < kVector; ++k) sum[k] += ahead[n].at(k);
            }
        }
        if (!more) return;
        mine = following;
        count = __popc(__ballot_sync(0xffffffffu, mine >= 0));
        more = count == 32;
        next += 32;
    }
}

// A warp's lanes see 32 places of the order, the first of them of the block before. What begins in
// the block's own is added by it: the first rows of all its runs, and the sums so far, are under
// way together.
template <DType kType, int kVector>
__global__ void __launch_bounds__(kThreads, kType == DType::f32 ? 2 : 3)
    add_by_key_kernel(Order order, ConstView dx, float* gradient) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int64_t before = int64_t{blockIdx.x} * kOfBlock - 1, i = before + lane;
    const bool there = i >= 0 && i < dx.rows;
    const int32_t key = there ? order.keys[i] : -1, row = there ? order.rows[i] : -1;
    const int32_t last = __shfl_up_sync(0xffffffffu, key, 1);
    const unsigned changes = __ballot_sync(0xffffffffu, lane > 0 && key != last);
    const unsigned begins = changes & __ballot_sync(0xffffffffu, key >= 0);
    const int64_t col = (int64_t{blockIdx.y} * blockDim.x + threadIdx.x) * kVector;
    const bool has = col < dx.cols;
    Neighbours<kType, kVector> first[kOfBlock];
    alignas(16) float sums[kOfBlock][kVector] = {};
    int32_t keys[kOfBlock];
#pragma unroll
    for (int r = 0; r < kOfBlock; ++r) {
        keys[r] = __shfl_sync(0xffffffffu, key, r + 1);
        const int32_t of = __shfl_sync(0xffffffffu, row, r + 1);
        if ((begins >> (r + 1) & 1) == 0 || !has) continue;
        first[r].fetch(dx, of, col);
        copy_floats<kVector>(gradient + keys[r] * dx.cols + col, sums[r]);
    }
#pragma unroll
    for (int r = 0; r < kOfBlock; ++r) {
        const int at = r + 1;
        if ((begins >> at & 1) == 0) continue;  // all threads of the block alike
        if (has) {
#pragma unroll
            for (int k = 0; k < kVector; ++k) sums[r][k] += first[r].at(k);
        }
        const unsigned later = changes >> at >> 1;
        const int length = later == 0 ? 32 - at : __ffs(static_cast<int>(later));
        if (length > 1) {
            const int32_t mine = __shfl_sync(0xffffffffu, row, min(at + 1 + lane, 31));
            add_rows_of<kType, kVector>(order, keys[r], mine, length - 1, later == 0, before + 32,
                                        dx, col, sums[r]);
        }
        if (has) copy_floats<kVector>(sums[r], gradient + keys[r] * dx.cols + col);
    }
}

template <DType kType>
void add_by_key(Order order, ConstView dx, float* gradient, cudaStream_t stream) {
    const auto launch = [&](auto vector, auto kernel) {
        const int64_t pieces = ceil_div(dx.cols, int64_t{vector});
        const int64_t threads = std::min<int64_t>(kThreads, round_up(pieces, 32));
        const dim3 blocks(blocks_for(dx.rows, kOfBlock), blocks_for(pieces, threads));
        kernel<<<blocks, static_cast<unsigned>(threads), 0, stream>>>(order, dx, gradient);
    };
    constexpr int kFour = 4;
    const bool four = dx.cols % kFour == 0 && dx.ld % kFour == 0 &&
                      Neighbours<kType, kFour>::may_load(dx.data) &&
                      reinterpret_cast<uintptr_t>(gradient) % 16 == 0;
    if (four) return launch(kFour, add_by_key_kernel<kType, kFour>);
    launch(1, add_by_key_kernel<kType, 1>);
}

// gradient[key] += dx, in the order of the rows.
void add_rows_by_key(const int32_t* tokens, int64_t sequence, const int32_t* document_start,
                     ConstView dx, float* gradient, std::byte* scratch, cudaStream_t stream) {
    SortRoom room = sort_room(scratch, dx.rows);
    keys_kernel<<<blocks_for(dx.rows, kThreads), kThreads, 0, stream>>>(
        tokens, sequence, document_start, room.given, dx.rows);
    check_launch("sort of keys",
                 cub::DeviceRadixSort::SortPairs(
                     room.temporary, room.temporary_bytes, room.given.keys, room.sorted.keys,
                     room.given.rows, room.sorted.rows, static_cast<int>(dx.rows), 0, 32, stream));
    if (dx.type == DType::f32) return add_by_key<DType::f32>(room.sorted, dx, gradient, stream);
    if (dx.type == DType::bf16) return add_by_key<DType::bf16>(room.sorted, dx, gradient, stream);
    add_by_key<DType::f16>(room.sorted, dx, gradient, stream);
}

}  // namespace

void own_rows(const int32_t* tokens, int64_t count, int64_t first, int64_t rows, int32_t* own,
              cudaStream_t stream) {
    if (count == 0) return;
    own_rows_kernel<<<blocks_for(count, kThreads), kThreads, 0, stream>>>(tokens, count, first,
                                                                          rows, own);
    check_launch("own rows");
}

void embed(const int32_t* tokens, ConstView table, ConstView positions,
           const int32_t* document_start, View x, cudaStream_t stream) {
    if (x.rows == 0 || x.cols == 0) return;
    const Cells cells = cells_of(x.rows, x.cols);
    embed_kernel<<<cells.blocks, cells.threads, 0, stream>>>(tokens, table, positions,
                                                             document_start, x);
    check_launch("embed");
}

int64_t embed_backward_scratch_bytes(int64_t tokens) { return sort_room(nullptr, tokens).bytes; }

void positions_backward(ConstView dx, int64_t sequence, const int32_t* document_start,
                        float* gradient, std::byte* scratch, cudaStream_t stream) {
    if (dx.rows == 0) return;
    if (document_start != nullptr) {
        add_rows_by_key(nullptr, sequence, document_start, dx, gradient, scratch, stream);
    } else {
        const dim3 blocks(blocks_for(std::min(sequence, dx.rows), 1),
                          blocks_for(dx.cols, kThreads));
        positions_backward_kernel<<<blocks, kThreads, 0, stream>>>(dx, sequence, gradient);
    }
    check_launch("positions backward");
}

void embed_backward(const int32_t* tokens, ConstView dx, float* gradient, std::byte* scratch,
                    cudaStream_t stream) {
    if (dx.rows == 0) return;
    add_rows_by_key(tokens, 0, nullptr, dx, gradient, scratch, stream);
    check_launch("embed backward");
}

}  // namespace ferry::ops::cuda
