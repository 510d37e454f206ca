// Rotation of a head's halves where a norm has them at hand: heads of 128 bf16 elements, of which a
// thread of eight holds packs of both halves.
#pragma once

#include "norm_row.h"

namespace ferry::ops::cuda {

constexpr int64_t kRotatedHead = 128;

// The plan that a head of kRotatedHead has: its k-th pack of a thread is of the k-th half.
template <int kRow, int kHeld, Lie kLie>
constexpr bool rotates() {
    return kRow * kHeld * kPack == kRotatedHead && kHeld == 2 && kLie == Lie::whole;
}

// Null angles: nothing turns.
struct Rotation {
    const float2* angles = nullptr;  // cosine and sine, [positions, kRotatedHead / 2]
    int64_t sequence = 0;
    const int32_t* document_start = nullptr;
    bool inverse = false;
};
inline bool rotates_heads(const float* angles, int64_t n) {
    return angles != nullptr && n == kRotatedHead && reinterpret_cast<uintptr_t>(angles) % 16 == 0;
}
inline Rotation rotation_of(const Rope& rope, const float* angles) {
    return {reinterpret_cast<const float2*>(angles), rope.sequence, rope.document_start,
            rope.inverse};
}

// Which product is rounded first is said here: left to the compiler, it differs from kernel to
// kernel.
__device__ inline void rotate_pair(float& a, float& b, float c, float s) {
    const float was = a;
    a = __fmaf_rn(was, c, -__fmul_rn(b, s));
    b = __fmaf_rn(was, s, __fmul_rn(b, c));
}

// Where the angles of this thread's elements of a row's heads are: two of them each.
__device__ inline const float4* angles_of(const Rotation& rotation, int64_t row) {
    // 32 bits, for a division of 64 costs as much as the rest.
    int64_t position = static_cast<uint32_t>(row) % static_cast<uint32_t>(rotation.sequence);
    if (rotation.document_start != nullptr) position -= rotation.document_start[row];
    const int64_t col = static_cast<int>(threadIdx.x) % (kRotatedHead / 2 / kPack) * kPack;
    return reinterpret_cast<const float4*>(rotation.angles + position * (kRotatedHead / 2) + col);
}

// The same elements of a head's halves, of the thread's packs of both.
template <class Angles>
__device__ void rotate_packs(const Rotation& rotation, const Angles& angles, Pack& first,
                             Pack& second) {
#pragma unroll
    for (int i = 0; i < kPack; i += 2) {
        const float4 two = angles[i / 2];
        rotate_pair(first.at[i], second.at[i], two.x, rotation.inverse ? -two.y : two.y);
        rotate_pair(first.at[i + 1], second.at[i + 1], two.z, rotation.inverse ? -two.w : two.w);
    }
}

__device__ inline void rotate_packs(const Rotation& rotation, int64_t row, Pack& first,
                                    Pack& second) {
    rotate_packs(rotation, angles_of(rotation, row), first, second);
}

__device__ inline uint4 bf16_words(const Pack& pack) {
    const auto& v = pack.at;
    return make_uint4(pair_of(v[0], v[1], DType::bf16), pair_of(v[2], v[3], DType::bf16),
                      pair_of(v[4], v[5], DType::bf16), pair_of(v[6], v[7], DType::bf16));
}

// The angles of the row whose heads were turned last.
struct HeadAngles {
    float4 held[kPack / 2] = {};
    int64_t of_row = -1;
    __device__ void turn(const Rotation& rotation, int64_t row, uint4& first, uint4& second) {
        if (row != of_row) {
            const float4* angles = angles_of(rotation, row);
#pragma unroll
            for (int i = 0; i < kPack / 2; ++i) held[i] = angles[i];
            of_row = row;
        }
        Pack low = widen_pack({first, {}}, DType::bf16, kPack);
        Pack high = widen_pack({second, {}}, DType::bf16, kPack);
        rotate_packs(rotation, held, low, high);
        first = bf16_words(low);
        second = bf16_words(high);
    }
};

}  // namespace ferry::ops::cuda
