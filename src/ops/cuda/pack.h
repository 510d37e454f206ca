// Rows of any type and alignment, eight elements at a time.
#pragma once

#include "element.h"

namespace ferry::ops::cuda {

// Eight consecutive elements of a row: what a thread loads and stores at once where they lie at
// multiples of 16 bytes. Which thread has which elements depends on the columns alone, so a sum's
// order does too.
constexpr int kPack = 8;
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

template <class T>
__device__ Pack load_pack_of(const T* at, int count) {
    Pack pack;
    pack.count = count;
    if (whole(at, count)) {
        uint4 words[sizeof(T) * kPack / 16];
        for (int i = 0; i < static_cast<int>(sizeof(T) * kPack / 16); ++i)
            words[i] = reinterpret_cast<const uint4*>(at)[i];
        const T* elements = reinterpret_cast<const T*>(words);
        for (int i = 0; i < kPack; ++i) pack.at[i] = static_cast<float>(elements[i]);
    } else {
        for (int i = 0; i < kPack; ++i) pack.at[i] = i < count ? static_cast<float>(at[i]) : 0.0f;
    }
    return pack;
}

template <class T>
__device__ void store_pack_of(const Pack& pack, T* at) {
    if (whole(at, pack.count)) {
        uint4 words[sizeof(T) * kPack / 16];
        T* elements = reinterpret_cast<T*>(words);
        for (int i = 0; i < kPack; ++i) elements[i] = T(pack.at[i]);
        for (int i = 0; i < static_cast<int>(sizeof(T) * kPack / 16); ++i)
            reinterpret_cast<uint4*>(at)[i] = words[i];
    } else {
        for (int i = 0; i < pack.count; ++i) at[i] = T(pack.at[i]);
    }
}

// Elements [col, col + count) of a row of a View or ConstView; zeros behind them.
template <class AnyView>
__device__ Pack load_pack(const AnyView& v, int64_t row, int64_t col, int count) {
    const int64_t i = row * v.ld + col;
    switch (v.type) {
        case DType::bf16:
            return load_pack_of(static_cast<const __nv_bfloat16*>(v.data) + i, count);
        case DType::f16:
            return load_pack_of(static_cast<const __half*>(v.data) + i, count);
        default:
            return load_pack_of(static_cast<const float*>(v.data) + i, count);
    }
}
__device__ inline void store_pack(const Pack& pack, const View& v, int64_t row, int64_t col) {
    const int64_t i = row * v.ld + col;
    switch (v.type) {
        case DType::bf16:
            return store_pack_of(pack, static_cast<__nv_bfloat16*>(v.data) + i);
        case DType::f16:
            return store_pack_of(pack, static_cast<__half*>(v.data) + i);
        default:
            return store_pack_of(pack, static_cast<float*>(v.data) + i);
    }
}

// Calls body(col, count) for the packs of a row that this thread of its block has.
template <int kThreads, class Body>
__device__ void each_pack(int64_t cols, Body body) {
    for (int64_t col = int64_t{threadIdx.x} * kPack; col < cols; col += int64_t{kThreads} * kPack)
        body(col, pack_count(cols, col));
}

}  // namespace ferry::ops::cuda
