// Updates on the GPU with moments of fp32 or bf16, one thread for one or eight elements; coded.cu
// has those with codes. Compiled without contraction and with exact division and square root
// (cmake/cuda.cmake).
#include <algorithm>

#include "base/random.h"
#include "ferry/error.h"
#include "formulas.h"
#include "launch.h"
#include "memory.h"

namespace ferry::optim::cuda {
namespace {

constexpr int kTogether = 8;  // elements of a thread where all arrays allow it

// Philox4x32-10, as ferry::philox.
__device__ void philox_words(const Scalars& s, uint32_t layer, uint32_t block,
                             uint32_t (&words)[4]) {
    uint32_t c0 = s.update, c1 = 0, c2 = layer, c3 = block;
    uint32_t k0 = s.seed, k1 = static_cast<uint32_t>(Purpose::stochastic_rounding);
    for (int round = 0; round < 10; ++round) {
        const uint32_t a = __umulhi(0xD2511F53u, c0), b = __umulhi(0xCD9E8D57u, c2);
        const uint32_t a_low = 0xD2511F53u * c0, b_low = 0xCD9E8D57u * c2;
        c0 = b ^ c1 ^ k0;
        c1 = b_low;
        c2 = a ^ c3 ^ k1;
        c3 = a_low;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    words[0] = c0, words[1] = c1, words[2] = c2, words[3] = c3;
}

// A thread's eight elements are a quarter of a run of 32, and a block of random words serves two
// elements of one half of the run and two of the other: the threads of both halves draw two blocks
// each and exchange what is the other's. All threads of a warp must come here.
__device__ Pack<uint32_t, kTogether> draw_noise(const Span& span, const Scalars& s, int64_t i) {
    static_assert(kTogether == 8);
    const int64_t e = span.element + i;
    const bool upper = e % 32 >= 16;
    uint32_t mine[4], theirs[4];
    for (int k = 0; k < 2; ++k) {
        const int64_t pair = e % 16 / 2 + (upper ? 2 : 0) + k;
        uint32_t words[4];
        philox_words(s, span.layer, static_cast<uint32_t>(e / 32 * 8 + pair), words);
        for (int w = 0; w < 2; ++w) {
            mine[2 * k + w] = upper ? words[2 + w] : words[w];
            theirs[2 * k + w] = upper ? words[w] : words[2 + w];
        }
    }
    Pack<uint32_t, kTogether> noise;
    for (int k = 0; k < 4; ++k) {
        const uint32_t other = __shfl_xor_sync(0xffffffffu, theirs[k], 2);
        noise.at[k] = upper ? other : mine[k];
        noise.at[4 + k] = upper ? mine[k] : other;
    }
    return noise;
}

// The random bits of one element: noise_of() of it.
__device__ uint32_t draw_one(const Span& span, const Scalars& s, int64_t i) {
    const int64_t e = span.element + i;
    uint32_t words[4];
    philox_words(s, span.layer, static_cast<uint32_t>(e / 32 * 8 + e % 16 / 2), words);
    if (e % 32 < 16) return e % 2 == 0 ? words[0] : words[1];
    return e % 2 == 0 ? words[2] : words[3];
}

// Zeros of an absent moment.
template <int kCount>
__device__ Pack<float, kCount> load_moment(const void* array, MomentType type, int64_t i) {
    if (!array) return {};
    if (type == MomentType::f32) return load_as_f32<DType::f32, kCount>(array, i);
    return load_as_f32<DType::bf16, kCount>(array, i);
}

// `noise` has 16 random bits an element from bit `first` on, for bf16.
template <int kCount>
__device__ void store_moment(void* array, MomentType type, int64_t i,
                             const Pack<float, kCount>& values, const Pack<uint32_t, kCount>& noise,
                             int first) {
    if (!array) return;
    if (type == MomentType::f32) return store<kCount>(static_cast<float*>(array), i, values);
    Pack<uint16_t, kCount> raw;
    for (int k = 0; k < kCount; ++k) {
        const uint32_t bits = __float_as_uint(values.at[k]);
        const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
        const uint32_t random = (noise.at[k] >> first) & 0xffffu;
        raw.at[k] = static_cast<uint16_t>((nan ? bits | 0x400000u : bits + random) >> 16);
    }
    store<kCount>(static_cast<uint16_t*>(array), i, raw);
}

// The state's format, known when the kernel is compiled.
template <MomentType kMomentType, bool kIsSplit>
struct Format {
    static constexpr MomentType kMoment = kMomentType;
    static constexpr bool kSplit = kIsSplit;
};

// Counts are multiples of kTogether.
template <Method kMethod, DType kGradient, DType kWeight, class Kept>
__global__ void __launch_bounds__(kThreads, 3)
    update_kernel(const __grid_constant__ Spans spans, const __grid_constant__ Scalars s) {
    constexpr int kCount = kTogether;
    constexpr MomentType kMoment = Kept::kMoment;
    const int which = span_of_block(spans);
    const Span& span = spans.at[which];
    const int64_t i = thread_of_span(spans, which) * kCount;
    Pack<uint32_t, kCount> noise{};
    if constexpr (kMoment == MomentType::bf16) noise = draw_noise(span, s, i);
    if (i >= span.count) return;
    const auto g = load_as_f32<kGradient, kCount>(span.gradient, i);
    const auto was_p = load_master<Kept::kSplit, kWeight, kCount>(span, i);
    const auto was_m = load_moment<kCount>(span.m_in, kMoment, i);
    Pack<float, kCount> was_v{};
    if constexpr (has_v(kMethod)) was_v = load_moment<kCount>(span.v_in, kMoment, i);
    Pack<float, kCount> p, m, v;
    const auto all = [&](auto& math) {
#pragma unroll
        for (int k = 0; k < kCount; ++k) {
            const Element e =
                step<kMethod>({was_p.at[k], was_m.at[k], was_v.at[k]}, g.at[k], s, math);
            p.at[k] = e.p;
            m.at[k] = e.m;
            v.at[k] = e.v;
        }
    };
    Quick quick;
    all(quick);
    if (!quick.safe) {
        Exact exact;
        all(exact);
    }
    store_master<Kept::kSplit, kWeight, kCount>(span, i, p);
    store_moment<kCount>(span.m, kMoment, i, m, noise, 0);
    if constexpr (has_v(kMethod)) store_moment<kCount>(span.v, kMoment, i, v, noise, 16);
}

// One element a thread, of any alignment and format.
template <Method kMethod, DType kGradient, DType kWeight>
__global__ void update_one_kernel(const Span span, const Scalars s) {
    const int64_t i = thread_index();
    if (i >= span.count) return;
    const MomentType type = span.moment_type;
    const float g = load_as_f32<kGradient, 1>(span.gradient, i).at[0];
    const float p = span.low ? load_master<true, kWeight, 1>(span, i).at[0]
                             : load_master<false, kWeight, 1>(span, i).at[0];
    Element e{p, load_moment<1>(span.m_in, type, i).at[0], 0};
    if constexpr (has_v(kMethod)) e.v = load_moment<1>(span.v_in, type, i).at[0];
    Exact exact;
    e = step<kMethod>(e, g, s, exact);
    if (span.low) {
        store_master<true, kWeight, 1>(span, i, {{e.p}});
    } else {
        store_master<false, kWeight, 1>(span, i, {{e.p}});
    }
    Pack<uint32_t, 1> noise{};
    if (type == MomentType::bf16 && span.m) noise.at[0] = draw_one(span, s, i);
    store_moment<1>(span.m, type, i, {{e.m}}, noise, 0);
    if constexpr (has_v(kMethod)) store_moment<1>(span.v, type, i, {{e.v}}, noise, 16);
}

// call(Format<...>()). A split master's weights have 16 bits.
template <class Call>
void with_format(const Span& span, const Call& call) {
    const bool split = is_split(span);
    if (span.moment_type == MomentType::f32) {
        return split ? call(Format<MomentType::f32, true>())
                     : call(Format<MomentType::f32, false>());
    }
    return split ? call(Format<MomentType::bf16, true>()) : call(Format<MomentType::bf16, false>());
}

// call(gradient's Constant, weight's Constant)
template <class Call>
void with_types(const Span& span, const Call& call) {
    with_type(span.gradient_type, [&](auto gradient) {
        with_type(span.weight_type, [&](auto weight) { call(gradient, weight); });
    });
}

template <Method kMethod>
void launch_packs(const Spans& spans, const Scalars& scalars, cudaStream_t stream) {
    const Span& first = spans.at[0];
    with_types(first, [&](auto gradient, auto weight) {
        with_format(first, [&](auto format) {
            constexpr DType kGradient = decltype(gradient)::kValue;
            constexpr DType kWeight = decltype(weight)::kValue;
            using Kept = decltype(format);
            if constexpr (!Kept::kSplit || kWeight != DType::f32) {
                update_kernel<kMethod, kGradient, kWeight, Kept>
                    <<<spans.end[spans.count - 1], kThreads, 0, stream>>>(spans, scalars);
            }
        });
    });
    check_launch("update");
}

template <Method kMethod>
void launch_rest(const Span& span, const Scalars& scalars, cudaStream_t stream) {
    const unsigned blocks = blocks_for(span.count);
    with_types(span, [&](auto gradient, auto weight) {
        update_one_kernel<kMethod, decltype(gradient)::kValue, decltype(weight)::kValue>
            <<<blocks, kThreads, 0, stream>>>(span, scalars);
    });
    check_launch("update");
}

// Whether `elements` of each array can be moved by accesses of up to 16 bytes.
bool all_aligned(const Span& span, int64_t elements) {
    const auto fits = [&](const void* array, int64_t element_bytes) {
        return aligned(array, std::min<int64_t>(16, element_bytes * elements));
    };
    for (const void* array : {span.m_in, static_cast<const void*>(span.m), span.v_in,
                              static_cast<const void*>(span.v)}) {
        if (!fits(array, size_of(span.moment_type))) return false;
    }
    return fits(span.weight_in, 2) && fits(span.low_in, 2) && fits(span.low, 2) &&
           fits(span.p_in, 4) && fits(span.p, 4) &&
           fits(span.gradient, size_of(span.gradient_type)) &&
           fits(span.weight, size_of(span.weight_type));
}

// Whether a kernel made for the one updates the other.
bool alike(const Span& a, const Span& b) {
    return a.gradient_type == b.gradient_type && a.weight_type == b.weight_type &&
           a.moment_type == b.moment_type && is_split(a) == is_split(b) &&
           is_coded(a) == is_coded(b);
}

// Collects spans until a launch is full or one is not like them.
class Launches {
public:
    Launches(const Scalars& scalars, cudaStream_t stream) : scalars_(scalars), stream_(stream) {}

    void add(const Span& span) {
        if (is_coded(span)) return add(span, coded_blocks(span));
        // Whole runs: the threads of a run draw its random bits together.
        const int64_t packs = all_aligned(span, kTogether) ? round_down(span.count, kNoiseRun) : 0;
        if (packs > 0) add(part_of(span, 0, packs), blocks_for(packs / kTogether));
        if (packs < span.count) start_rest(part_of(span, packs, span.count - packs));
    }

    void start() {
        if (spans_.count == 0) return;
        if (is_coded(spans_.at[0])) {
            update_coded(spans_, scalars_, stream_);
        } else {
            with_method(scalars_.method, [&](auto method) {
                launch_packs<decltype(method)::kValue>(spans_, scalars_, stream_);
            });
        }
        spans_.count = 0;
    }

private:
    void add(const Span& span, unsigned blocks) {
        constexpr unsigned kMostBlocks = 0x7fffffff;  // of a launch
        const int last = spans_.count - 1;
        if (last >= 0 && (spans_.count == kSpans || !alike(spans_.at[0], span) ||
                          blocks > kMostBlocks - spans_.end[last]))
            start();
        const int place = spans_.count++;
        spans_.at[place] = span;
        spans_.end[place] = blocks + (place == 0 ? 0 : spans_.end[place - 1]);
    }
    void start_rest(const Span& span) {
        with_method(scalars_.method, [&](auto method) {
            launch_rest<decltype(method)::kValue>(span, scalars_, stream_);
        });
    }

    const Scalars& scalars_;
    cudaStream_t stream_;
    Spans spans_{};
};

}  // namespace

void update(const Span& span, const Scalars& scalars, void* stream) {
    update(std::span(&span, 1), scalars, stream);
}

void update(std::span<const Span> spans, const Scalars& scalars, void* stream) {
    Launches launches(scalars, static_cast<cudaStream_t>(stream));
    for (const Span& span : spans) {
        check_span(span, scalars);
        if (span.count == 0) continue;
        FERRY_CHECK(all_aligned(span, 1), "an array is not aligned to its elements");
        launches.add(span);
    }
    launches.start();
}

}  // namespace ferry::optim::cuda
