// The oracle: each operation as its formula reads, in double, one thread. Slow on purpose.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <numbers>
#include <vector>

#include "ops/part_attention.h"

namespace ferry::ops {
namespace {

double get(const ConstView& v, int64_t row, int64_t col) {
    const int64_t at = row * v.ld + col;
    switch (v.type) {
        case DType::f32:
            return static_cast<const float*>(v.data)[at];
        case DType::bf16:
            return from_bf16(static_cast<const uint16_t*>(v.data)[at]);
        case DType::f16:
            return from_f16(static_cast<const uint16_t*>(v.data)[at]);
    }
    return 0;
}

void put(const View& v, int64_t row, int64_t col, double value) {
    const int64_t at = row * v.ld + col;
    const auto rounded = static_cast<float>(value);
    switch (v.type) {
        case DType::f32:
            static_cast<float*>(v.data)[at] = rounded;
            break;
        case DType::bf16:
            static_cast<uint16_t*>(v.data)[at] = to_bf16(rounded);
            break;
        case DType::f16:
            static_cast<uint16_t*>(v.data)[at] = to_f16(rounded);
            break;
    }
}

void add_to(const Accumulator& sums, int64_t i, double more) {
    sums.at[i] = static_cast<float>(static_cast<double>(sums.of(i)) + more);
}

class ReferenceOps final : public Ops, public PartAttention {
public:
    int64_t gemm_scratch_bytes(const Gemm&) const override { return 0; }

    void gemm(const Gemm& g, std::byte*) override {
        const bool a_transposed = g.form == Form::tn, b_transposed = g.form == Form::nt;
        const int64_t depth = a_transposed ? g.a.rows : g.a.cols;
        for (int64_t i = 0; i < g.c.rows; ++i) {
            for (int64_t j = 0; j < g.c.cols; ++j) {
                double sum = 0;
                for (int64_t p = 0; p < depth; ++p) {
                    sum += (a_transposed ? get(g.a, p, i) : get(g.a, i, p)) *
                           (b_transposed ? get(g.b, j, p) : get(g.b, p, j));
                }
                if (g.bias.data != nullptr) sum += get(g.bias, 0, j);
                if (g.addend.data != nullptr) sum += get(g.addend, i, j);
                if (g.reads_c()) sum += get(g.c, i, j);
                put(g.c, i, j, sum);
            }
        }
    }

    void norm_forward(ConstView x, ConstView weight, double eps, View y, float* rstd) override {
        const int64_t n = weight.cols;
        for_runs(x, n, [&](int64_t t, int64_t first, int64_t i) {
            double squares = 0;
            for (int64_t c = 0; c < n; ++c) squares += get(x, t, first + c) * get(x, t, first + c);
            const double r = 1 / std::sqrt(squares / static_cast<double>(n) + eps);
            rstd[i] = static_cast<float>(r);
            for (int64_t c = 0; c < n; ++c)
                put(y, t, first + c, get(x, t, first + c) * r * get(weight, 0, c));
        });
    }

    int64_t norm_backward_scratch_bytes(int64_t, int64_t) const override { return 0; }

    // y = x r w, r = (mean(x^2) + eps)^(-1/2):
    // dx = r (w dy) - x r^3 / n * sum(w dy x), dw = sum over tokens of dy x r.
    void norm_backward(ConstView dy, ConstView x, ConstView weight, const float* rstd,
                       ConstView addend, View dx, Accumulator weight_gradient,
                       std::byte*) override {
        const int64_t n = weight.cols;
        for (int64_t c = 0; weight_gradient.asked() && c < n; ++c) {
            double sum = 0;
            for_runs(x, n, [&](int64_t t, int64_t first, int64_t i) {
                sum += get(dy, t, first + c) * get(x, t, first + c) * static_cast<double>(rstd[i]);
            });
            add_to(weight_gradient, c, sum);
        }
        if (dx.data == nullptr) return;
        for_runs(x, n, [&](int64_t t, int64_t first, int64_t i) {
            const double r = rstd[i];
            double dot = 0;
            for (int64_t c = 0; c < n; ++c)
                dot += get(weight, 0, c) * get(dy, t, first + c) * get(x, t, first + c);
            for (int64_t c = 0; c < n; ++c) {
                const double before = addend.data != nullptr ? get(addend, t, first + c) : 0;
                const double own = r * get(weight, 0, c) * get(dy, t, first + c) -
                                   get(x, t, first + c) * r * r * r / static_cast<double>(n) * dot;
                put(dx, t, first + c, before + own);
            }
        });
    }

    void layer_norm_forward(ConstView x, ConstView weight, ConstView bias, double eps, View y,
                            float* stats) override {
        const auto n = static_cast<double>(x.cols);
        for (int64_t t = 0; t < x.rows; ++t) {
            double mean = 0, variance = 0;
            for (int64_t c = 0; c < x.cols; ++c) mean += get(x, t, c) / n;
            for (int64_t c = 0; c < x.cols; ++c)
                variance += (get(x, t, c) - mean) * (get(x, t, c) - mean) / n;
            const double r = 1 / std::sqrt(variance + eps);
            stats[t] = static_cast<float>(mean);
            stats[x.rows + t] = static_cast<float>(r);
            for (int64_t c = 0; c < x.cols; ++c)
                put(y, t, c, (get(x, t, c) - mean) * r * get(weight, 0, c) + get(bias, 0, c));
        }
    }

    // y = h w + b, h = (x - mean) r: dx = r (w dy - mean(w dy) - h mean(w dy h)), dw = sum of dy h.
    int64_t layer_norm_backward_scratch_bytes(int64_t, int64_t) const override { return 0; }
    void layer_norm_backward(ConstView dy, ConstView x, ConstView weight, const float* stats,
                             ConstView addend, View dx, Accumulator weight_gradient,
                             Accumulator bias_gradient, std::byte*) override {
        if (bias_gradient.asked()) sum_rows(dy, bias_gradient, nullptr);
        const auto n = static_cast<double>(x.cols);
        const auto normed = [&](int64_t t, int64_t c) {
            return (get(x, t, c) - static_cast<double>(stats[t])) *
                   static_cast<double>(stats[x.rows + t]);
        };
        for (int64_t c = 0; weight_gradient.asked() && c < x.cols; ++c) {
            double sum = 0;
            for (int64_t t = 0; t < x.rows; ++t) sum += get(dy, t, c) * normed(t, c);
            add_to(weight_gradient, c, sum);
        }
        if (dx.data == nullptr) return;
        for (int64_t t = 0; t < x.rows; ++t) {
            double mean = 0, slope = 0;
            for (int64_t c = 0; c < x.cols; ++c) {
                const double g = get(weight, 0, c) * get(dy, t, c);
                mean += g / n;
                slope += g * normed(t, c) / n;
            }
            for (int64_t c = 0; c < x.cols; ++c) {
                const double before = addend.data != nullptr ? get(addend, t, c) : 0;
                const double g = get(weight, 0, c) * get(dy, t, c);
                put(dx, t, c,
                    before +
                        static_cast<double>(stats[x.rows + t]) * (g - mean - normed(t, c) * slope));
            }
        }
    }

    void sum_rows(ConstView x, Accumulator sums, std::byte*) override {
        for (int64_t c = 0; c < x.cols; ++c) {
            double sum = 0;
            for (int64_t t = 0; t < x.rows; ++t) sum += get(x, t, c);
            add_to(sums, c, sum);
        }
    }

    void rope(View x, const Rope& rope) override {
        const int64_t half = rope.head_dim / 2;
        for (int64_t t = 0; t < x.rows; ++t) {
            for (int64_t i = 0; i < half; ++i) {
                const int64_t position = position_of(t, rope.sequence, rope.document_start);
                const double angle = static_cast<double>(position) * rope.frequencies[i];
                const double c = rope.amplitude * std::cos(angle),
                             s = rope.amplitude *
                                 (rope.inverse ? -std::sin(angle) : std::sin(angle));
                for (int64_t h = 0; h < rope.heads; ++h) {
                    const int64_t col = h * rope.head_dim + i;
                    const double a = get(x, t, col), b = get(x, t, col + half);
                    put(x, t, col, a * c - b * s);
                    put(x, t, col + half, b * c + a * s);
                }
            }
        }
    }

    int64_t attention_forward_scratch_bytes(const Attention&) const override { return 0; }

    // Row by row; probabilities of one row at a time.
    void attention_forward(const Attention& shape, ConstView q, ConstView k, ConstView v, View out,
                           float* lse, std::byte*) override {
        Row row;
        const int64_t tokens = shape.sequences * shape.sequence, d = shape.head_dim;
        for (int64_t h = 0; h < shape.heads; ++h) {
            const int64_t kv = h / (shape.heads / shape.kv_heads);
            for (int64_t t = 0; t < tokens; ++t) {
                lse[shape.lse_index(t, h)] =
                    static_cast<float>(probabilities(shape, q, k, h, t, row));
                for (int64_t c = 0; c < d; ++c) {
                    double sum = 0;
                    for (size_t i = 0; i < row.keys.size(); ++i)
                        sum += row.p[i] * get(v, row.keys[i], kv * d + c);
                    put(out, t, h * d + c, sum);
                }
            }
        }
    }

    int64_t attention_backward_scratch_bytes(const Attention&) const override { return 0; }

    void attention_backward(const Attention& shape, ConstView q, ConstView k, ConstView v,
                            ConstView, ConstView dout, const float*, View dq, View dk, View dv,
                            std::byte*) override {
        const int64_t tokens = shape.sequences * shape.sequence, d = shape.head_dim;
        Row row;
        std::vector<double> dp;
        const auto size = [&](const View& x) { return static_cast<size_t>(x.rows * x.cols); };
        std::vector<double> q_sum(size(dq)), k_sum(size(dk)), v_sum(size(dv));
        for (int64_t h = 0; h < shape.heads; ++h) {
            const int64_t kv = h / (shape.heads / shape.kv_heads);
            for (int64_t t = 0; t < tokens; ++t) {
                probabilities(shape, q, k, h, t, row);
                dp.assign(row.keys.size(), 0);
                double dot = 0;
                for (size_t i = 0; i < dp.size(); ++i) {
                    for (int64_t c = 0; c < d; ++c)
                        dp[i] += get(dout, t, h * d + c) * get(v, row.keys[i], kv * d + c);
                    dot += dp[i] * row.p[i];
                }
                for (size_t i = 0; i < dp.size(); ++i) {
                    const int64_t s = row.keys[i];
                    const double ds = row.p[i] * (dp[i] - dot) * shape.scale;
                    for (int64_t c = 0; c < d; ++c) {
                        q_sum[static_cast<size_t>(t * dq.cols + h * d + c)] +=
                            ds * get(k, s, kv * d + c);
                        k_sum[static_cast<size_t>(s * dk.cols + kv * d + c)] +=
                            ds * get(q, t, h * d + c);
                        v_sum[static_cast<size_t>(s * dv.cols + kv * d + c)] +=
                            row.p[i] * get(dout, t, h * d + c);
                    }
                }
            }
        }
        put_all(dq, q_sum);
        put_all(dk, k_sum);
        put_all(dv, v_sum);
    }

    int64_t part_scratch_bytes(const Attention&, int64_t, int64_t) const override { return 0; }

    void part_forward(const Attention& shape, SequencePart queries, SequencePart keys, ConstView q,
                      ConstView k, ConstView v, View out, float* lse, std::byte*) override {
        const int64_t d = shape.head_dim;
        for (int64_t h = 0; h < shape.heads; ++h) {
            const int64_t kv = h / (shape.heads / shape.kv_heads);
            for (int64_t t = 0; t < queries.count; ++t) {
                const std::vector<Score> row = scores(shape, queries, keys, q, k, h, t);
                double top = -std::numeric_limits<double>::infinity(), sum = 0;
                for (const Score& s : row) top = std::max(top, s.of);
                for (const Score& s : row) sum += std::exp(s.of - top);
                lse[h * queries.count + t] = static_cast<float>(top + std::log(sum));
                for (int64_t c = 0; c < d; ++c) {
                    double value = 0;
                    for (const Score& s : row)
                        value += std::exp(s.of - top) / sum * get(v, s.key, kv * d + c);
                    put(out, t, h * d + c, value);
                }
            }
        }
    }

    void part_backward(const Attention& shape, SequencePart queries, SequencePart keys, ConstView q,
                       ConstView k, ConstView v, ConstView out, ConstView dout, const float* lse,
                       View dq, View dk, View dv, std::byte*) override {
        const int64_t d = shape.head_dim;
        const auto size = [&](const View& x) { return static_cast<size_t>(x.rows * x.cols); };
        std::vector<double> q_sum(size(dq)), k_sum(size(dk)), v_sum(size(dv));
        for (int64_t h = 0; h < shape.heads; ++h) {
            const int64_t kv = h / (shape.heads / shape.kv_heads);
            for (int64_t t = 0; t < queries.count; ++t) {
                double dot = 0;
                for (int64_t c = h * d; c < (h + 1) * d; ++c)
                    dot += get(out, t, c) * get(dout, t, c);
                for (const Score& s : scores(shape, queries, keys, q, k, h, t)) {
                    const double p =
                        std::exp(s.of - static_cast<double>(lse[h * queries.count + t]));
                    double dp = 0;
                    for (int64_t c = 0; c < d; ++c)
                        dp += get(dout, t, h * d + c) * get(v, s.key, kv * d + c);
                    const double ds = p * (dp - dot) * shape.scale;
                    for (int64_t c = 0; c < d; ++c) {
                        const auto of_key = static_cast<size_t>(s.key * dk.cols + kv * d + c);
                        q_sum[static_cast<size_t>(t * dq.cols + h * d + c)] +=
                            ds * get(k, s.key, kv * d + c);
                        k_sum[of_key] += ds * get(q, t, h * d + c);
                        v_sum[of_key] += p * get(dout, t, h * d + c);
                    }
                }
            }
        }
        put_all(dq, q_sum);
        put_all(dk, k_sum);
        put_all(dv, v_sum);
    }

    void merge_parts(int64_t heads, ConstView part, const float* part_lse, View sum,
                     float* sum_lse) override {
        const int64_t d = sum.cols / heads;
        for (int64_t i = 0; i < heads * sum.rows; ++i) {
            const int64_t head = i / sum.rows, row = i % sum.rows;
            const double a = static_cast<double>(sum_lse[i]);
            const double b = static_cast<double>(part_lse[i]), top = std::max(a, b);
            if (top == -std::numeric_limits<double>::infinity()) continue;
            const double both = std::exp(a - top) + std::exp(b - top);
            for (int64_t c = head * d; c < (head + 1) * d; ++c) {
                put(sum, row, c,
                    (std::exp(a - top) * get(sum, row, c) + std::exp(b - top) * get(part, row, c)) /
                        both);
            }
            sum_lse[i] = static_cast<float>(top + std::log(both));
        }
    }

    void swiglu_forward(ConstView gate_up, View y) override {
        for (int64_t t = 0; t < y.rows; ++t) {
            for (int64_t c = 0; c < y.cols; ++c) {
                const double g = get(gate_up, t, c), u = get(gate_up, t, y.cols + c);
                put(y, t, c, g / (1 + std::exp(-g)) * u);
            }
        }
    }

    void swiglu_backward(View dy, View gate_up) override {
        for (int64_t t = 0; t < dy.rows; ++t) {
            for (int64_t c = 0; c < dy.cols; ++c) {
                const double g = get(gate_up, t, c), u = get(gate_up, t, dy.cols + c);
                const double d = get(dy, t, c), sigmoid = 1 / (1 + std::exp(-g));
                put(gate_up, t, c, d * u * sigmoid * (1 + g * (1 - sigmoid)));
                put(gate_up, t, dy.cols + c, d * g * sigmoid);
                put(dy, t, c, g / (1 + std::exp(-g)) * u);
            }
        }
    }

    void gelu_forward(ConstView x, View y) override {
        for (int64_t t = 0; t < y.rows; ++t) {
            for (int64_t c = 0; c < y.cols; ++c) {
                const double v = get(x, t, c);
                put(y, t, c, v / 2 * (1 + std::tanh(gelu_argument(v))));
            }
        }
    }

    void gelu_backward(View dy, View x) override {
        for (int64_t t = 0; t < dy.rows; ++t) {
            for (int64_t c = 0; c < dy.cols; ++c) {
                const double v = get(x, t, c), th = std::tanh(gelu_argument(v));
                const double inner = kGeluScale * (1 + 3 * kGeluCube * v * v);
                put(x, t, c, get(dy, t, c) * ((1 + th) / 2 + v / 2 * (1 - th * th) * inner));
                put(dy, t, c, v / 2 * (1 + th));
            }
        }
    }

    void own_rows(const int32_t* tokens, int64_t count, int64_t first, int64_t rows,
                  int32_t* own) override {
        for (int64_t t = 0; t < count; ++t) {
            const int64_t row = tokens[t] - first;
            own[t] = row >= 0 && row < rows ? static_cast<int32_t>(row) : -1;
        }
    }

    void embed(const int32_t* tokens, ConstView table, ConstView positions,
               const int32_t* document_start, View x) override {
        for (int64_t t = 0; t < x.rows; ++t) {
            for (int64_t c = 0; c < x.cols; ++c) {
                const double at =
                    positions.data != nullptr
                        ? get(positions, position_of(t, positions.rows, document_start), c)
                        : 0;
                put(x, t, c, tokens[t] < 0 ? 0 : get(table, tokens[t], c) + at);
            }
        }
    }

    int64_t embed_backward_scratch_bytes(int64_t) const override { return 0; }
    void embed_backward(const int32_t* tokens, ConstView dx, float* gradient, std::byte*) override {
        for (int64_t t = 0; t < dx.rows; ++t) {
            if (tokens[t] < 0) continue;
            float* row = gradient + tokens[t] * dx.cols;
            for (int64_t c = 0; c < dx.cols; ++c) row[c] += static_cast<float>(get(dx, t, c));
        }
    }

    void positions_backward(ConstView dx, int64_t sequence, const int32_t* document_start,
                            float* gradient, std::byte*) override {
        for (int64_t t = 0; t < dx.rows; ++t) {
            float* row = gradient + position_of(t, sequence, document_start) * dx.cols;
            for (int64_t c = 0; c < dx.cols; ++c) row[c] += static_cast<float>(get(dx, t, c));
        }
    }

    int64_t cross_entropy_scratch_bytes(int64_t) const override { return 0; }

    void cross_entropy(ConstView logits, const int32_t* targets, float scale, View dlogits,
                       double* loss_sum, std::byte*) override {
        for (int64_t t = 0; t < logits.rows; ++t) {
            double top = -std::numeric_limits<double>::infinity(), sum = 0;
            for (int64_t c = 0; c < logits.cols; ++c) top = std::max(top, get(logits, t, c));
            for (int64_t c = 0; c < logits.cols; ++c) sum += std::exp(get(logits, t, c) - top);
            const bool real = targets[t] >= 0;
            if (real) *loss_sum += top + std::log(sum) - get(logits, t, targets[t]);
            if (dlogits.data == nullptr) continue;
            for (int64_t c = 0; c < logits.cols; ++c) {
                const double p =
                    std::exp(get(logits, t, c) - top) / sum - (c == targets[t] ? 1 : 0);
                put(dlogits, t, c, real ? p * static_cast<double>(scale) : 0);
            }
        }
    }

    void loss_parts(ConstView logits, const int32_t* own_targets, double* parts) override {
        for (int64_t t = 0; t < logits.rows; ++t) {
            double top = -std::numeric_limits<double>::infinity(), sum = 0;
            for (int64_t c = 0; c < logits.cols; ++c) top = std::max(top, get(logits, t, c));
            for (int64_t c = 0; c < logits.cols; ++c) sum += std::exp(get(logits, t, c) - top);
            parts[t * kLossParts] = top;
            parts[t * kLossParts + 1] = sum;
            parts[t * kLossParts + 2] = own_targets[t] < 0 ? 0 : get(logits, t, own_targets[t]);
        }
    }

    void cross_entropy_of_parts(ConstView logits, const LossTargets& targets, const double* parts,
                                int ranks, float scale, View dlogits, double* loss_sum,
                                std::byte*) override {
        for (int64_t t = 0; t < logits.rows; ++t) {
            const auto told = [&](int rank, int64_t what) {
                return parts[(rank * logits.rows + t) * kLossParts + what];
            };
            double top = told(0, 0), sum = 0, of_target = 0;
            for (int rank = 1; rank < ranks; ++rank) top = std::max(top, told(rank, 0));
            for (int rank = 0; rank < ranks; ++rank) {
                sum += told(rank, 1) * std::exp(told(rank, 0) - top);
                of_target += told(rank, 2);
            }
            const bool real = targets.targets[t] >= 0;
            if (real) *loss_sum += top + std::log(sum) - of_target;
            for (int64_t c = 0; c < dlogits.cols; ++c) {
                const double p =
                    std::exp(get(logits, t, c) - top) / sum - (c == targets.own[t] ? 1 : 0);
                put(dlogits, t, c, real ? p * static_cast<double>(scale) : 0);
            }
        }
    }

    void round_gradient(const float* accumulator, int64_t count, DType wire_type, void* wire,
                        float* leaves) override {
        constexpr int64_t kLeaf = 4096;
        const View out = View::of(wire, wire_type, 1, count);
        for (int64_t first = 0; first < count; first += kLeaf) {
            std::array<float, 16> lane{};
            for (int64_t i = first; i < std::min(count, first + kLeaf); ++i) {
                put(out, 0, i, accumulator[i]);
                const auto rounded = static_cast<float>(get(out, 0, i));
                const float value = std::abs(rounded) < 0x1p-60F ? 0 : rounded;
                lane[static_cast<size_t>(i - first) % 16] += value * value;
            }
            for (size_t width = 8; width > 0; width /= 2) {
                for (size_t j = 0; j < width; ++j) lane[j] += lane[j + width];
            }
            leaves[first / kLeaf] = lane[0];
        }
    }

    void sum_gradient(ConstView parts, void* wire, float* leaves) override {
        std::vector<float> sum(static_cast<size_t>(parts.cols));
        for (int64_t i = 0; i < parts.cols; ++i) {
            auto& of = sum[static_cast<size_t>(i)];
            of = static_cast<float>(get(parts, 0, i));
            for (int64_t r = 1; r < parts.rows; ++r) of += static_cast<float>(get(parts, r, i));
        }
        round_gradient(sum.data(), parts.cols, parts.type, wire, leaves);
    }

    void add(float* a, const float* b, int64_t count) override {
        for (int64_t i = 0; i < count; ++i) a[i] += b[i];
    }

    void fill_zero(void* data, int64_t bytes) override {
        std::memset(data, 0, static_cast<size_t>(bytes));
    }

    void cast(ConstView from, View to) override {
        for (int64_t r = 0; r < to.rows; ++r) {
            for (int64_t c = 0; c < to.cols; ++c) put(to, r, c, get(from, r, c));
        }
    }

    void copy_out(ConstView from, View to) override { cast(from, to); }

    void check_finite(ConstView x, uint32_t* nonfinite) override {
        for (int64_t r = 0; r < x.rows; ++r) {
            for (int64_t c = 0; c < x.cols; ++c)
                *nonfinite |= std::isfinite(get(x, r, c)) ? 0u : 1u;
        }
    }

private:
    static constexpr double kGeluCube = 0.044715;
    static inline const double kGeluScale = std::sqrt(2 / std::numbers::pi);
    static double gelu_argument(double x) { return kGeluScale * (x + kGeluCube * x * x * x); }

    // body(row, first column, run) for each run of n columns.
    template <class Body>
    static void for_runs(const ConstView& x, int64_t n, const Body& body) {
        const int64_t runs = x.cols / n;
        for (int64_t i = 0; i < x.rows * runs; ++i) body(i / runs, i % runs * n, i);
    }

    static int64_t position_of(int64_t token, int64_t sequence, const int32_t* document_start) {
        return token % sequence - (document_start == nullptr ? 0 : document_start[token]);
    }

    static bool sees(const Attention& shape, int64_t head, int64_t token, int64_t key) {
        const int64_t first = token / shape.sequence * shape.sequence;  // its sequence's
        const int64_t at = token - first, of_key = key - first;
        if (of_key < shape.first_key(at) || of_key > at) return false;
        if (shape.documents && of_key < shape.document_start[token]) return false;
        const BlockLists* p = shape.pattern;
        return p == nullptr || p->sees(head % p->layouts, at / p->block, of_key / p->block);
    }

    // A key's row among its part's, and a query's scaled score with it.
    struct Score {
        int64_t key;
        double of;
    };
    // Of all keys of a part that the t-th query of a part sees.
    static std::vector<Score> scores(const Attention& shape, SequencePart queries,
                                     SequencePart keys, const ConstView& q, const ConstView& k,
                                     int64_t head, int64_t t) {
        const int64_t d = shape.head_dim, kv = head / (shape.heads / shape.kv_heads);
        std::vector<Score> found;
        for (int64_t s = 0; s < keys.count; ++s) {
            if (!sees(shape, head, queries.first + t, keys.first + s)) continue;
            double score = 0;
            for (int64_t c = 0; c < d; ++c)
                score += get(q, t, head * d + c) * get(k, s, kv * d + c);
            found.push_back({s, score * shape.scale});
        }
        return found;
    }

    // The tokens whose keys a token's query sees, and the probability of each.
    struct Row {
        std::vector<int64_t> keys{};
        std::vector<double> p{};
    };

    // Softmax of one row of scores into `row`; its log-sum-exp, -infinity where it sees no key.
    static double probabilities(const Attention& shape, const ConstView& q, const ConstView& k,
                                int64_t head, int64_t token, Row& row) {
        const int64_t d = shape.head_dim, kv = head / (shape.heads / shape.kv_heads);
        double top = -std::numeric_limits<double>::infinity(), sum = 0;
        row.keys.clear();
        row.p.clear();
        for (int64_t s = token / shape.sequence * shape.sequence; s <= token; ++s) {
            if (!sees(shape, head, token, s)) continue;
            double score = 0;
            for (int64_t c = 0; c < d; ++c)
                score += get(q, token, head * d + c) * get(k, s, kv * d + c);
            row.keys.push_back(s);
            row.p.push_back(score * shape.scale);
            top = std::max(top, row.p.back());
        }
        for (double& x : row.p) {
            x = std::exp(x - top);
            sum += x;
        }
        for (double& x : row.p) x /= sum;
        return top + std::log(sum);
    }

    static void put_all(const View& to, const std::vector<double>& sums) {
        for (int64_t r = 0; r < to.rows; ++r) {
            for (int64_t c = 0; c < to.cols; ++c)
                put(to, r, c, sums[static_cast<size_t>(r * to.cols + c)]);
        }
    }
};

}  // namespace

std::unique_ptr<Ops> make_reference_ops() { return std::make_unique<ReferenceOps>(); }

}  // namespace ferry::ops
