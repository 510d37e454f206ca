// Codes of several senders, added: as gradients, or as codes again for other hosts.
#include "decode.h"
#include "encode.h"
#include "launch.h"
#include "leaves.h"

namespace ferry::zero::cuda {
namespace {

// A block of threads a leaf of whole blocks of codes.
template <CodecKind kKind, class T>
__global__ void __launch_bounds__(kThreads)
    sum_kernel(Runs parts, int senders, T* wire, float* leaves) {
    __shared__ float4 room[kLeaf / kQuad];
    const int64_t first = int64_t{blockIdx.x} * kLeaf;
    const Coded part{parts.scales, parts.codes, parts.count, parts.block, parts.block_bits};
    for (int quad = static_cast<int>(threadIdx.x); quad < kLeaf / kQuad; quad += kThreads) {
        const int64_t i = first + quad * kQuad;
        float4 squares = make_float4(0, 0, 0, 0);
        if (i < parts.count) {
            const Place place = place_of<kKind>(part, i);
            Quad sum = decoded_at<kKind>(parts.scales, place);
#pragma unroll 4
            for (int sender = 1; sender < senders; ++sender) {
                const Quad one =
                    decoded_at<kKind>(parts.scales + sender * parts.parts_apart, place);
                for (int k = 0; k < kQuad; ++k) sum.at[k] = sum.at[k] + one.at[k];
            }
            for (float& value : sum.at) value = with_their_nan(value);
            store_quad(sum, wire + i);
            squares = squares_of<T>(sum);
        }
        room[quad] = squares;
    }
    __syncthreads();
    if (threadIdx.x >= kRow) return;
    const float leaf = leaf_of(reinterpret_cast<const float*>(room));
    if (threadIdx.x == 0) leaves[blockIdx.x] = leaf;
}

// Several senders' codes as the values that they add up to: from one element on, as a pointer is.
template <CodecKind kKind>
struct SumOfCodes {
    Coded first;  // the first sender's part
    int senders;
    int64_t apart;  // from one sender's part to the next: bytes
    int64_t at = 0;

    __device__ SumOfCodes operator+(int64_t elements) const {
        SumOfCodes moved = *this;
        moved.at += elements;
        return moved;
    }
    __device__ float operator[](int64_t i) const {
        Coded part = first;
        float sum = decoded_one<kKind>(part, at + i);
        for (int sender = 1; sender < senders; ++sender) {
            part.scales += apart;
            part.codes += apart;
            sum = sum + decoded_one<kKind>(part, at + i);
        }
        return sum;
    }
};
template <CodecKind kKind>
__device__ Quad load_quad(const SumOfCodes<kKind>& values) {
    const Place place = place_of<kKind>(values.first, values.at);
    Quad sum = decoded_at<kKind>(values.first.scales, place);
    for (int sender = 1; sender < values.senders; ++sender) {
        const Quad one = decoded_at<kKind>(values.first.scales + sender * values.apart, place);
        for (int k = 0; k < kQuad; ++k) sum.at[k] = sum.at[k] + one.at[k];
    }
    return sum;
}

// A warp a tile, and behind the tiles a block; of each host, whose parts follow each other.
template <CodecKind kKind>
__global__ void __launch_bounds__(kThreads)
    combine_kernel(Runs parts, int senders, int64_t apart, Runs combined) {
    const int64_t warp = int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarp;
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int64_t tiles = parts.count / kTile;
    const int64_t first =
        warp < tiles ? warp * kTile : tiles * kTile + (warp - tiles) * parts.block;
    if (first >= parts.count) return;
    const std::byte* from = parts.scales + blockIdx.y * parts.parts_apart;
    std::byte* to = combined.scales + blockIdx.y * combined.parts_apart;
    const int64_t codes_behind = parts.codes - parts.scales;
    const SumOfCodes<kKind> values{
        {from, from + codes_behind, parts.count, parts.block, parts.block_bits},
        senders,
        apart,
        first};
    std::byte* scales = to + (first >> parts.block_bits) * int64_t{sizeof(float)};
    std::byte* codes = to + codes_behind + code_bytes<kKind>(first);
    if (warp < tiles)
        encode_tile<kKind>(values, parts.block, lane, scales, codes);
    else
        encode_slowly<kKind>(values, parts.block, lane, scales, codes);
}

}  // namespace

void sum(const Codec& codec, const std::byte* parts, int senders, int64_t count, DType wire_type,
         void* wire, float* leaves, void* stream) {
    FERRY_CHECK(senders > 0 && count % codec.block == 0, "parts of whole blocks");
    FERRY_CHECK(aligned(wire, kQuad * size_of(wire_type)));
    const Several several{.count = senders, .parts_apart = codec.bytes(count)};
    const Part first{const_cast<std::byte*>(parts), count};
    const Runs runs = runs_of(codec, first, 0, count, wire, wire_type, several);
    if (count == 0) return;
    const auto blocks = static_cast<unsigned>(ceil_div(count, kLeaf));
    with_numbers(codec.kind, wire_type, [&](auto kind, auto element) {
        using T = decltype(element);
        sum_kernel<decltype(kind)::kValue>
            <<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
                runs, senders, static_cast<T*>(wire), leaves);
    });
    check_launch("sum of codes");
}

void combine(const Codec& codec, const std::byte* parts, int senders, int hosts, int64_t count,
             std::byte* combined, void* stream) {
    FERRY_CHECK(senders > 0 && hosts > 0 && count % codec.block == 0, "parts of whole blocks");
    const int64_t bytes = codec.bytes(count);
    const Several several{.count = hosts, .parts_apart = bytes};
    const Part sent{const_cast<std::byte*>(parts), count}, made{combined, count};
    const Runs from = runs_of(codec, sent, 0, count, nullptr, DType::f32, several);
    const Runs to = runs_of(codec, made, 0, count, nullptr, DType::f32, several);
    if (count == 0) return;
    const int64_t tiles = count / kTile;
    const int64_t warps = tiles + (count - tiles * kTile) / codec.block;
    const dim3 grid = grid_of(ceil_div(warps, kWarps), several);
    with_numbers(codec.kind, DType::f32, [&](auto kind, float) {
        combine_kernel<decltype(kind)::kValue>
            <<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(from, senders, hosts * bytes,
                                                                       to);
    });
    check_launch("combine codes");
}

}  // namespace ferry::zero::cuda
