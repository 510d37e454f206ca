// The one loop of all methods: load, apply a rule (rules-inl.h), store. Included once a target by
// Highway's foreach_target.h, hence the toggling guard.
#if defined(FERRY_OPTIM_LOOP_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FERRY_OPTIM_LOOP_INL_H_
#undef FERRY_OPTIM_LOOP_INL_H_
#else
#define FERRY_OPTIM_LOOP_INL_H_
#endif

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <type_traits>

#include "base/philox-inl.h"
#include "codes-inl.h"
#include "convert-inl.h"
#include "hwy/cache_control.h"
#include "internal.h"

HWY_BEFORE_NAMESPACE();
namespace ferry::optim::HWY_NAMESPACE {
using ferry::HWY_NAMESPACE::philox;
using ferry::HWY_NAMESPACE::PhiloxTag;
using ferry::HWY_NAMESPACE::PhiloxWord;

HWY_INLINE VF set(float value) { return hn::Set(F(), value); }

// A NaN compares false and stays.
HWY_INLINE VF flush(VF value, float least) {
    return hn::IfThenZeroElse(hn::Lt(hn::Abs(value), set(least)), value);
}

// The first step of every method.
HWY_INLINE VF scaled(VF gradient, const Scalars& s) {
    return flush(hn::Mul(gradient, set(s.gradient_scale)), kLeastGradient);
}

// Decay as an L2 term of the gradient.
HWY_INLINE VF decayed(VF gradient, VF p, const Scalars& s) {
    return flush(hn::Add(gradient, hn::Mul(p, set(s.weight_decay))), kLeastGradient);
}

// a * x + b * y as three rounded operations.
HWY_INLINE VF blend(VF x, float a, VF y, float b) {
    return hn::Add(hn::Mul(x, set(a)), hn::Mul(y, set(b)));
}

// A rule says which moments it keeps (kM, kV), whether m is a sum of squares (kSquares), and has
// these functions:
//     static void apply(VF& p, VF& m, VF& v, VF g, const Scalars& s)
//     static void apply_coded(VF& p, VF& m, VF& v, VF g, const Scalars& s)   of int8 moments, which
//     static float kept_m(const Scalars& s)                                  come times these
// With two moments v comes times beta2.

// How the state is kept (ferry/optim.h).
template <MomentType kMomentType, bool kIsSplit>
struct Format {
    static constexpr MomentType kMoment = kMomentType;
    static constexpr bool kSplit = kIsSplit;
};

// The random bits of the kNoiseRun elements from i on, a block of four words a 64-bit lane. One
// copy a target: in each loop it would be most of the code.
inline HWY_NOINLINE void draw_noise(const Span& span, const Scalars& s, int64_t i,
                                    uint32_t* noise) {
    if (hn::MaxLanes(F()) < 4) {
        for (int64_t e = 0; e < kNoiseRun; ++e) noise[e] = noise_of(span, s, i + e);
        return;
    }
    const U u;
    const PhiloxTag w;
    const auto lanes = static_cast<int64_t>(hn::Lanes(w));
    const int64_t first = (span.element + i) / kNoiseRun * 8;
    for (int64_t j = 0; j < 8; j += lanes) {
        PhiloxWord w0 = hn::Set(w, s.update), w1 = hn::Zero(w), w2 = hn::Set(w, span.layer);
        PhiloxWord w3 = hn::Add(hn::Iota(w, 0), hn::Set(w, static_cast<uint64_t>(first + j)));
        philox({s.seed, Purpose::stochastic_rounding}, w0, w1, w2, w3);
        const PhiloxWord low = hn::Set(w, 0xffffffffu);
        const PhiloxWord even = hn::Or(hn::And(w0, low), hn::ShiftLeft<32>(w1));
        const PhiloxWord odd = hn::Or(hn::And(w2, low), hn::ShiftLeft<32>(w3));
        hn::StoreU(hn::BitCast(u, even), u, noise + 2 * j);
        hn::StoreU(hn::BitCast(u, odd), u, noise + kNoiseRun / 2 + 2 * j);
    }
}

// Rounds to one of the two bf16 around it, by 16 random bits; in the high half of a lane.
HWY_INLINE VU round_by_noise(VF value, VU noise) {
    const U u;
    const VU bits = hn::BitCast(u, value);
    const auto nan = hn::RebindMask(u, hn::IsNaN(value));
    const VU quiet = hn::Or(bits, hn::Set(u, 0x400000u));
    return hn::IfThenElse(nan, quiet, hn::Add(bits, noise));
}

HWY_INLINE VU exponent_bits(VF weight) {
    const I i;
    const auto bits = hn::And(hn::BitCast(i, weight), hn::Set(i, int32_t{kExponent}));
    return hn::BitCast(U(), hn::Max(bits, hn::Set(i, int32_t{kLeastExponent})));
}

template <DType kWeight>
HWY_INLINE VF load_joined(const uint16_t* weight, const uint16_t* low) {
    if constexpr (kWeight == DType::f16) {
        const hn::Rebind<int16_t, F> signed_half;
        const VF w = load_f16(weight);
        const VU unit = hn::Sub(exponent_bits(w), hn::Set(U(), kUnitBelow));
        const auto whole = hn::LoadU(signed_half, reinterpret_cast<const int16_t*>(low));
        const VF left = hn::ConvertTo(F(), hn::PromoteTo(I(), whole));
        return hn::Add(w, hn::Mul(left, hn::BitCast(F(), unit)));
    } else {
        // A low half of 0x8000 or more is what the weight was rounded up by: below zero.
        const hn::Rebind<int16_t, F> signed_half;
        const auto rest = hn::LoadU(signed_half, reinterpret_cast<const int16_t*>(low));
        const VU bits = hn::BitCast(U(), hn::PromoteTo(I(), rest));
        return hn::BitCast(F(), hn::Add(load_high_halves(weight), bits));
    }
}

template <DType kWeight, bool kStream>
HWY_INLINE void store_split(VF p, uint16_t* weight, uint16_t* low) {
    const U u;
    if constexpr (kWeight == DType::f16) {
        const auto cast = narrow_f16(p);
        const auto half = hn::IfThenZeroElse(hn::Eq(cast, hn::Set(H(), kMinusZero)), cast);
        const VF w = widen_half(half);
        const VU exponent = exponent_bits(w);
        const VF scale = hn::BitCast(F(), hn::Sub(hn::Set(u, kScaleSum), exponent));
        const auto whole = hn::ConvertTo(I(), hn::Mul(hn::Sub(p, w), scale));
        const VU left = hn::And(hn::BitCast(u, whole), hn::Set(u, 0xffffu));
        const auto finite = hn::Not(above(exponent, kExponent - 1));
        put_halves<kStream>(half, weight);
        put_halves<kStream>(narrow(hn::IfThenElseZero(finite, left)), low);
    } else {
        const VU bits = hn::BitCast(u, p);
        put_halves<kStream>(halves<Side::high>(hn::Add(bits, hn::Set(u, 0x8000u))), weight);
        put_halves<kStream>(halves<Side::low>(bits), low);
    }
}

// How a loop treats its arrays; the weight may be absent.
template <class Rule, DType kGradient, DType kWeight, bool kHasWeight, class Saved>
struct Pass {
    static constexpr MomentType kMoment = Saved::kMoment;
    static constexpr bool kNoisy = Rule::kM && kMoment == MomentType::bf16;
    static constexpr bool kCoded = Rule::kM && kMoment == MomentType::int8;
    static constexpr bool kSignedM = !Rule::kSquares;
    // A cache line of the moments. The hardware's prefetchers stop at the end of a page and follow
    // four streams late. Asking 2 KiB ahead was about a tenth faster on an EPYC and a Xeon, and
    // anything from 1 KiB to 8 KiB about the same.
    static constexpr int64_t kLine = kCoded ? kMomentBlock : kNoisy ? kNoiseRun : 16;
    static constexpr int64_t kAhead = 512;

    // Data that the elements of a line share.
    struct NoLine {};
    struct NoisyLine {
        HWY_ALIGN uint32_t noise[kLine];
    };
    struct CodedLine {
        BlockMoments m, v;
    };
    struct Largest {
        VU m, v;
    };
    using Line =
        std::conditional_t<kCoded, CodedLine, std::conditional_t<kNoisy, NoisyLine, NoLine>>;
    struct CodedMoments {
        Decoder<kSignedM> m;
        Decoder<false> v;
        HWY_INLINE CodedMoments(const Span& span, const Scalars& s, int64_t i)
            : m(span.m_scale_in[i / kMomentBlock] * Rule::kept_m(s)),
              v(Rule::kV ? span.v_scale_in[i / kMomentBlock] * s.beta2 : 0.0f) {}
    };
    struct PlainMoments {
        HWY_INLINE PlainMoments(const Span&, const Scalars&, int64_t) {}
    };
    using Moments = std::conditional_t<kCoded, CodedMoments, PlainMoments>;

    HWY_INLINE static VF load_moment(const void* array, int64_t i) {
        return load_as_f32 < kMoment == MomentType::f32 ? DType::f32 : DType::bf16 > (array, i);
    }

    HWY_INLINE static VF load_gradient(const Span& span, int64_t i) {
        if constexpr (kGradient != DType::bf16) return load_as_f32<kGradient>(span.gradient, i);
        return hn::BitCast(F(), load_high_halves(static_cast<const uint16_t*>(span.gradient) + i));
    }

    template <bool kStream>
    HWY_INLINE static void store_moment(VF value, VU noise, void* array, int64_t i) {
        if constexpr (kNoisy) {
            put_halves<kStream>(halves<Side::high>(round_by_noise(value, noise)),
                                static_cast<uint16_t*>(array) + i);
        } else {
            put<kStream>(value, F(), static_cast<float*>(array) + i);
        }
    }

    // One vector at element i, `k` elements into its line.
    template <Stores kStores>
    HWY_INLINE static void vector_at(const Span& span, const Scalars& s, int64_t i, int64_t k,
                                     const Moments& moments, Line& line, Largest& largest) {
        constexpr bool kStreamState = kStores == Stores::stream_all;
        constexpr bool kStreamWeight = kStores != Stores::cached;
        const U u;
        VF p;
        if constexpr (Saved::kSplit) {
            p = load_joined<kWeight>(span.weight_in + i, span.low_in + i);
        } else {
            p = hn::LoadU(F(), span.p_in + i);
        }
        VF m = hn::Zero(F()), v = m;
        const VF g = load_gradient(span, i);
        if constexpr (kCoded) {
            m = moments.m(static_cast<const uint8_t*>(span.m_in) + i);
            if constexpr (Rule::kV) v = moments.v(static_cast<const uint8_t*>(span.v_in) + i);
            Rule::apply_coded(p, m, v, hn::Mul(g, set(s.gradient_scale)), s);
        } else {
            if constexpr (Rule::kM) m = load_moment(span.m_in, i);
            if constexpr (Rule::kV) v = load_moment(span.v_in, i);
            Rule::apply(p, m, v, scaled(g, s), s);
        }
        if constexpr (Saved::kSplit) {
            store_split<kWeight, kStreamState>(p, static_cast<uint16_t*>(span.weight) + i,
                                               span.low + i);
        } else {
            put<kStreamState>(p, F(), span.p + i);
            if constexpr (kHasWeight) store_rounded<kWeight, kStreamWeight>(p, span.weight, i);
        }
        if constexpr (kCoded) {
            hn::Store(m, F(), line.m.value + k);
            largest.m = hn::Max(largest.m, order_of<kSignedM>(m));
            if constexpr (Rule::kV) {
                hn::Store(v, F(), line.v.value + k);
                largest.v = hn::Max(largest.v, order_of<false>(v));
            }
            return;
        }
        VU noise = hn::Zero(u);
        if constexpr (kNoisy) noise = hn::Load(u, line.noise + k);
        if constexpr (Rule::kM) {
            const VU of_m = hn::And(noise, hn::Set(u, 0xffffu));
            store_moment<kStreamState>(m, of_m, span.m, i);
        }
        if constexpr (Rule::kV) {
            store_moment<kStreamState>(v, hn::ShiftRight<16>(noise), span.v, i);
        }
    }

    template <Stores kStores>
    HWY_INLINE static void line(const Span& span, const Scalars& s, int64_t i, Line& line) {
        if constexpr (kNoisy) draw_noise(span, s, i, line.noise);
        const Moments moments(span, s, i);
        const auto lanes = static_cast<int64_t>(hn::Lanes(F()));
        Largest largest{hn::Zero(U()), hn::Zero(U())};
        for (int64_t k = 0; k < kLine; k += lanes)
            vector_at<kStores>(span, s, i + k, k, moments, line, largest);
        if constexpr (kCoded) {
            line.m.largest = largest_of(largest.m);
            if constexpr (Rule::kV) line.v.largest = largest_of(largest.v);
        }
    }

    // The codes of a line at i.
    HWY_INLINE static void encode_line(const Span& span, int64_t i, Line& line) {
        if constexpr (kCoded) {
            const int64_t block = i / kMomentBlock;
            encode_all<kSignedM>(line.m, static_cast<uint8_t*>(span.m) + i, span.m_scale + block);
            if constexpr (Rule::kV)
                encode_all<false>(line.v, static_cast<uint8_t*>(span.v) + i, span.v_scale + block);
        }
    }

    // A line's elements from i on.
    HWY_INLINE static void prefetch(const void* array, int64_t i, int64_t element_bytes) {
        const char* from = static_cast<const char*>(array) + i * element_bytes;
        for (int64_t at = 0; at < kLine * element_bytes; at += 64) hwy::Prefetch(from + at);
    }

    HWY_INLINE static void prefetch(const Span& span, int64_t i) {
        if constexpr (Saved::kSplit) {
            prefetch(span.weight_in, i, 2);
            prefetch(span.low_in, i, 2);
        } else {
            prefetch(span.p_in, i, 4);
        }
        if constexpr (Rule::kM) prefetch(span.m_in, i, size_of(kMoment));
        if constexpr (Rule::kV) prefetch(span.v_in, i, size_of(kMoment));
        prefetch(span.gradient, i, size_of(kGradient));
    }

    // The last elements of an array, fewer than a line, in a copy that is as long as one.
    struct Padded {
        int64_t offset = 0;
        size_t size = 0;  // bytes
        HWY_ALIGN char bytes[kLine * 4] = {};
        Padded(const Span& span, int64_t begin, int64_t element_bytes)
            : offset(begin * element_bytes),
              size(static_cast<size_t>((span.count - begin) * element_bytes)) {}
        const void* filled_from(const void* array) {
            if (array) std::memcpy(bytes, static_cast<const char*>(array) + offset, size);
            return bytes;
        }
        void empty_into(void* array) const {
            if (array) std::memcpy(static_cast<char*>(array) + offset, bytes, size);
        }
    };

    // Through padded copies: the same operations.
    HWY_NOINLINE static void tail(const Span& span, const Scalars& s, int64_t begin) {
        Padded gradient(span, begin, size_of(kGradient)), weight(span, begin, size_of(kWeight));
        Padded p(span, begin, 4), low(span, begin, 2);
        Padded m(span, begin, size_of(kMoment)), v(span, begin, size_of(kMoment));
        // Padding is zero, and never a moment block's largest.
        if constexpr (kCoded && kSignedM) std::memset(m.bytes, kZeroWithSign, sizeof(m.bytes));
        Span copy = part_of(span, begin, span.count - begin);
        copy.gradient = gradient.filled_from(span.gradient);
        copy.p_in = static_cast<const float*>(p.filled_from(span.p_in));
        copy.weight_in = static_cast<const uint16_t*>(weight.filled_from(span.weight_in));
        copy.low_in = static_cast<const uint16_t*>(low.filled_from(span.low_in));
        copy.m_in = m.filled_from(Rule::kM ? span.m_in : nullptr);
        copy.v_in = v.filled_from(Rule::kV ? span.v_in : nullptr);
        copy.p = reinterpret_cast<float*>(p.bytes);
        copy.weight = weight.bytes;
        copy.low = reinterpret_cast<uint16_t*>(low.bytes);
        copy.m = m.bytes;
        copy.v = v.bytes;
        Line last;
        line<Stores::cached>(copy, s, 0, last);
        encode_line(copy, 0, last);
        p.empty_into(span.p);
        weight.empty_into(span.weight);
        low.empty_into(span.low);
        m.empty_into(Rule::kM ? span.m : nullptr);
        v.empty_into(Rule::kV ? span.v : nullptr);
    }

    template <Stores kStores>
    HWY_INLINE static void all(const Span& given, const Scalars& scalars) {
        // Copies, so that the compiler sees that no store can change them.
        const Span span = given;
        const Scalars s = scalars;
        int64_t i = 0;
        Line lines[2];
        for (; i + kLine <= span.count; i += kLine) {
            if constexpr (kStores != Stores::stream_all) {
                prefetch(span, std::min(i + kAhead, span.count - 1));
            }
            line<kStores>(span, s, i, lines[i / kLine % 2]);
            // A line late: the last divisions of this one pass meanwhile.
            if (kCoded && i > 0) encode_line(span, i - kLine, lines[(i / kLine + 1) % 2]);
        }
        if (kCoded && i > 0) encode_line(span, i - kLine, lines[(i / kLine + 1) % 2]);
        if (kStores != Stores::cached) hwy::FlushStream();
        if (i < span.count) tail(span, s, i);
    }
};

template <class Rule, DType kGradient, DType kWeight, bool kHasWeight, class Saved>
void with_stores(const Span& span, const Scalars& s, Stores stores) {
    using This = Pass<Rule, kGradient, kWeight, kHasWeight, Saved>;
    if (stores == Stores::stream_all) return This::template all<Stores::stream_all>(span, s);
    // A weight that is the master's half, or none, is never streamed alone: no loop for it.
    if constexpr (kHasWeight && !Saved::kSplit) {
        if (stores == Stores::stream_weight)
            return This::template all<Stores::stream_weight>(span, s);
    }
    This::template all<Stores::cached>(span, s);
}

template <class Rule, DType kGradient, class Saved>
void with_gradient(const Span& span, const Scalars& s, Stores stores) {
    if constexpr (Saved::kSplit) {
        if (span.weight_type == DType::f16)
            return with_stores<Rule, kGradient, DType::f16, true, Saved>(span, s, stores);
        return with_stores<Rule, kGradient, DType::bf16, true, Saved>(span, s, stores);
    } else {
        if (!span.weight)
            return with_stores<Rule, kGradient, DType::f32, false, Saved>(span, s, stores);
        switch (span.weight_type) {
            case DType::f32:
                return with_stores<Rule, kGradient, DType::f32, true, Saved>(span, s, stores);
            case DType::bf16:
                return with_stores<Rule, kGradient, DType::bf16, true, Saved>(span, s, stores);
            case DType::f16:
                return with_stores<Rule, kGradient, DType::f16, true, Saved>(span, s, stores);
        }
    }
}

template <class Rule, class Saved>
void with_format(const Span& span, const Scalars& s, Stores stores) {
    switch (span.gradient_type) {
        case DType::f32:
            return with_gradient<Rule, DType::f32, Saved>(span, s, stores);
        case DType::bf16:
            return with_gradient<Rule, DType::bf16, Saved>(span, s, stores);
        case DType::f16:
            return with_gradient<Rule, DType::f16, Saved>(span, s, stores);
    }
}

template <class Rule, bool kSplit>
void with_moments(const Span& span, const Scalars& s, Stores stores) {
    if constexpr (Rule::kM) {  // without moments all are the same
        if (span.moment_type == MomentType::bf16)
            return with_format<Rule, Format<MomentType::bf16, kSplit>>(span, s, stores);
        if (span.moment_type == MomentType::int8) {
            // Without fused multiply-adds the reference is as good.
            if constexpr (HWY_NATIVE_FMA) {
                return with_format<Rule, Format<MomentType::int8, kSplit>>(span, s, stores);
            } else {
                return update_reference(span, s);
            }
        }
    }
    with_format<Rule, Format<MomentType::f32, kSplit>>(span, s, stores);
}

// Returns the name of the target that ran.
template <class Rule>
const char* run_rule(const Span& span, const Scalars& s, Stores stores) {
    if (is_split(span)) {
        with_moments<Rule, true>(span, s, stores);
    } else {
        with_moments<Rule, false>(span, s, stores);
    }
    return hwy::TargetName(HWY_TARGET);
}

}  // namespace ferry::optim::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // toggling guard
