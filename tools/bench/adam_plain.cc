#include "adam_plain.h"

#if defined(__x86_64__)
#ifndef __clang__
// GCC 12 takes its own intrinsics' "undefined" operands for mistakes (its bug 105593).
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include <immintrin.h>

#include "ferry/error.h"

#define FERRY_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,f16c")))
#define FERRY_AVX2 __attribute__((target("avx2,fma,f16c")))

namespace ferry::tools {
namespace {

constexpr float kBeta1 = .9f, kBeta2 = .95f, kEps = 1e-8f, kLr = 1e-4f, kDecay = 1 - 1e-5f;

template <DType kType>
FERRY_AVX512 inline __m512 load512(const void* array, int64_t i) {
    if constexpr (kType == DType::f32) return _mm512_load_ps(static_cast<const float*>(array) + i);
    const auto* at = reinterpret_cast<const __m256i*>(static_cast<const uint16_t*>(array) + i);
    const __m256i half = _mm256_load_si256(at);
    if constexpr (kType == DType::f16) return _mm512_cvtph_ps(half);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

template <DType kType>
FERRY_AVX512 inline __m256i round512(__m512 value) {
    if constexpr (kType == DType::f16) return _mm512_cvtps_ph(value, 0);
    const __m512i bits = _mm512_castps_si512(value);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i up = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(up, 16));
}

template <DType kGradient, DType kWeight, Stores kStores>
FERRY_AVX512 void adamw512(const PlainArrays& a, int64_t begin, int64_t end) {
    const __m512 b1 = _mm512_set1_ps(kBeta1), c1 = _mm512_set1_ps(1 - kBeta1);
    const __m512 b2 = _mm512_set1_ps(kBeta2), c2 = _mm512_set1_ps(1 - kBeta2);
    const __m512 eps = _mm512_set1_ps(kEps), lr = _mm512_set1_ps(-kLr);
    const __m512 decay = _mm512_set1_ps(kDecay);
    for (int64_t i = begin; i < end; i += 16) {
        const __m512 g = load512<kGradient>(a.gradient, i);
        __m512 m = _mm512_load_ps(a.m_in + i), v = _mm512_load_ps(a.v_in + i);
        m = _mm512_fmadd_ps(b1, m, _mm512_mul_ps(c1, g));
        v = _mm512_fmadd_ps(b2, v, _mm512_mul_ps(c2, _mm512_mul_ps(g, g)));
        const __m512 move = _mm512_div_ps(m, _mm512_add_ps(_mm512_sqrt_ps(v), eps));
        const __m512 p =
            _mm512_fmadd_ps(lr, move, _mm512_mul_ps(_mm512_load_ps(a.p_in + i), decay));
        const __m256i w = round512<kWeight>(p);
        auto* weight = reinterpret_cast<__m256i*>(a.weight + i);
        if constexpr (kStores == Stores::plain) {
            _mm512_store_ps(a.p + i, p);
            _mm512_store_ps(a.m + i, m);
            _mm512_store_ps(a.v + i, v);
            _mm256_store_si256(weight, w);
        } else {
            _mm512_stream_ps(a.p + i, p);
            _mm512_stream_ps(a.m + i, m);
            _mm512_stream_ps(a.v + i, v);
            _mm256_stream_si256(weight, w);
        }
    }
    _mm_sfence();
}

template <DType kType>
FERRY_AVX2 inline __m256 load256(const void* array, int64_t i) {
    if constexpr (kType == DType::f32) return _mm256_load_ps(static_cast<const float*>(array) + i);
    const auto* at = reinterpret_cast<const __m128i*>(static_cast<const uint16_t*>(array) + i);
    const __m128i half = _mm_load_si128(at);
    if constexpr (kType == DType::f16) return _mm256_cvtph_ps(half);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}

template <DType kType>
FERRY_AVX2 inline __m128i round256(__m256 value) {
    if constexpr (kType == DType::f16) return _mm256_cvtps_ph(value, 0);
    const __m256i bits = _mm256_castps_si256(value);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i up = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    up = _mm256_srli_epi32(up, 16);
    return _mm_packus_epi32(_mm256_castsi256_si128(up), _mm256_extracti128_si256(up, 1));
}

template <DType kGradient, DType kWeight, Stores kStores>
FERRY_AVX2 void adamw256(const PlainArrays& a, int64_t begin, int64_t end) {
    const __m256 b1 = _mm256_set1_ps(kBeta1), c1 = _mm256_set1_ps(1 - kBeta1);
    const __m256 b2 = _mm256_set1_ps(kBeta2), c2 = _mm256_set1_ps(1 - kBeta2);
    const __m256 eps = _mm256_set1_ps(kEps), lr = _mm256_set1_ps(-kLr);
    const __m256 decay = _mm256_set1_ps(kDecay);
    for (int64_t i = begin; i < end; i += 8) {
        const __m256 g = load256<kGradient>(a.gradient, i);
        __m256 m = _mm256_load_ps(a.m_in + i), v = _mm256_load_ps(a.v_in + i);
        m = _mm256_fmadd_ps(b1, m, _mm256_mul_ps(c1, g));
        v = _mm256_fmadd_ps(b2, v, _mm256_mul_ps(c2, _mm256_mul_ps(g, g)));
        const __m256 move = _mm256_div_ps(m, _mm256_add_ps(_mm256_sqrt_ps(v), eps));
        const __m256 p =
            _mm256_fmadd_ps(lr, move, _mm256_mul_ps(_mm256_load_ps(a.p_in + i), decay));
        const __m128i w = round256<kWeight>(p);
        auto* weight = reinterpret_cast<__m128i*>(a.weight + i);
        if constexpr (kStores == Stores::plain) {
            _mm256_store_ps(a.p + i, p);
            _mm256_store_ps(a.m + i, m);
            _mm256_store_ps(a.v + i, v);
            _mm_store_si128(weight, w);
        } else {
            _mm256_stream_ps(a.p + i, p);
            _mm256_stream_ps(a.m + i, m);
            _mm256_stream_ps(a.v + i, v);
            _mm_stream_si128(weight, w);
        }
    }
    _mm_sfence();
}

bool has_avx512() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl");
}
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

template <DType kGradient, DType kWeight, Stores kStores>
void pick_width(const PlainArrays& a, int64_t begin, int64_t end) {
    if (has_avx512()) return adamw512<kGradient, kWeight, kStores>(a, begin, end);
    FERRY_CHECK(has_avx2(), "no hand-written loop for this processor");
    adamw256<kGradient, kWeight, kStores>(a, begin, end);
}

template <DType kGradient, DType kWeight>
void pick_stores(const PlainArrays& a, int64_t begin, int64_t end, Stores stores) {
    if (stores == Stores::plain) {
        return pick_width<kGradient, kWeight, Stores::plain>(a, begin, end);
    }
    pick_width<kGradient, kWeight, Stores::non_temporal>(a, begin, end);
}

template <DType kGradient>
void pick_weight(const PlainArrays& a, int64_t begin, int64_t end, Stores stores) {
    if (a.weight_type == DType::f16) {
        return pick_stores<kGradient, DType::f16>(a, begin, end, stores);
    }
    pick_stores<kGradient, DType::bf16>(a, begin, end, stores);
}

FERRY_AVX2 float squares256(const float* values, int64_t count) {
    __m256 sums[4] = {_mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps(),
                      _mm256_setzero_ps()};
    for (int64_t i = 0; i < count; i += 32) {
        for (int64_t k = 0; k < 4; ++k) {
            const __m256 x = _mm256_loadu_ps(values + i + 8 * k);
            sums[k] = _mm256_fmadd_ps(x, x, sums[k]);
        }
    }
    const __m256 all =
        _mm256_add_ps(_mm256_add_ps(sums[0], sums[1]), _mm256_add_ps(sums[2], sums[3]));
    float sum = 0;
    for (int k = 0; k < 8; ++k) sum += all[k];
    return sum;
}

FERRY_AVX2 void triad256(float* a, const float* b, const float* c, int64_t count) {
    const __m256 three = _mm256_set1_ps(3);
    for (int64_t i = 0; i < count; i += 8) {
        _mm256_stream_ps(a + i,
                         _mm256_fmadd_ps(three, _mm256_load_ps(c + i), _mm256_load_ps(b + i)));
    }
    _mm_sfence();
}

}  // namespace

const char* plain_kind() { return has_avx512() ? "avx512" : has_avx2() ? "avx2" : nullptr; }

void plain_adamw(const PlainArrays& a, int64_t begin, int64_t count, Stores stores) {
    const int64_t end = begin + count;
    switch (a.gradient_type) {
        case DType::f32:
            return pick_weight<DType::f32>(a, begin, end, stores);
        case DType::bf16:
            return pick_weight<DType::bf16>(a, begin, end, stores);
        case DType::f16:
            return pick_weight<DType::f16>(a, begin, end, stores);
    }
}

void plain_triad(float* a, const float* b, const float* c, int64_t count) {
    triad256(a, b, c, count);
}
float plain_squares(const float* values, int64_t count) { return squares256(values, count); }

}  // namespace ferry::tools

#else

namespace ferry::tools {

const char* plain_kind() { return nullptr; }
void plain_adamw(const PlainArrays&, int64_t, int64_t, Stores) { bug("no hand-written loop here"); }
void plain_triad(float* a, const float* b, const float* c, int64_t count) {
    for (int64_t i = 0; i < count; ++i) a[i] = b[i] + 3 * c[i];
}
float plain_squares(const float* values, int64_t count) {
    float sum = 0;
    for (int64_t i = 0; i < count; ++i) sum += values[i] * values[i];
    return sum;
}

}  // namespace ferry::tools

#endif
