// What the kernels of codecs share: runs of values and their parts, four elements at a time. All
// are compiled without contraction (cmake/cuda.cmake): every product and every sum is rounded by
// itself, as the processor's are.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "base/cuda_values.h"
#include "zero/codec.h"

namespace ferry::zero::cuda {

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
__device__ inline float nan_of_codes() { return __uint_as_float(0x7fc00000u); }
__device__ inline float with_their_nan(float value) {
    return isnan(value) ? nan_of_codes() : value;
}

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

template <CodecKind kKind>
__device__ int64_t code_bytes(int64_t elements) {  // of whole blocks
    constexpr int kOfByte = kKind == CodecKind::int8 ? 1 : kKind == CodecKind::int4 ? 2 : 8;
    return elements / kOfByte;
}

}  // namespace ferry::zero::cuda
