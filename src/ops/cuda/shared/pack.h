// Rows of any type and alignment, eight elements at a time.
#pragma once

#include "element.h"
#include "pack_size.h"

namespace ferry::ops::cuda {

// kPack elements of a row as fp32.
struct Pack {
    float at[kPack];
    int count;  // fewer than kPack at the end of a row, none behind it
};

__device__ inline int pack_count(int64_t cols, int64_t col) {
    return static_cast<int>(min(int64_t{kPack}, cols - col));
}
__device__ inline bool whole(const void* at, int count) {
    return count == kPack && reinterpret_cast<uintptr_t>(at) % 16 == 0;
}

// The bytes of a pack, before anything needs their values: loads that follow each other are then
// under way together. Types of 16 bits fill `low` alone.
struct RawPack {
    uint4 low, high;
};

// Elements [0, count) from `at`; zeros behind them. An element at a time where they are not whole,
// by constant indices: a run-time index would put the registers into memory.
template <class Word, int kWords>
__device__ void gather_words(const void* at, int count, uint32_t (&words)[kWords]) {
    constexpr int kOfWord = 4 / sizeof(Word);
    const auto* elements = static_cast<const Word*>(at);
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
        if (i % kOfWord == 0) words[i / kOfWord] = 0;
        if (i < count) {
            const auto element = static_cast<uint32_t>(elements[i]);
            words[i / kOfWord] |= element << (i % kOfWord * 16);
        }
    }
}

__device__ inline RawPack fetch_pack(const void* at, DType type, int count) {
    RawPack raw{};
    if (whole(at, count)) {
        raw.low = static_cast<const uint4*>(at)[0];
        if (type == DType::f32) raw.high = static_cast<const uint4*>(at)[1];
    } else if (type == DType::f32) {
        uint32_t words[8];
        gather_words<uint32_t>(at, count, words);
        raw.low = make_uint4(words[0], words[1], words[2], words[3]);
        raw.high = make_uint4(words[4], words[5], words[6], words[7]);
    } else {
        uint32_t words[4];
        gather_words<uint16_t>(at, count, words);
        raw.low = make_uint4(words[0], words[1], words[2], words[3]);
    }
    return raw;
}

// Its values as fp32.
__device__ inline Pack widen_pack(const RawPack& raw, DType type, int count) {
    const uint32_t low[4] = {raw.low.x, raw.low.y, raw.low.z, raw.low.w};
    const uint32_t high[4] = {raw.high.x, raw.high.y, raw.high.z, raw.high.w};
    Pack pack;
    pack.count = count;
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
        const auto half = static_cast<uint16_t>(low[i / 2] >> (i % 2 * 16));
        if (type == DType::f32) {
            pack.at[i] = __uint_as_float(i < 4 ? low[i % 4] : high[i % 4]);
        } else if (type == DType::bf16) {
            pack.at[i] = __uint_as_float(uint32_t{half} << 16);
        } else {
            pack.at[i] = __half2float(__ushort_as_half(half));
        }
    }
    return pack;
}

__device__ inline uint32_t pair_of(float first, float second, DType type) {
    if (type == DType::bf16) {
        const __nv_bfloat162 both = __floats2bfloat162_rn(first, second);
        return *reinterpret_cast<const uint32_t*>(&both);
    }
    const __half2 both = __floats2half2_rn(first, second);
    return *reinterpret_cast<const uint32_t*>(&both);
}

// Rounded once, to nearest even.
__device__ inline void put_pack(const Pack& pack, void* at, DType type) {
    const auto& v = pack.at;
    if (type == DType::f32) {
        auto* to = static_cast<float*>(at);
        if (whole(at, pack.count)) {
            reinterpret_cast<float4*>(at)[0] = make_float4(v[0], v[1], v[2], v[3]);
            reinterpret_cast<float4*>(at)[1] = make_float4(v[4], v[5], v[6], v[7]);
            return;
        }
#pragma unroll
        for (int i = 0; i < kPack; ++i) {
            if (i < pack.count) to[i] = v[i];
        }
        return;
    }
    uint32_t words[kPack / 2];
#pragma unroll
    for (int i = 0; i < kPack / 2; ++i) words[i] = pair_of(v[2 * i], v[2 * i + 1], type);
    if (whole(at, pack.count)) {
        *static_cast<uint4*>(at) = make_uint4(words[0], words[1], words[2], words[3]);
        return;
    }
    auto* to = static_cast<uint16_t*>(at);
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
        if (i < pack.count) to[i] = static_cast<uint16_t>(words[i / 2] >> (i % 2 * 16));
    }
}

template <class AnyView>
__device__ const void* place_of(const AnyView& v, int64_t row, int64_t col) {
    return static_cast<const char*>(v.data) + (row * v.ld + col) * (v.type == DType::f32 ? 4 : 2);
}

// Elements [col, col + count) of a row of a View or ConstView; zeros behind them.
template <class AnyView>
__device__ RawPack fetch_pack(const AnyView& v, int64_t row, int64_t col, int count) {
    return fetch_pack(place_of(v, row, col), v.type, count);
}
template <class AnyView>
__device__ Pack load_pack(const AnyView& v, int64_t row, int64_t col, int count) {
    return widen_pack(fetch_pack(v, row, col, count), v.type, count);
}
__device__ inline void store_pack(const Pack& pack, const View& v, int64_t row, int64_t col) {
    put_pack(pack, const_cast<void*>(place_of(v, row, col)), v.type);
}

// Calls body(col, count) for the packs of a row that this thread of its block has.
template <int kThreads, class Body>
__device__ void each_pack(int64_t cols, Body body) {
    for (int64_t col = int64_t{threadIdx.x} * kPack; col < cols; col += int64_t{kThreads} * kPack)
        body(col, pack_count(cols, col));
}

// A thread a pack: where its own begins. Blocks of a row follow each other.
struct Cell {
    int64_t row, col;
    int count;  // none behind the row
};
__device__ inline Cell cell_of(int64_t cols) {
    const auto across = static_cast<unsigned>(ceil_div(cols, int64_t{blockDim.x} * kPack));
    const unsigned piece = blockIdx.x % across;
    const int64_t col = (int64_t{piece} * blockDim.x + threadIdx.x) * kPack;
    return {blockIdx.x / across, col, pack_count(cols, col)};
}

// The launch of a kernel of cells: as many threads a block as share the row out evenly.
struct Cells {
    unsigned blocks, threads;
};
inline Cells cells_of(int64_t rows, int64_t cols) {
    const int64_t packs = ceil_div(cols, kPack), across = ceil_div(packs, 256);
    const int64_t threads = round_up(ceil_div(packs, across), 32);
    return {static_cast<unsigned>(rows * ceil_div(packs, threads)), static_cast<unsigned>(threads)};
}

}  // namespace ferry::ops::cuda
