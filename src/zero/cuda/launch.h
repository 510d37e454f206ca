// Starting the kernels of codecs: checks of what they are given, and templates for it.
#pragma once

#include <cuda_runtime.h>

#include <bit>
#include <cstdint>
#include <string>

#include "ferry/device.h"
#include "ferry/error.h"
#include "ferry/units.h"
#include "quads.h"

namespace ferry::zero::cuda {

inline void demand(cudaError_t status, const char* call) {
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
inline void check_launch(const char* kernel) { demand(cudaGetLastError(), kernel); }

inline bool aligned(const void* pointer, int64_t bytes) {
    return reinterpret_cast<uintptr_t>(pointer) % static_cast<uintptr_t>(bytes) == 0;
}

inline Runs runs_of(const Codec& codec, Part part, int64_t first, int64_t count, const void* values,
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

inline Part without_const(ConstPart part) {
    return {const_cast<std::byte*>(part.data), part.count};
}

inline dim3 grid_of(int64_t blocks, const Several& several) {
    return {static_cast<unsigned>(blocks), static_cast<unsigned>(several.count)};
}

}  // namespace ferry::zero::cuda
