// The codecs as kernels (codec.h), and what keeps gradients (feedback.h). Compiled without
// contraction (cmake/cuda.cmake): every product and every sum is rounded by itself, as the
// processor's are.
#include <cuda_runtime.h>

#include <bit>
#include <string>

#include "base/cuda_values.h"
#include "ferry/device.h"
#include "ferry/error.h"
#include "ferry/units.h"
#include "zero/codec.h"
#include "zero/feedback.h"

namespace ferry::zero::cuda {
namespace {

constexpr int kThreads = 256, kWarp = 32, kWarps = kThreads / kWarp;
constexpr unsigned kAll = 0xffffffffu;  // threads of a warp
constexpr int kQuad = 4;                // elements that a thread loads and stores at once
constexpr int kSteps = 16;              // quads of a thread's tile
constexpr int64_t kTile = int64_t{kSteps} * kQuad * kWarp;  // elements of a warp's
static_assert(kTile % kLargestBlock == 0 && kLargestBlock % kLeastBlock == 0);
constexpr int kRow = 16;     // elements that a sum of magnitudes adds to at once
constexpr int kChunk = 256;  // elements whose signs leave together
constexpr int kLeaf = 4096;

// The one NaN that codecs make. The processor's products and sums hand it on; a GPU's make one of
// their own.
__device__ float nan_of_codes() { return __uint_as_float(0x7fc00000u); }
__device__ float with_their_nan(float value) { return isnan(value) ? nan_of_codes() : value; }

// Runs of values and their parts, from the first element that is coded on. `whole`: quads of values
// lie at multiples of their size.
struct Runs {
    std::byte *scales, *codes;
    int64_t count;                      // elements of each
    int64_t values_apart, parts_apart;  // elements, bytes
    int block;                          // elements, 2^block_bits
    int block_bits;
    bool whole;
};

struct Quad {
    float at[kQuad];
};

template <class T>
struct alignas(sizeof(T) * kQuad) RawQuad {
    T at[kQuad];
};
template <class T>
__device__ Quad load_quad(const T* at) {
    const RawQuad<T> raw = *reinterpret_cast<const RawQuad<T>*>(at);
    Quad quad;
    for (int k = 0; k < kQuad; ++k) quad.at[k] = widened(raw.at[k]);
    return quad;
}
template <class T>
__device__ void store_quad(const Quad& quad, T* at) {
    RawQuad<T> raw;
    for (int k = 0; k < kQuad; ++k) narrow(quad.at[k], raw.at[k]);
    *reinterpret_cast<RawQuad<T>*>(at) = raw;
}

// ---------------------------------------------------------------- encode

template <CodecKind kKind>
constexpr float kLevels = kKind == CodecKind::int8 ? 127 : 7;

__device__ uint32_t magnitude_bits(float value) { return __float_as_uint(value) & 0x7fffffffu; }
__device__ bool is_coded(float largest) { return largest >= kLeastCoded && largest < kBeyondCoded; }
// Of a block that is not coded.
__device__ float scale_of_none(float largest) {
    return largest < kBeyondCoded ? 0 : nan_of_codes();
}

template <CodecKind kKind>
__device__ float factor_of(float largest) {
    return is_coded(largest) ? kLevels<kKind> / largest : 0;
}
// A block that is not coded has a factor of zero and values that may be anything.
__device__ uint32_t code_of(float value, float factor) {
    return factor > 0 ? static_cast<uint32_t>(__float2int_rn(value * factor)) : 0;
}

// The largest of the warp's threads, or of those of each half.
__device__ uint32_t largest_of(uint32_t bits, bool of_halves) {
    for (int apart = kWarp / 4; apart > 0; apart /= 2)
        bits = max(bits, __shfl_xor_sync(kAll, bits, apart));
    return of_halves ? bits : max(bits, __shfl_xor_sync(kAll, bits, kWarp / 2));
}

// A block in any place and of any size, by a warp. `values`: a pointer, or what is like one.
template <CodecKind kKind, class Values>
__device__ void encode_slowly(Values values, int count, int lane, std::byte* scale,
                              std::byte* codes) {
    uint32_t bits = 0;
    for (int i = lane; i < count; i += kWarp) bits = max(bits, magnitude_bits(widened(values[i])));
    const float largest = __uint_as_float(largest_of(bits, false));
    float sum = 0;
    if (kKind == CodecKind::sign) {
        for (int i = lane; i < count && lane < kRow; i += kRow)
            sum = sum + fabsf(widened(values[i]));
        for (int apart = kRow / 2; apart > 0; apart /= 2)
            sum = sum + __shfl_xor_sync(kAll, sum, apart);
    }
    const float coded =
        kKind == CodecKind::sign ? sum / static_cast<float>(count) : largest / kLevels<kKind>;
    if (lane == 0)
        *reinterpret_cast<float*>(scale) = is_coded(largest) ? coded : scale_of_none(largest);
    const float factor = factor_of<kKind>(largest);
    auto* to = reinterpret_cast<uint8_t*>(codes);
    if (kKind == CodecKind::int8) {
        for (int i = lane; i < count; i += kWarp)
            to[i] = static_cast<uint8_t>(code_of(widened(values[i]), factor));
    } else if (kKind == CodecKind::int4) {
        const int half = (count + 1) / 2;
        for (int i = lane; i < half; i += kWarp) {
            const uint32_t low = code_of(widened(values[i]), factor);
            const uint32_t high = half + i < count ? code_of(widened(values[half + i]), factor) : 0;
            to[i] = static_cast<uint8_t>((low & 15) | (high & 15) << 4);
        }
    } else {
        for (int i = lane * 8; i < count; i += kWarp * 8) {
            uint32_t signs = 0;
            for (int k = 0; k < min(8, count - i); ++k)
                signs |= (__float_as_uint(widened(values[i + k])) >> 31) << k;
            to[i / 8] = static_cast<uint8_t>(factor > 0 ? signs : 0);
        }
    }
}

__device__ void put_word(std::byte* codes, int64_t at, uint32_t word) {
    *reinterpret_cast<uint32_t*>(codes + at) = word;
}

// Byte j of a block has code j in its low half, and code j + block / 2 in its high one: that is the
// same thread's of a later step, or in a small block another thread's of the same step.
__device__ void put_halves(const uint32_t (&words)[kSteps], int block, int lane, std::byte* codes) {
    const auto put = [&](int step, uint32_t high) {
        const int element = (step * kWarp + lane) * kQuad;
        const int within = element & (block - 1);
        put_word(codes, (element - within) / 2 + within, words[step] | high << 4);
    };
    const int lanes = block / 2 / kQuad, steps = lanes / kWarp;
    if (steps == 0) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            const uint32_t high = __shfl_down_sync(kAll, words[step], static_cast<unsigned>(lanes));
            if ((lane & lanes) == 0) put(step, high);
        }
    }
#pragma unroll
    for (int apart = 1; apart < kSteps; apart *= 2) {
        if (apart != steps) continue;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            if ((step & apart) == 0) put(step, words[step + apart]);
        }
    }
}

// kTile elements by a warp, all of them in registers: four of each step's 128 are a thread's.
template <CodecKind kKind, class Values>
__device__ void encode_tile(Values values, int block, int lane, std::byte* scales,
                            std::byte* codes) {
    Quad quads[kSteps];
    uint32_t largest[kSteps];
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
        quads[step] = load_quad(values + (step * kWarp + lane) * kQuad);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
        largest[step] = 0;
        for (const float value : quads[step].at)
            largest[step] = max(largest[step], magnitude_bits(value));
    }
    const int steps = block / (kWarp * kQuad);  // of a block; 0: of half a step
#pragma unroll
    for (int apart = 1; apart < kSteps; apart *= 2) {
        if (apart >= steps) continue;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            if ((step & apart) != 0) continue;
            largest[step] = max(largest[step], largest[step + apart]);
            largest[step + apart] = largest[step];
        }
    }
    uint32_t words[kSteps];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
        const float top = __uint_as_float(largest_of(largest[step], steps == 0));
        // A thread divides once: the block's first for its scale, its neighbour for the factor.
        const int element = (step * kWarp + lane) * kQuad;
        const bool leads = (element & (block - 1)) == 0;
        const float once = (leads ? top : kLevels<kKind>) / (leads ? kLevels<kKind> : top);
        if (leads)
            reinterpret_cast<float*>(scales)[element / block] =
                is_coded(top) ? once : scale_of_none(top);
        const float factor = __shfl_sync(kAll, is_coded(top) ? once : 0, lane | 1);
        constexpr uint32_t kBits = kKind == CodecKind::int8 ? 255 : 15;
        words[step] = 0;
        for (int k = 0; k < kQuad; ++k)
            words[step] |= (code_of(quads[step].at[k], factor) & kBits) << (8 * k);
        if (kKind == CodecKind::int8) put_word(codes, element, words[step]);
    }
    if (kKind == CodecKind::int4) put_halves(words, block, lane, codes);
}

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

template <CodecKind kKind>
__device__ int64_t code_bytes(int64_t elements) {  // of whole blocks
    constexpr int kOfByte = kKind == CodecKind::int8 ? 1 : kKind == CodecKind::int4 ? 2 : 8;
    return elements / kOfByte;
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

// ---------------------------------------------------------------- decode

// A part from the first element that is decoded on.
struct Coded {
    const std::byte *scales, *codes;
    int64_t count;
    int block, block_bits;
};

__device__ float with_sign(float scale, uint32_t bit) {
    return __uint_as_float(__float_as_uint(scale) ^ bit << 31);
}
__device__ float signed_half(uint32_t bits) {
    return static_cast<float>(static_cast<int32_t>(bits << 28) >> 28);
}

// Where four elements of a whole block are, from a multiple of four on: from the scales on, alike
// in every part of as many elements.
struct Place {
    int64_t scale, codes;  // bytes
    int shift;             // of the first one's code
};
template <CodecKind kKind>
__device__ Place place_of(const Coded& part, int64_t i) {
    Place place{(i >> part.block_bits) * int64_t{sizeof(float)}, part.codes - part.scales, 0};
    if (kKind == CodecKind::int8) {
        place.codes += i;
    } else if (kKind == CodecKind::int4) {
        const int within = static_cast<int>(i) & (part.block - 1), half = part.block / 2;
        const bool high = within >= half;
        place.codes += (i - within) / 2 + (high ? within - half : within);
        place.shift = high ? 4 : 0;
    } else {
        place.codes += i / 8;
        place.shift = static_cast<int>(i % 8);
    }
    return place;
}
// With any NaN.
template <CodecKind kKind>
__device__ Quad decoded_at(const std::byte* scales, const Place& place) {
    const float scale = *reinterpret_cast<const float*>(scales + place.scale);
    Quad quad;
    if (kKind == CodecKind::sign) {
        const uint32_t bits = static_cast<uint32_t>(scales[place.codes]) >> place.shift;
        for (int k = 0; k < kQuad; ++k) quad.at[k] = with_sign(scale, bits >> k & 1);
        return quad;
    }
    const uint32_t word = *reinterpret_cast<const uint32_t*>(scales + place.codes) >> place.shift;
    for (int k = 0; k < kQuad; ++k) {
        const uint32_t bits = word >> (8 * k);
        const float code = kKind == CodecKind::int8 ? static_cast<float>(static_cast<int8_t>(bits))
                                                    : signed_half(bits);
        quad.at[k] = code * scale;
    }
    return quad;
}

// One element of any block.
template <CodecKind kKind>
__device__ float decoded_one(const Coded& part, int64_t i) {
    const int64_t begin = i >> part.block_bits << part.block_bits;
    const auto within = static_cast<int>(i - begin);
    const float scale = reinterpret_cast<const float*>(part.scales)[i >> part.block_bits];
    const std::byte* codes = part.codes + code_bytes<kKind>(begin);
    if (kKind == CodecKind::int8)
        return static_cast<float>(static_cast<int8_t>(codes[within])) * scale;
    if (kKind == CodecKind::sign)
        return with_sign(scale, static_cast<uint32_t>(codes[within / 8]) >> (within % 8) & 1);
    const auto count = static_cast<int>(min(int64_t{part.block}, part.count - begin));
    const int half = (count + 1) / 2;
    const bool high = within >= half;
    const auto byte = static_cast<uint32_t>(codes[high ? within - half : within]);
    return signed_half(byte >> (high ? 4 : 0)) * scale;
}

constexpr int kQuads = 4;  // of a thread, a block of threads' apart

template <CodecKind kKind, bool kAdd, class T>
__global__ void __launch_bounds__(kThreads) decode_kernel(Runs runs, T* values) {
    const std::byte* scales = runs.scales + blockIdx.y * runs.parts_apart;
    const Coded part{scales, scales + (runs.codes - runs.scales), runs.count, runs.block,
                     runs.block_bits};
    T* to = values + blockIdx.y * runs.values_apart;
    const int64_t first = (int64_t{blockIdx.x} * kQuads * kThreads + threadIdx.x) * kQuad;
    const int64_t whole = runs.whole ? runs.count >> runs.block_bits << runs.block_bits : 0;
    Quad quads[kQuads];
#pragma unroll
    for (int k = 0; k < kQuads; ++k) {
        const int64_t i = first + int64_t{k} * kThreads * kQuad;
        if (i >= whole) continue;
        quads[k] = decoded_at<kKind>(part.scales, place_of<kKind>(part, i));
        const Quad before = kAdd ? load_quad(to + i) : Quad();
        for (int j = 0; j < kQuad; ++j) {
            const float value = quads[k].at[j];
            quads[k].at[j] = with_their_nan(kAdd ? before.at[j] + value : value);
        }
    }
#pragma unroll
    for (int k = 0; k < kQuads; ++k) {
        const int64_t i = first + int64_t{k} * kThreads * kQuad;
        if (i < whole) {
            store_quad(quads[k], to + i);
            continue;
        }
        for (int64_t one = i; one < min(i + kQuad, runs.count); ++one) {
            const float value = decoded_one<kKind>(part, one);
            narrow(with_their_nan(kAdd ? widened(to[one]) + value : value), to[one]);
        }
    }
}

// ---------------------------------------------------------------- sum

// The squares of a leaf are added as ops::Ops::round_gradient says: by lanes of sixteen, in order.
__device__ float leaf_of(const float* squares) {
    float sum = 0;
#pragma unroll 16
    for (int i = 0; i < kLeaf; i += kRow) sum = sum + squares[i + threadIdx.x];
    for (int half = kRow / 2; half >= 1; half /= 2)
        sum = sum + __shfl_down_sync(0xffffu, sum, static_cast<unsigned>(half), kRow);
    return sum;
}

// A block of threads a leaf of whole blocks of codes.
template <CodecKind kKind, class T>
__global__ void __launch_bounds__(kThreads)
    sum_kernel(Runs parts, int senders, T* wire, float* leaves) {
    __shared__ float4 room[kLeaf / kQuad];
    const int64_t first = int64_t{blockIdx.x} * kLeaf;
    const Coded part{parts.scales, parts.codes, parts.count, parts.block, parts.block_bits};
    for (int quad = static_cast<int>(threadIdx.x); quad < kLeaf / kQuad; quad += kThreads) {
        const int64_t i = first + quad * kQuad;
        float squares[kQuad] = {};
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
            for (int k = 0; k < kQuad; ++k) {
                T once;
                narrow(sum.at[k], once);
                const float rounded = widened(once);
                const float value = fabsf(rounded) < 0x1p-60F ? 0.0f : rounded;
                squares[k] = value * value;
            }
        }
        room[quad] = make_float4(squares[0], squares[1], squares[2], squares[3]);
    }
    __syncthreads();
    if (threadIdx.x >= kRow) return;
    const float leaf = leaf_of(reinterpret_cast<const float*>(room));
    if (threadIdx.x == 0) leaves[blockIdx.x] = leaf;
}

// ---------------------------------------------------------------- combine

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

// ---------------------------------------------------------------- gradients that are kept

// A block of threads a leaf of all runs.
template <class T>
__global__ void __launch_bounds__(kThreads)
    keep_kernel(const float* gradient, int ranks, int64_t apart, int64_t count, T* kept,
                float* leaves) {
    __shared__ float4 room[kLeaf / kQuad];
    const int64_t first = int64_t{blockIdx.x} * kLeaf;
    float sum = 0;
    for (int rank = 0; rank < ranks; ++rank) {
        const float* from = gradient + rank * apart + first;
        T* to = kept + rank * count + first;
        for (int quad = static_cast<int>(threadIdx.x); quad < kLeaf / kQuad; quad += kThreads) {
            const Quad values = load_quad(from + quad * kQuad);
            store_quad(values, to + quad * kQuad);
            float squares[kQuad];
            for (int k = 0; k < kQuad; ++k) {
                T once;
                narrow(values.at[k], once);
                const float rounded = widened(once);
                const float value = fabsf(rounded) < 0x1p-60F ? 0.0f : rounded;
                squares[k] = value * value;
            }
            room[quad] = make_float4(squares[0], squares[1], squares[2], squares[3]);
        }
        __syncthreads();
        if (threadIdx.x < kRow) sum = sum + leaf_of(reinterpret_cast<const float*>(room));
        __syncthreads();  // the next run's squares take the room
    }
    if (threadIdx.x == 0) leaves[blockIdx.x] = sum;
}

// ---------------------------------------------------------------- launches

void demand(cudaError_t status, const char* call) {
    // After enqueued work has failed every call says so, and Device::check() names it.
    if (status == cudaSuccess || gpu_work_failed()) return;
    if (status == cudaErrorMemoryAllocation) throw out_of_gpu_memory(call);
    throw Error(
        Trouble::internal,
        {.what = "a codec on the GPU failed",
         .where = call,
         .measured = std::string(cudaGetErrorName(status)) + ", " + cudaGetErrorString(status),
         .remedy = "set zero.compress.gradients and weights to none, or build "
                   "for this GPU (FERRY_CUDA_ARCHITECTURES)"});
}
void check_launch(const char* kernel) { demand(cudaGetLastError(), kernel); }

bool aligned(const void* pointer, int64_t bytes) {
    return reinterpret_cast<uintptr_t>(pointer) % static_cast<uintptr_t>(bytes) == 0;
}

Runs runs_of(const Codec& codec, Part part, int64_t first, int64_t count, const void* values,
             DType type, const Several& several) {
    FERRY_CHECK(codec.on() && count >= 0 && first % codec.block == 0 &&
                first + count <= part.count);
    FERRY_CHECK(aligned(part.data, 4) && several.parts_apart % 4 == 0, "codes lie in words");
    FERRY_CHECK(aligned(values, size_of(type)));
    const bool whole = aligned(values, kQuad * size_of(type)) && several.values_apart % kQuad == 0;
    return {.scales = part.scales(codec, first),
            .codes = part.codes(codec, first),
            .count = count,
            .values_apart = several.values_apart,
            .parts_apart = several.parts_apart,
            .block = static_cast<int>(codec.block),
            .block_bits = std::countr_zero(static_cast<uint64_t>(codec.block)),
            .whole = whole};
}

// call(Kind<kind>(), T()): templates for values. Only gradients and weights are of other types.
template <CodecKind kKind>
struct Kind {
    static constexpr CodecKind kValue = kKind;
};
template <class Call>
void with_type(DType type, const Call& call) {
    switch (type) {
        case DType::f32:
            return call(float());
        case DType::bf16:
            return call(__nv_bfloat16());
        case DType::f16:
            return call(__half());
    }
    FERRY_CHECK(false, "unknown type");
}
template <class Call>
void with_numbers(CodecKind kind, DType type, const Call& call) {
    FERRY_CHECK(kind == CodecKind::int8 || kind == CodecKind::int4, "not a codec of gradients");
    with_type(type, [&](auto element) {
        if (kind == CodecKind::int8)
            call(Kind<CodecKind::int8>(), element);
        else
            call(Kind<CodecKind::int4>(), element);
    });
}
template <class Call>
void with_kind(CodecKind kind, DType type, const Call& call) {
    if (kind != CodecKind::sign) return with_numbers(kind, type, call);
    FERRY_CHECK(type == DType::f32, "signs are of fp32");
    call(Kind<CodecKind::sign>(), float());
}

Part without_const(ConstPart part) { return {const_cast<std::byte*>(part.data), part.count}; }

dim3 grid_of(int64_t blocks, const Several& several) {
    return {static_cast<unsigned>(blocks), static_cast<unsigned>(several.count)};
}

template <CodecKind kKind, bool kAdd, class T>
void start_decode(const Runs& runs, T* values, const Several& several, cudaStream_t stream) {
    const dim3 grid = grid_of(ceil_div(runs.count, int64_t{kQuad} * kQuads * kThreads), several);
    decode_kernel<kKind, kAdd><<<grid, kThreads, 0, stream>>>(runs, values);
    check_launch("decode");
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

void decode(const Codec& codec, ConstPart part, int64_t first, int64_t count, DType type,
            void* values, const Several& several, void* stream) {
    const Runs runs = runs_of(codec, without_const(part), first, count, values, type, several);
    if (count == 0) return;
    with_kind(codec.kind, type, [&](auto kind, auto element) {
        using T = decltype(element);
        start_decode<decltype(kind)::kValue, false>(runs, static_cast<T*>(values), several,
                                                    static_cast<cudaStream_t>(stream));
    });
}

void decode_add(const Codec& codec, ConstPart part, int64_t first, int64_t count, float* values,
                void* stream) {
    const Runs runs = runs_of(codec, without_const(part), first, count, values, DType::f32, {});
    if (count == 0) return;
    with_kind(codec.kind, DType::f32, [&](auto kind, float) {
        start_decode<decltype(kind)::kValue, true>(runs, values, {},
                                                   static_cast<cudaStream_t>(stream));
    });
}

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

void keep(const float* gradient, int ranks, int64_t apart, int64_t count, DType wire, void* kept,
          float* leaves, void* stream) {
    FERRY_CHECK(ranks > 0 && count % kLeaf == 0 && apart % kQuad == 0, "runs of whole leaves");
    FERRY_CHECK(aligned(gradient, kQuad * 4) && aligned(kept, kQuad * size_of(wire)));
    if (count == 0) return;
    const auto blocks = static_cast<unsigned>(count / kLeaf);
    with_type(wire, [&](auto element) {
        using T = decltype(element);
        keep_kernel<<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
            gradient, ranks, apart, count, static_cast<T*>(kept), leaves);
    });
    check_launch("keep gradients");
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

// ---------------------------------------------------------------- beside the compute stream

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
