// Codes as values, or added to them.
#include "decode.h"

#include "launch.h"

namespace ferry::zero::cuda {
namespace {

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

template <CodecKind kKind, bool kAdd, class T>
void start_decode(const Runs& runs, T* values, const Several& several, cudaStream_t stream) {
    const dim3 grid = grid_of(ceil_div(runs.count, int64_t{kQuad} * kQuads * kThreads), several);
    decode_kernel<kKind, kAdd><<<grid, kThreads, 0, stream>>>(runs, values);
    check_launch("decode");
}

}  // namespace

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

}  // namespace ferry::zero::cuda
