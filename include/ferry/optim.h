// The optimizer's arithmetic: one pass over memory for a run of elements. The scalar reference,
// every SIMD target and CUDA give the same bits, whatever the threads, chunk size or alignment.
// Rules: ../../docs/numerics.md.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ferry/dtype.h"
#include "ferry/optim_kinds.h"
#include "ferry/team.h"
#include "ferry/units.h"

namespace ferry::optim {

// lr and weight_decay already carry the parameter group's factors.
struct Hyper {
    Method method = Method::adamw;
    double lr = 1e-3, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0;
    double momentum = 0;             // sgd, muon
    bool nesterov = false;           // sgd, muon
    double initial_accumulator = 0;  // adagrad
    uint32_t seed = 0;               // of stochastic rounding
};

// The scalars of a step's update, rounded once from double to float on the host.
//
// Every method is one list of fp32 operations, each rounded once, no FMA. All begin with
//   g  = gradient (widened exactly) * gradient_scale
//   g  = |g| < 2^-60 ? 0 : g                          flush(g), 2^-60
// and every kept moment ends with m' = |m'| < 2^-100 ? 0 : m'. These two selects are the deviation
// from the papers: they keep denormals, which are slow and stick, out of the state (numerics.md).
// They also make m and v independent of the processor's FTZ and DAZ flags; p too, unless p is a
// denormal.
//
// AdamW (Loshchilov & Hutter 2019, decoupled decay)
//   m' = m * beta1 + g * one_minus_beta1              two products, one sum
//   v' = v * beta2 + (g * g) * one_minus_beta2
//   d  = sqrt(v') * inv_sqrt_bias2 + eps
//   p' = p * decay - (m' * step_size) / d             decay = 1 - lr * weight_decay
//   step_size = lr / (1 - beta1^t), inv_sqrt_bias2 = 1 / sqrt(1 - beta2^t): torch.optim's formula.
// Adam (Kingma & Ba 2015, decay as L2 term of the gradient)
//   g  = flush(g + p * weight_decay), then as AdamW with decay = 1
// SGD with momentum (Polyak 1964; Sutskever et al. 2013 for nesterov; torch.optim's form)
//   g  = flush(g + p * weight_decay)
//   m' = m * beta1 + g                                beta1 = momentum; no m when it is 0
//   p' = p - (nesterov ? g + m' * beta1 : m') * step_size
// Lion (Chen et al. 2023, algorithm 2)
//   c  = m * beta1 + g * one_minus_beta1, zero below 2^-100
//   p' = p * decay - sign(c) * step_size              sign(0) = 0
//   m' = m * beta2 + g * one_minus_beta2
// Adagrad (Duchi, Hazan & Singer 2011; torch.optim's form, no lr_decay)
//   g  = flush(g + p * weight_decay)
//   m' = m + g * g                                    starts at initial_accumulator
//   p' = p - (g * step_size) / (sqrt(m') + eps)
// Muon (Jordan et al. 2024; torch.optim.Muon's form), which is for whole matrices and so is not a
// Method that update() takes. It is two passes of SGD about an orthogonalisation:
//   m' = m * momentum + g                             g carries the factor 1 - momentum
//   u  = nesterov ? g + m' * momentum : m'
//   o  = u, orthogonalised by Newton-Schulz           docs/numerics.md
//   p' = p - flush(o + p * (weight_decay / f)) * (lr * f)
//   f  = adjust_lr_factor(...) of the matrix's shape. So p' = p * (1 - lr * weight_decay) - o * lr
//   * f: the decay is decoupled.
struct Scalars {
    Method method = Method::adamw;
    float gradient_scale = 1;  // clip factor / loss scale
    float beta1 = 0, one_minus_beta1 = 0, beta2 = 0, one_minus_beta2 = 0;
    float eps = 0, step_size = 0, inv_sqrt_bias2 = 0, decay = 1, weight_decay = 0;
    bool nesterov = false;
    uint32_t seed = 0, update = 0;  // which random bits round this step's moments
};
// `step` counts updates from 1. Throws Trouble::usage for values that define no update: step < 1;
// a beta or momentum outside [0, 1), or one that fp32 rounds to 1; anything negative or not finite;
// a step_size or decay that overflows fp32; nesterov without momentum.
// An lr of 0 moves only the moments. An eps below e = 2^-50 / sqrt(1 - beta2), also 0, becomes e
// (2.8e-14 at beta2 = 0.999; 2^-50 for Adagrad). A gradient below e leaves no trace in v and must
// not be divided by less. Scalars too small to be normal in fp32 become 0.
Scalars scalars_of(const Hyper& hyper, int64_t step, double gradient_scale);
// The two passes of Muon, from what scalars_of() gave for it. The first takes p = 0, which becomes
// u. The second takes o, in fp32, for a gradient and keeps no moment.
Scalars muon_momentum(const Scalars& muon);
Scalars muon_step(const Scalars& muon, double factor);
// original: sqrt(max(1, rows / cols)); match_rms_adamw: 0.2 sqrt(max(rows, cols));
// spectral_unclamped: sqrt(rows / cols).
double adjust_lr_factor(AdjustLr adjust, int64_t rows, int64_t cols);
// How many of m, v the method keeps: 2 for Adam, 1 (in m) for SGD with momentum, Lion and Adagrad.
// Muon keeps m for its matrices, and both for what AdamW updates beside them.
int moments_of(Method method);
int moments_of(const Hyper& hyper);         // 0 for SGD without momentum
float initial_moment(const Hyper& hyper);   // what m starts as: 0, but for Adagrad
Method method_from(std::string_view name);  // of those that update() takes
std::string_view name_of(Method method);

// Three formats of the state that are smaller than fp32 p, m, v. Two change no operation above.
//
// Moments in bf16, rounded stochastically: m' and v' are kept as one of their two neighbours, the
// nearer one with the higher probability. What is too small for 8 bits then adds up on average.
//   kept = (bits of m' + r) >> 16                     r: 16 random bits; a NaN stays one
// p' follows from m' and v' before that. With e = Span::element + i the bits are word
// e % 32 / 16 * 2 + e % 2 of philox({seed, stochastic_rounding}, {update, 0, layer, e / 32 * 8 +
// e % 16 / 2}), the low half for m and the high half for v. Only step, layer, element and moment
// decide them. (A vector of blocks yields words of neighbours in any lane count.)
//
// Moments in int8: blocks of 256 elements, each a scale (its largest magnitude, at least 1e-12) and
// a code an element for a share of it, the nearest. Block size, the two maps of 256 shares and the
// rounding are AdamW8bit's in torchao (quant_utils of its optim), the maps bitsandbytes' dynamic
// tree quantization (Dettmers et al. 2022). One has signs, for m. The other, twice as fine, is for
// v and Adagrad's sum. src/optim/moment_map.h has the lines that lead from code to moment and back.
// Each is one FMA. A code begins within 2^-12 of a step of half way. Products that are added are
// fused above as well, and nothing is flushed, as codes keep no denormals:
//   AdamW, Adam, SGD: m and v decoded by scale * beta, which is their product with it
//   g  = gradient * gradient_scale; then with decay as L2 term  fma(p, weight_decay, g)
//   m' = fma(g, one_minus_beta1, m);  v' = fma(g * one_minus_beta2, g, v);  SGD  m' = m + g
//   d  = fma(sqrt(v'), inv_sqrt_bias2, eps);  p' = fma(p, decay, -(m' * step_size / d))
// A block that holds a moment that is not finite is NaN throughout: its scale is one, and its codes
// stand for a share of 1. A block begins at a multiple of 256 elements of a span, the span at a
// block; the last may be shorter. A chunk is whole blocks, so that no placement changes a bit.
enum class Map : uint8_t { with_sign, without_sign };
Map map_of(Method method, int moment);  // 0: m, 1: v
float share_of(Map map, uint8_t code);
// One block of at most 256 elements: the oracle.
void encode_block(Map map, std::span<const float> moments, uint8_t* codes, float* scale);

// Split master: p is kept as its weight in bf16 and its low 16 bits, which together are p exactly.
// The weight is rounded half up in magnitude (ties away from zero). It differs from cast(p) only
// where p lies half way between two bf16 of which the lower is even (the low bits are 0x8000).
struct Halves {
    uint16_t weight, low;
};
constexpr Halves split(uint32_t bits) {
    return {static_cast<uint16_t>((bits + 0x8000u) >> 16), static_cast<uint16_t>(bits)};
}
constexpr uint32_t join(Halves halves) {
    return ((uint32_t{halves.weight} - (halves.low >> 15)) << 16) | halves.low;
}

// A weight in fp16 is a cast's, but that zeros have no sign. The low half has what the cast left
// over: a whole number of 2^(e - 25), where e is the weight's exponent, of at least -14.
//   w = fp16(p), +0 for -0;  low = (p - w) * 2^(25 - e), cut towards 0; 0 where w is not finite
//   p = w + low * 2^(e - 25)
// That is exact where |p| is 2^-16 or more, and within 2^-39 below. A p that fp16 has no finite
// number for is infinite from then on. What is joined splits into the same halves: cutting, unlike
// rounding, never ends half way to another weight.
Halves split(DType weight, float p);  // of either type
float join(DType weight, Halves halves);

// One run of `count` elements. Any alignment, also of half a float. In and out pointers are equal
// (in place) or disjoint; anything else is a bug of the caller and aborts. `m`/`v` are left alone
// and may be null where the method does not keep them.
//
// A gradient of NaN, or an infinite one where gradient_scale is 0, makes p' and every kept moment
// NaN. Any other infinite one, on finite p, m and v, makes every kept moment infinite and p' NaN.
// SGD's p' is infinite too (NaN at lr 0). Lion's p' stays finite: it moves by step_size as for any
// gradient. leaf_norms finds such gradients before. From finite input values stay finite
// otherwise, short of overflow, where all implementations still agree.
struct Span {
    int64_t count = 0;
    const void* gradient = nullptr;  // gradient_type
    DType gradient_type = DType::f32;
    MomentType moment_type = MomentType::f32;  // bf16, int8: `element` is a multiple of 32, of 256
    const float* p_in = nullptr;
    const void* m_in = nullptr;  // moment_type
    const void* v_in = nullptr;
    float* p = nullptr;
    void* m = nullptr;
    void* v = nullptr;
    // int8: the scales of the blocks, aligned as floats.
    const float* m_scale_in = nullptr;
    const float* v_scale_in = nullptr;
    float* m_scale = nullptr;
    float* v_scale = nullptr;
    void* weight = nullptr;  // weight_type, cast(p'); null: not written
    DType weight_type = DType::f32;
    // Split master, in place of p: `weight` is bf16 or fp16 and its other half.
    const uint16_t* weight_in = nullptr;
    const uint16_t* low_in = nullptr;
    uint16_t* low = nullptr;
    // The first element's place in the model, for the random bits.
    uint32_t layer = 0;
    int64_t element = 0;
};

void update_reference(const Span& span, const Scalars& scalars);  // the oracle
void update(const Span& span, const Scalars& scalars);            // best SIMD target, this thread
void update(Team& team, const Span& span, const Scalars& scalars);
// Each 256 KiB of p on the node that holds them, all nodes at the same time.
void update(NodeTeams& teams, const Span& span, const Scalars& scalars);

// weight = cast(p): after a rollback or a dropped step.
void recast(const float* p, int64_t count, DType weight_type, void* weight);

// ---------------------------------------------------------------- gradient norm

// Training takes its leaves from Ops::round_gradient, on the CPU and the GPU alike. They come with
// the rounding to the wire type, without a pass of their own. The passes here, and the functions of
// cuda below, give the same numbers to programs that embed ferry and hold their own gradients and
// state. In ferry itself only tests and benchmarks call them.
constexpr int64_t kLeaf = 4096;
// Sum of squares of each leaf of 4,096 elements (the last may be shorter: as if padded by zeros).
// The tree, in fp32: an element below 2^-60 in magnitude counts as zero, as in the update. Lane j
// of 16 adds the squares of elements j, j+16, j+32, ... in order from 0. Then lanes are added
// pairwise, j with j+8, j+4, j+2, j+1. A non-finite gradient makes its leaf non-finite (so does one
// whose square exceeds fp32).
void leaf_norms_reference(const void* gradient, DType type, int64_t count, float* leaves);
void leaf_norms(const void* gradient, DType type, int64_t count, float* leaves);
void leaf_norms(Team& team, const void* gradient, DType type, int64_t count, float* leaves);
constexpr int64_t leaves_of(int64_t count) { return ceil_div(count, kLeaf); }
// Leaves added in double in index order.
double sum_leaves(std::span<const float> leaves, double initial = 0);
// min(1, max_norm / (norm + 1e-6)); 1 when max_norm <= 0; 0 for an infinite norm, NaN for a NaN.
double clip_factor(double norm, double max_norm);

// The SIMD targets that this CPU runs, best first, by Highway's names. Only tests and benchmarks
// force one, while nothing else runs.
std::vector<std::string> supported_targets();
void force_target(std::string_view name);  // "" undoes
// The target that runs: of the norms and the cast, and of a method's update, asked of its own loop.
std::string current_target();
std::string current_target(Method method);

// ---------------------------------------------------------------- CUDA

// The same operations on device memory, enqueued on a stream (a cudaStream_t; null: the default
// one) of the current device; nothing here blocks or allocates. The same bits as on the CPU. All
// pointers are device memory (or pinned host memory that the device can reach), each aligned to its
// elements; more alignment than 16 bytes gains nothing. A kernel that does not start throws
// Trouble::internal; without CUDA in the build, Trouble::usage.
namespace cuda {

// Whether this build has the kernels and the current device runs them.
bool available();
void update(const Span& span, const Scalars& scalars, void* stream);
// Spans that do not depend on each other. Neighbours of the same types share launches, up to 24 of
// them one.
void update(std::span<const Span> spans, const Scalars& scalars, void* stream);
void recast(const float* p, int64_t count, DType weight_type, void* weight, void* stream);
void leaf_norms(const void* gradient, DType type, int64_t count, float* leaves, void* stream);

}  // namespace cuda

}  // namespace ferry::optim
