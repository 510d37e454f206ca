// Values as codes, and whether codecs run here; a stream of their own.
#include "encode.h"

#include "launch.h"

namespace ferry::zero::cuda {
namespace {

// The elements of a warp of the kernel of signs: four threads go down the rows of a block, or of
// several small ones, and each adds four of the sixteen sums.
__host__ __device__ int64_t signs_of_threads(int block) { return block > kChunk ? block : kChunk; }

// What four threads have of a block, and its scale.
struct Magnitudes {
    float sums[kQuad] = {};
    uint32_t largest = 0;

    __device__ void add(float value, int k) {
        sums[k] = sums[k] + fabsf(value);
        largest = max(largest, magnitude_bits(value));
    }
    // Whether it is coded.
    __device__ bool finish(int block, bool writes, float* scale) {
        for (int apart = 2; apart > 0; apart /= 2) {
            for (float& sum : sums) sum = sum + __shfl_xor_sync(kAll, sum, apart);
            largest = max(largest, __shfl_xor_sync(kAll, largest, apart));
        }
        const float all = (sums[0] + sums[2]) + (sums[1] + sums[3]);
        const float top = __uint_as_float(largest);
        if (writes) *scale = is_coded(top) ? all / static_cast<float>(block) : scale_of_none(top);
        return is_coded(top);
    }
};

// The signs of kChunk elements, of which each of four threads has four bits a row. Two words leave
// from each.
__device__ void put_signs(const uint32_t (&rows)[kRow], int quarter, std::byte* codes) {
#pragma unroll
    for (int pair = 0; pair < kRow / 2; ++pair) {
        uint32_t word = (rows[2 * pair] | rows[2 * pair + 1] << 16) << (kQuad * quarter);
        word |= __shfl_xor_sync(kAll, word, 1);
        word |= __shfl_xor_sync(kAll, word, 2);
        if (pair / 2 == quarter) put_word(codes, pair * 4, word);
    }
}

template <class T>
__device__ void encode_signs(const T* values, int block, int lane, std::byte* scales,
                             std::byte* codes) {
    const int64_t span = signs_of_threads(block), first = lane / 4 * span;
    const int quarter = lane % 4;
    Magnitudes of_block;
    for (int64_t at = first; at < first + span; at += kChunk) {
        Quad quads[kRow];
#pragma unroll
        for (int row = 0; row < kRow; ++row)
            quads[row] = load_quad(values + at + row * kRow + quarter * kQuad);
        uint32_t signs[kRow];
#pragma unroll
        for (int row = 0; row < kRow; ++row) {
            signs[row] = 0;
            for (int k = 0; k < kQuad; ++k) {
                of_block.add(quads[row].at[k], k);
                signs[row] |= (__float_as_uint(quads[row].at[k]) >> 31) << k;
            }
            const int64_t end = at + (row + 1) * kRow;
            if (row % 4 != 3 || (end & (block - 1)) != 0) continue;
            const int64_t begin = end - block;
            const bool coded = of_block.finish(block, quarter == 0,
                                               reinterpret_cast<float*>(scales) + begin / block);
            of_block = {};
            if (coded) continue;
#pragma unroll
            for (int before = 0; before <= row; ++before)
                signs[before] = at + before * kRow >= begin ? 0 : signs[before];
            for (int64_t chunk = begin; chunk < at; chunk += kChunk) {
                put_word(codes, chunk / 8 + quarter * 8, 0);
                put_word(codes, chunk / 8 + quarter * 8 + 4, 0);
            }
        }
        put_signs(signs, quarter, codes + at / 8);
    }
}

__host__ __device__ int64_t tile_of(CodecKind kind, int block) {
    return kind == CodecKind::sign ? kWarp / 4 * signs_of_threads(block) : kTile;
}
__host__ __device__ int64_t whole_tiles(const Runs& runs, CodecKind kind) {
    return runs.whole ? runs.count / tile_of(kind, runs.block) : 0;
}

// A warp a tile, and behind the tiles a block.
template <CodecKind kKind, class T>
__global__ void __launch_bounds__(kThreads) encode_kernel(const T* values, Runs runs) {
    const int64_t warp = int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarp;
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int64_t tiles = whole_tiles(runs, kKind), tile = tile_of(kKind, runs.block);
    const int64_t first = warp < tiles ? warp * tile : tiles * tile + (warp - tiles) * runs.block;
    if (first >= runs.count) return;
    const T* from = values + blockIdx.y * runs.values_apart + first;
    std::byte* part = runs.scales + blockIdx.y * runs.parts_apart;
    std::byte* scales = part + (first >> runs.block_bits) * int64_t{sizeof(float)};
    std::byte* codes = part + (runs.codes - runs.scales) + code_bytes<kKind>(first);
    if (warp >= tiles) {
        const auto count = static_cast<int>(min(int64_t{runs.block}, runs.count - first));
        encode_slowly<kKind>(from, count, lane, scales, codes);
    } else if constexpr (kKind == CodecKind::sign) {
        encode_signs(from, runs.block, lane, scales, codes);
    } else {
        encode_tile<kKind>(from, runs.block, lane, scales, codes);
    }
}

}  // namespace

void encode(const Codec& codec, DType type, const void* values, int64_t count, Part part,
            int64_t first, const Several& several, void* stream) {
    const Runs runs = runs_of(codec, part, first, count, values, type, several);
    if (count == 0) return;
    const int64_t tiles = whole_tiles(runs, codec.kind);
    const int64_t rest = count - tiles * tile_of(codec.kind, runs.block);
    const int64_t warps = tiles + ceil_div(rest, codec.block);
    const dim3 grid = grid_of(ceil_div(warps, kWarps), several);
    with_kind(codec.kind, type, [&](auto kind, auto element) {
        using T = decltype(element);
        encode_kernel<decltype(kind)::kValue>
            <<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
                static_cast<const T*>(values), runs);
    });
    check_launch("encode");
}

bool available() {
    int devices = 0;
    cudaFuncAttributes attributes;
    const bool runs =
        cudaGetDeviceCount(&devices) == cudaSuccess && devices > 0 &&
        cudaFuncGetAttributes(&attributes, encode_kernel<CodecKind::int8, float>) == cudaSuccess;
    cudaGetLastError();  // leaves no error behind for who asks next
    return runs;
}

Beside::Beside(const Codec& codec, DType type) {
    // First: a build for other GPUs fails here, with nothing to give back.
    with_kind(codec.kind, type, [&](auto kind, auto element) {
        cudaFuncAttributes attributes;
        demand(cudaFuncGetAttributes(&attributes,
                                     encode_kernel<decltype(kind)::kValue, decltype(element)>),
               "cudaFuncGetAttributes");
    });
    int least = 0, most = 0;
    demand(cudaDeviceGetStreamPriorityRange(&least, &most), "cudaDeviceGetStreamPriorityRange");
    cudaStream_t stream = nullptr;
    demand(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, most),
           "cudaStreamCreateWithPriority");
    stream_ = stream;
    cudaEvent_t event = nullptr;
    demand(cudaEventCreateWithFlags(&event, cudaEventDisableTiming | cudaEventBlockingSync),
           "cudaEventCreateWithFlags");
    event_ = event;
}

Beside::~Beside() {
    if (event_) cudaEventDestroy(static_cast<cudaEvent_t>(event_));
    if (stream_) cudaStreamDestroy(static_cast<cudaStream_t>(stream_));
}

void Beside::wait() {
    const auto event = static_cast<cudaEvent_t>(event_);
    demand(cudaEventRecord(event, static_cast<cudaStream_t>(stream_)), "cudaEventRecord");
    demand(cudaEventSynchronize(event), "cudaEventSynchronize");
}

}  // namespace ferry::zero::cuda
