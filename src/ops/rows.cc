// Operations on rows: norms, rotation, gates, cross-entropy, conversions.
#include <cmath>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/rows.cc"
#include <hwy/foreach_target.h>
// after foreach_target
#include "kernels.h"
#include "simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ferry::ops::HWY_NAMESPACE {

// Sums run in fp32 lanes over kChunk elements and in double over the chunks.
constexpr int64_t kChunk = 512;

constexpr float kGeluScale = 1.5957691216057308f, kGeluCube = 0.044715f;  // 2 sqrt(2 / pi)

// Sum over [0, count) of value(i, n), whose lanes from n on must be zero.
template <class Value>
HWY_INLINE double sum_chunks(int64_t count, const Value& value) {
    double total = 0;
    for (int64_t first = 0; first < count; first += kChunk) {
        V32 sum = hn::Zero(F32());
        for_vectors(std::min(kChunk, count - first),
                    [&](int64_t i, int64_t n) { sum = hn::Add(sum, value(first + i, n)); });
        total += static_cast<double>(sum_lanes(sum));
    }
    return total;
}

// The i-th run of n columns.
inline const void* run_of(const ConstView& v, int64_t i, int64_t n) {
    const int64_t runs = v.cols / n;
    return element(v, i / runs, i % runs * n);
}
inline void* run_of(const View& v, int64_t i, int64_t n) {
    const int64_t runs = v.cols / n;
    return element(v, i / runs, i % runs * n);
}

void NormForwardRows(ConstView x, ConstView weight, double eps, View y, float* rstd, int64_t first,
                     int64_t count) {
    const int64_t cols = weight.cols;
    for (int64_t t = first; t < first + count; ++t) {
        const void* in = run_of(x, t, cols);
        void* out = run_of(y, t, cols);
        const double squares = sum_chunks(cols, [&](int64_t i, int64_t n) {
            const V32 v = load(in, x.type, i, n);
            return hn::Mul(v, v);
        });
        rstd[t] = static_cast<float>(1 / std::sqrt(squares / static_cast<double>(cols) + eps));
        const V32 r = hn::Set(F32(), rstd[t]);
        for_vectors(cols, [&](int64_t i, int64_t n) {
            const V32 v = hn::Mul(load(in, x.type, i, n), r);
            store(hn::Mul(v, load(weight.data, weight.type, i, n)), out, y.type, i, n);
        });
    }
}

void NormBackwardBlock(const NormBackward& a, int64_t block) {
    const F32 d;
    const int64_t hidden = a.weight.cols, first = block * kNormRows;
    const int64_t last = std::min(first + kNormRows, a.x.rows * (a.x.cols / hidden));
    float* partial = a.partial == nullptr ? nullptr : a.partial + block * hidden;
    if (partial != nullptr) std::fill_n(partial, hidden, 0.0f);
    for (int64_t t = first; t < last; ++t) {
        const void *dy = run_of(a.dy, t, hidden), *x = run_of(a.x, t, hidden);
        const auto weighted = [&](int64_t i, int64_t n) {
            return hn::Mul(load(a.weight.data, a.weight.type, i, n), load(dy, a.dy.type, i, n));
        };
        const V32 r = hn::Set(d, a.rstd[t]);
        if (partial != nullptr) {
            for_vectors(hidden, [&](int64_t i, int64_t n) {
                const V32 normed = hn::Mul(load(x, a.x.type, i, n), r);
                const V32 sum = load(partial, DType::f32, i, n);
                store(hn::MulAdd(normed, load(dy, a.dy.type, i, n), sum), partial, DType::f32, i,
                      n);
            });
        }
        if (a.dx.data == nullptr) continue;
        const double dot = sum_chunks(hidden, [&](int64_t i, int64_t n) {
            return hn::Mul(weighted(i, n), load(x, a.x.type, i, n));
        });
        const double r1 = a.rstd[t];
        const V32 pull =
            hn::Set(d, static_cast<float>(r1 * r1 * r1 * dot / static_cast<double>(hidden)));
        void* dx = run_of(a.dx, t, hidden);
        for_vectors(hidden, [&](int64_t i, int64_t n) {
            V32 own = hn::NegMulAdd(load(x, a.x.type, i, n), pull, hn::Mul(weighted(i, n), r));
            if (a.addend.data != nullptr) {
                own = hn::Add(load(run_of(a.addend, t, hidden), a.addend.type, i, n), own);
            }
            store(own, dx, a.dx.type, i, n);
        });
    }
}

// The first n lanes of v, then zeros.
HWY_INLINE V32 first_lanes(V32 v, int64_t n) {
    return n == lanes() ? v : hn::IfThenElseZero(hn::FirstN(F32(), static_cast<size_t>(n)), v);
}

void LayerNormForwardRows(ConstView x, ConstView weight, ConstView bias, double eps, View y,
                          float* stats, int64_t first, int64_t count) {
    const F32 d;
    const auto cols = static_cast<double>(x.cols);
    for (int64_t t = first; t < first + count; ++t) {
        const void* in = element(x, t, 0);
        void* out = element(y, t, 0);
        const double sum =
            sum_chunks(x.cols, [&](int64_t i, int64_t n) { return load(in, x.type, i, n); });
        stats[t] = static_cast<float>(sum / cols);
        const V32 mean = hn::Set(d, stats[t]);
        const double squares = sum_chunks(x.cols, [&](int64_t i, int64_t n) {
            const V32 v = hn::Sub(load(in, x.type, i, n), mean);
            return first_lanes(hn::Mul(v, v), n);
        });
        stats[x.rows + t] = static_cast<float>(1 / std::sqrt(squares / cols + eps));
        const V32 r = hn::Set(d, stats[x.rows + t]);
        for_vectors(x.cols, [&](int64_t i, int64_t n) {
            const V32 v = hn::Mul(hn::Sub(load(in, x.type, i, n), mean), r);
            store(hn::MulAdd(v, load(weight.data, weight.type, i, n),
                             load(bias.data, bias.type, i, n)),
                  out, y.type, i, n);
        });
    }
}

void LayerNormBackwardBlock(const NormBackward& a, int64_t block) {
    const F32 d;
    const int64_t hidden = a.x.cols, first = block * kNormRows;
    const int64_t last = std::min(first + kNormRows, a.x.rows);
    float* partial = a.partial == nullptr ? nullptr : a.partial + block * hidden;
    if (partial != nullptr) std::fill_n(partial, hidden, 0.0f);
    for (int64_t t = first; t < last; ++t) {
        const void *dy = element(a.dy, t, 0), *x = element(a.x, t, 0);
        const V32 r = hn::Set(d, a.rstd[t]), mean = hn::Set(d, a.mean[t]);
        const auto weighted = [&](int64_t i, int64_t n) {
            return hn::Mul(load(a.weight.data, a.weight.type, i, n), load(dy, a.dy.type, i, n));
        };
        const auto normed = [&](int64_t i, int64_t n) {
            return hn::Mul(hn::Sub(load(x, a.x.type, i, n), mean), r);
        };
        if (partial != nullptr) {
            for_vectors(hidden, [&](int64_t i, int64_t n) {
                const V32 sum = load(partial, DType::f32, i, n);
                store(hn::MulAdd(normed(i, n), load(dy, a.dy.type, i, n), sum), partial, DType::f32,
                      i, n);
            });
        }
        if (a.dx.data == nullptr) continue;
        const auto cols = static_cast<double>(hidden);
        const V32 level = hn::Set(d, static_cast<float>(sum_chunks(hidden, weighted) / cols));
        const double dot = sum_chunks(hidden, [&](int64_t i, int64_t n) {
            return hn::Mul(weighted(i, n), normed(i, n));  // dy is zero beyond the row
        });
        const V32 slope = hn::Set(d, static_cast<float>(dot / cols));
        void* dx = element(a.dx, t, 0);
        for_vectors(hidden, [&](int64_t i, int64_t n) {
            const V32 pull = hn::MulAdd(normed(i, n), slope, level);
            V32 own = hn::Mul(hn::Sub(weighted(i, n), pull), r);
            if (a.addend.data != nullptr) {
                own = hn::Add(load(element(a.addend, t, 0), a.addend.type, i, n), own);
            }
            store(own, dx, a.dx.type, i, n);
        });
    }
}

void SumRowsBlock(ConstView x, float* partial, int64_t block) {
    const int64_t first = block * kNormRows, last = std::min(first + kNormRows, x.rows);
    float* sums = partial + block * x.cols;
    std::fill_n(sums, x.cols, 0.0f);
    for (int64_t t = first; t < last; ++t) {
        const void* row = element(x, t, 0);
        for_vectors(x.cols, [&](int64_t i, int64_t n) {
            store(hn::Add(load(sums, DType::f32, i, n), load(row, x.type, i, n)), sums, DType::f32,
                  i, n);
        });
    }
}

void RotateRows(View x, const Rope& rope, int64_t first, int64_t step, const float* cosine,
                const float* sine) {
    const int64_t half = rope.head_dim / 2;
    for (int64_t t = first; t < x.rows; t += step) {
        for (int64_t h = 0; h < rope.heads; ++h) {
            void* low = element(x, t, h * rope.head_dim);
            void* high = element(x, t, h * rope.head_dim + half);
            for_vectors(half, [&](int64_t i, int64_t n) {
                const V32 a = load(low, x.type, i, n), b = load(high, x.type, i, n);
                const V32 c = load(cosine, DType::f32, i, n), s = load(sine, DType::f32, i, n);
                store(hn::Sub(hn::Mul(a, c), hn::Mul(b, s)), low, x.type, i, n);
                store(hn::Add(hn::Mul(b, c), hn::Mul(a, s)), high, x.type, i, n);
            });
        }
    }
}

HWY_INLINE V32 sigmoid(V32 x) {
    const F32 d;
    return hn::Div(hn::Set(d, 1.0f), hn::Add(hn::Set(d, 1.0f), exponential(hn::Neg(x))));
}

void SwigluForwardRows(ConstView gate_up, View y, int64_t first, int64_t count) {
    for (int64_t t = first; t < first + count; ++t) {
        const void *gate = element(gate_up, t, 0), *up = element(gate_up, t, y.cols);
        void* out = element(y, t, 0);
        for_vectors(y.cols, [&](int64_t i, int64_t n) {
            const V32 g = load(gate, gate_up.type, i, n);
            const V32 active = hn::Mul(g, sigmoid(g));
            store(hn::Mul(active, load(up, gate_up.type, i, n)), out, y.type, i, n);
        });
    }
}

void SwigluBackwardRows(View dy, View gate_up, int64_t first, int64_t count) {
    const V32 one = hn::Set(F32(), 1.0f);
    for (int64_t t = first; t < first + count; ++t) {
        void *gate = element(gate_up, t, 0), *up = element(gate_up, t, dy.cols);
        void* y = element(dy, t, 0);
        for_vectors(dy.cols, [&](int64_t i, int64_t n) {
            const V32 g = load(gate, gate_up.type, i, n), u = load(up, gate_up.type, i, n);
            const V32 dv = load(y, dy.type, i, n), s = sigmoid(g), active = hn::Mul(g, s);
            // d silu(g) = s (1 + g (1 - s))
            const V32 slope = hn::Mul(s, hn::MulAdd(g, hn::Sub(one, s), one));
            store(hn::Mul(hn::Mul(dv, u), slope), gate, gate_up.type, i, n);
            store(hn::Mul(dv, active), up, gate_up.type, i, n);
            store(hn::Mul(active, u), y, dy.type, i, n);
        });
    }
}

// x / 2 (1 + tanh(z)) = x sigmoid(2 z): 2 z, and its derivative.
HWY_INLINE V32 gelu_argument(V32 x) {
    const F32 d;
    const V32 cubic = hn::Mul(hn::Mul(x, x), hn::Set(d, kGeluCube));
    return hn::Mul(hn::Mul(hn::Set(d, kGeluScale), x), hn::Add(hn::Set(d, 1.0f), cubic));
}
HWY_INLINE V32 gelu_slope(V32 x) {
    const F32 d;
    const V32 cubic = hn::Mul(hn::Mul(x, x), hn::Set(d, 3 * kGeluCube));
    return hn::Mul(hn::Set(d, kGeluScale), hn::Add(hn::Set(d, 1.0f), cubic));
}

void GeluForwardRows(ConstView x, View y, int64_t first, int64_t count) {
    for (int64_t t = first; t < first + count; ++t) {
        const void* in = element(x, t, 0);
        void* out = element(y, t, 0);
        for_vectors(y.cols, [&](int64_t i, int64_t n) {
            const V32 v = load(in, x.type, i, n);
            store(hn::Mul(v, sigmoid(gelu_argument(v))), out, y.type, i, n);
        });
    }
}

void GeluBackwardRows(View dy, View x, int64_t first, int64_t count) {
    const V32 one = hn::Set(F32(), 1.0f);
    for (int64_t t = first; t < first + count; ++t) {
        void *y = element(dy, t, 0), *at = element(x, t, 0);
        for_vectors(dy.cols, [&](int64_t i, int64_t n) {
            const V32 v = load(at, x.type, i, n), s = sigmoid(gelu_argument(v));
            const V32 active = hn::Mul(v, s);
            // d (x s(u)) = s + x s (1 - s) u'
            const V32 bend = hn::Mul(active, hn::Mul(hn::Sub(one, s), gelu_slope(v)));
            store(hn::Mul(load(y, dy.type, i, n), hn::Add(s, bend)), at, x.type, i, n);
            store(active, y, dy.type, i, n);
        });
    }
}

inline float largest(const float* row, int64_t count) {
    const F32 d;
    V32 top = hn::Set(d, row[0]);
    int64_t i = 0;
    for (; i + lanes() <= count; i += lanes()) top = hn::Max(top, hn::LoadU(d, row + i));
    float result = hn::GetLane(hn::MaxOfLanes(d, top));
    for (; i < count; ++i) result = std::max(result, row[i]);
    return result;
}

inline double sum_of_exponentials(const float* row, int64_t cols, float top) {
    const F32 d;
    const V32 high = hn::Set(d, top);
    return sum_chunks(cols, [&](int64_t i, int64_t n) {
        const V32 e = exponential(hn::Sub(load(row, DType::f32, i, n), high));
        return n == lanes() ? e : hn::IfThenElseZero(hn::FirstN(d, static_cast<size_t>(n)), e);
    });
}

// Of the whole row: its largest logit, the sum of exp(logit - top), and the target's less top.
struct Softmax {
    float top;
    double sum, of_target;
};

// scale * (softmax - onehot); `target` below 0: it is among no columns of this row.
inline void store_slopes(const float* row, const Softmax& whole, int32_t target, float scale,
                         View dlogits, int64_t t) {
    const F32 d;
    const V32 high = hn::Set(d, whole.top);
    const V32 factor = hn::Set(d, static_cast<float>(static_cast<double>(scale) / whole.sum));
    void* out = element(dlogits, t, 0);
    for_vectors(dlogits.cols, [&](int64_t i, int64_t n) {
        const V32 e = exponential(hn::Sub(load(row, DType::f32, i, n), high));
        store(hn::Mul(e, factor), out, dlogits.type, i, n);
    });
    if (target < 0) return;
    // p - 1 cancels where the model is sure: in double.
    const double own = (std::exp(whole.of_target) / whole.sum - 1) * static_cast<double>(scale);
    store(hn::Set(d, static_cast<float>(own)), out, dlogits.type, target, 1);
}

inline void clear_row(View x, int64_t t) {
    std::memset(element(x, t, 0), 0, static_cast<size_t>(x.cols * size_of(x.type)));
}

void CrossEntropyRows(ConstView logits, const int32_t* targets, float scale, View dlogits,
                      double* losses, int64_t first, int64_t count) {
    for (int64_t t = first; t < first + count; ++t) {
        const auto* row = static_cast<const float*>(element(logits, t, 0));
        const int32_t target = targets[t];
        losses[t] = 0;
        if (target < 0) {
            if (dlogits.data != nullptr) clear_row(dlogits, t);
            continue;
        }
        const float top = largest(row, logits.cols);
        const double sum = sum_of_exponentials(row, logits.cols, top);
        const double of_target = static_cast<double>(row[target]) - static_cast<double>(top);
        losses[t] = std::log(sum) - of_target;
        if (dlogits.data != nullptr)
            store_slopes(row, {top, sum, of_target}, target, scale, dlogits, t);
    }
}

void LossPartsRows(ConstView logits, const int32_t* own_targets, double* parts, int64_t first,
                   int64_t count) {
    for (int64_t t = first; t < first + count; ++t) {
        const auto* row = static_cast<const float*>(element(logits, t, 0));
        const float top = largest(row, logits.cols);
        double* const to = parts + t * Ops::kLossParts;
        to[0] = static_cast<double>(top);
        to[1] = sum_of_exponentials(row, logits.cols, top);
        to[2] = own_targets[t] < 0 ? 0 : static_cast<double>(row[own_targets[t]]);
    }
}

void CrossEntropyOfPartsRows(ConstView logits, const Ops::LossTargets& targets, const double* parts,
                             int ranks, float scale, View dlogits, double* losses, int64_t first,
                             int64_t count) {
    const int64_t of_rank = logits.rows * Ops::kLossParts;
    for (int64_t t = first; t < first + count; ++t) {
        losses[t] = 0;
        if (targets.targets[t] < 0) {
            if (dlogits.data != nullptr) clear_row(dlogits, t);
            continue;
        }
        const double* const told = parts + t * Ops::kLossParts;
        double top = told[0], sum = 0, of_target = 0;
        for (int rank = 1; rank < ranks; ++rank) top = std::max(top, told[rank * of_rank]);
        for (int rank = 0; rank < ranks; ++rank) {
            const double* const its = told + rank * of_rank;
            sum += its[1] * std::exp(its[0] - top);
            of_target += its[2];
        }
        of_target -= top;
        losses[t] = std::log(sum) - of_target;
        if (dlogits.data == nullptr) continue;
        const auto* row = static_cast<const float*>(element(logits, t, 0));
        store_slopes(row, {static_cast<float>(top), sum, of_target}, targets.own[t], scale, dlogits,
                     t);
    }
}

void CopyRow(const void* from, DType from_type, int64_t count, void* to, DType to_type) {
    for_vectors(count, [&](int64_t i, int64_t n) {
        store(load(from, from_type, i, n), to, to_type, i, n);
    });
}

void AddRow(float* a, const void* b, DType b_type, int64_t count) {
    for_vectors(count, [&](int64_t i, int64_t n) {
        store(hn::Add(load(a, DType::f32, i, n), load(b, b_type, i, n)), a, DType::f32, i, n);
    });
}

void SumRow(const void* a, DType a_type, const void* b, DType b_type, int64_t count, void* to,
            DType to_type) {
    for_vectors(count, [&](int64_t i, int64_t n) {
        store(hn::Add(load(a, a_type, i, n), load(b, b_type, i, n)), to, to_type, i, n);
    });
}

void RoundLeaf(const float* accumulator, int64_t count, DType wire_type, void* wire, float* leaf) {
    const F32 d;
    alignas(64) float lane[16];
    constexpr int64_t vectors = 16 / HWY_MIN(16, HWY_LANES(float));
    V32 sums[vectors];
    for (V32& sum : sums) sum = hn::Zero(d);
    for (int64_t first = 0; first < count; first += 16) {
        for (int64_t v = 0; v < vectors; ++v) {
            const int64_t i = first + v * lanes(), n = std::min(lanes(), count - i);
            if (n <= 0) break;
            store(load(accumulator, DType::f32, i, n), wire, wire_type, i, n);
            // Below 2^-60 a gradient counts as zero, as in the update; a NaN compares false and
            // stays.
            const V32 value = load(wire, wire_type, i, n);
            const V32 rounded =
                hn::IfThenZeroElse(hn::Lt(hn::Abs(value), hn::Set(d, 0x1p-60F)), value);
            sums[v] = hn::Add(sums[v], hn::Mul(rounded, rounded));
        }
    }
    for (int64_t v = 0; v < vectors; ++v) hn::Store(sums[v], d, lane + v * lanes());
    for (int width = 8; width > 0; width /= 2) {
        for (int j = 0; j < width; ++j) lane[j] += lane[j + width];
    }
    *leaf = lane[0];
}

bool RowIsFinite(const void* x, DType type, int64_t count) {
    // x - x is zero exactly where x is finite.
    V32 worst = hn::Zero(F32());
    for_vectors(count, [&](int64_t i, int64_t n) {
        const V32 v = load(x, type, i, n);
        worst = hn::Add(worst, hn::Sub(v, v));
    });
    return sum_lanes(worst) == 0;
}

}  // namespace ferry::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ferry::ops {

HWY_EXPORT(NormForwardRows);
void norm_forward_rows(ConstView x, ConstView weight, double eps, View y, float* rstd,
                       int64_t first, int64_t count) {
    HWY_DYNAMIC_DISPATCH(NormForwardRows)(x, weight, eps, y, rstd, first, count);
}

HWY_EXPORT(NormBackwardBlock);
void norm_backward_block(const NormBackward& args, int64_t block) {
    HWY_DYNAMIC_DISPATCH(NormBackwardBlock)(args, block);
}

HWY_EXPORT(LayerNormForwardRows);
void layer_norm_forward_rows(ConstView x, ConstView weight, ConstView bias, double eps, View y,
                             float* stats, int64_t first, int64_t count) {
    HWY_DYNAMIC_DISPATCH(LayerNormForwardRows)(x, weight, bias, eps, y, stats, first, count);
}

HWY_EXPORT(LayerNormBackwardBlock);
void layer_norm_backward_block(const NormBackward& args, int64_t block) {
    HWY_DYNAMIC_DISPATCH(LayerNormBackwardBlock)(args, block);
}

HWY_EXPORT(SumRowsBlock);
void sum_rows_block(ConstView x, float* partial, int64_t block) {
    HWY_DYNAMIC_DISPATCH(SumRowsBlock)(x, partial, block);
}

void add_partial_cols(const float* partial, int64_t blocks, int64_t cols, int64_t col,
                      int64_t count, Accumulator gradient) {
    for (int64_t c = col; c < col + count; ++c) {
        double sum = 0;
        for (int64_t b = 0; b < blocks; ++b) sum += static_cast<double>(partial[b * cols + c]);
        gradient.at[c] = static_cast<float>(static_cast<double>(gradient.of(c)) + sum);
    }
}

HWY_EXPORT(RotateRows);
void rotate_rows(View x, const Rope& rope, int64_t first, int64_t step, const float* cosine,
                 const float* sine) {
    HWY_DYNAMIC_DISPATCH(RotateRows)(x, rope, first, step, cosine, sine);
}

HWY_EXPORT(SwigluForwardRows);
void swiglu_forward_rows(ConstView gate_up, View y, int64_t first, int64_t count) {
    HWY_DYNAMIC_DISPATCH(SwigluForwardRows)(gate_up, y, first, count);
}

HWY_EXPORT(SwigluBackwardRows);
void swiglu_backward_rows(View dy, View gate_up, int64_t first, int64_t count) {
    HWY_DYNAMIC_DISPATCH(SwigluBackwardRows)(dy, gate_up, first, count);
}

HWY_EXPORT(GeluForwardRows);
void gelu_forward_rows(ConstView x, View y, int64_t first, int64_t count) {
    HWY_DYNAMIC_DISPATCH(GeluForwardRows)(x, y, first, count);
}

HWY_EXPORT(GeluBackwardRows);
void gelu_backward_rows(View dy, View x, int64_t first, int64_t count) {
    HWY_DYNAMIC_DISPATCH(GeluBackwardRows)(dy, x, first, count);
}

HWY_EXPORT(CrossEntropyRows);
void cross_entropy_rows(ConstView logits, const int32_t* targets, float scale, View dlogits,
                        double* losses, int64_t first, int64_t count) {
    HWY_DYNAMIC_DISPATCH(CrossEntropyRows)(logits, targets, scale, dlogits, losses, first, count);
}

HWY_EXPORT(LossPartsRows);
void loss_parts_rows(ConstView logits, const int32_t* own_targets, double* parts, int64_t first,
                     int64_t count) {
    HWY_DYNAMIC_DISPATCH(LossPartsRows)(logits, own_targets, parts, first, count);
}

HWY_EXPORT(CrossEntropyOfPartsRows);
void cross_entropy_of_parts_rows(ConstView logits, const Ops::LossTargets& targets,
                                 const double* parts, int ranks, float scale, View dlogits,
                                 double* losses, int64_t first, int64_t count) {
    HWY_DYNAMIC_DISPATCH(CrossEntropyOfPartsRows)
    (logits, targets, parts, ranks, scale, dlogits, losses, first, count);
}

HWY_EXPORT(CopyRow);
void copy_row(const void* from, DType from_type, int64_t count, void* to, DType to_type) {
    HWY_DYNAMIC_DISPATCH(CopyRow)(from, from_type, count, to, to_type);
}

HWY_EXPORT(AddRow);
void add_row(float* a, const void* b, DType b_type, int64_t count) {
    HWY_DYNAMIC_DISPATCH(AddRow)(a, b, b_type, count);
}

HWY_EXPORT(SumRow);
void sum_row(const void* a, DType a_type, const void* b, DType b_type, int64_t count, void* to,
             DType to_type) {
    HWY_DYNAMIC_DISPATCH(SumRow)(a, a_type, b, b_type, count, to, to_type);
}

HWY_EXPORT(RoundLeaf);
void round_leaf(const float* accumulator, int64_t count, DType wire_type, void* wire, float* leaf) {
    HWY_DYNAMIC_DISPATCH(RoundLeaf)(accumulator, count, wire_type, wire, leaf);
}

HWY_EXPORT(RowIsFinite);
bool row_is_finite(const void* x, DType type, int64_t count) {
    return HWY_DYNAMIC_DISPATCH(RowIsFinite)(x, type, count);
}

}  // namespace ferry::ops
#endif
