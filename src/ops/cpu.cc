// The fast CPU implementation: cuts every operation into parts that depend on shapes only and lets
// the team run them. Parts write disjoint memory; sums across parts are added in a fixed order.
#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "base/process_limits.h"
#include "blas.h"
#include "blas_buffers.h"
#include "kernels.h"
#include "ops/ops.h"

namespace ferry::ops {
namespace {

// Elements that are worth a task.
constexpr int64_t kGrain = 32 * kKiB;

int64_t rows_per_task(int64_t cols) {
    return std::max<int64_t>(1, kGrain / std::max<int64_t>(cols, 1));
}

const void* row_of(const ConstView& v, int64_t row) { return v.row_range(row, 1).data; }
void* row_of(const View& v, int64_t row) { return v.row_range(row, 1).data; }

// Sides of a tile of c: as large as they may be, unless that leaves too few to share out. BLAS
// packs its operands anew for every tile.
std::pair<int64_t, int64_t> tile_sides(int64_t m, int64_t n) {
    constexpr int64_t kEnough = 16, kLeast = 128;
    int64_t rows = kTileRows, cols = kTileCols;
    while (ceil_div(m, rows) * ceil_div(n, cols) < kEnough && std::max(rows, cols) > kLeast) {
        (rows >= cols ? rows : cols) /= 2;
    }
    const auto even = [](int64_t size, int64_t side, int64_t unit) {
        return std::max(unit,
                        round_up(ceil_div(size, std::max<int64_t>(1, ceil_div(size, side))), unit));
    };
    return {even(m, rows, 8), even(n, cols, 32)};
}

class CpuOps final : public Ops, public PartAttention {
public:
    explicit CpuOps(Team& team) : team_(team) {
        require_stack();
        reserve_blas_buffers(team.threads());
    }

    int64_t gemm_scratch_bytes(const Gemm&) const override { return 0; }

    void gemm(const Gemm& g, std::byte*) override {
        const auto [rows, cols] = tile_sides(g.c.rows, g.c.cols);
        const int64_t down = ceil_div(g.c.rows, rows), across = ceil_div(g.c.cols, cols);
        FERRY_CHECK(g.a.type == g.b.type && (!g.accumulate || g.c.type == DType::f32));
        constexpr int64_t kMost = std::numeric_limits<int>::max();  // BLAS's integers
        FERRY_CHECK(std::max({g.a.rows, g.a.ld, g.b.rows, g.b.ld, g.c.ld}) <= kMost);
        team_.parallel(down * across, [&, rows = rows, cols = cols](int64_t i) {
            const int64_t row = i / across * rows, col = i % across * cols;
            gemm_tile(g,
                      {.row = row,
                       .rows = std::min(rows, g.c.rows - row),
                       .col = col,
                       .cols = std::min(cols, g.c.cols - col)},
                      use_.sgemm());
        });
    }

    void norm_forward(ConstView x, ConstView weight, double eps, View y, float* rstd) override {
        for_rows(x.rows * (x.cols / weight.cols), weight.cols, [&](int64_t first, int64_t count) {
            norm_forward_rows(x, weight, eps, y, rstd, first, count);
        });
    }

    int64_t norm_backward_scratch_bytes(int64_t rows, int64_t n) const override {
        return ceil_div(rows, kNormRows) * n * 4;
    }

    void norm_backward(ConstView dy, ConstView x, ConstView weight, const float* rstd,
                       ConstView addend, View dx, Accumulator weight_gradient,
                       std::byte* scratch) override {
        const int64_t blocks = ceil_div(x.rows * (x.cols / weight.cols), kNormRows);
        auto* partial = weight_gradient.asked() ? reinterpret_cast<float*>(scratch) : nullptr;
        const NormBackward args{dy, x, weight, nullptr, rstd, addend, dx, partial};
        team_.parallel(blocks, [&](int64_t block) { norm_backward_block(args, block); });
        add_partial(partial, blocks, weight.cols, weight_gradient);
    }

    void layer_norm_forward(ConstView x, ConstView weight, ConstView bias, double eps, View y,
                            float* stats) override {
        for_rows(x.rows, x.cols, [&](int64_t first, int64_t count) {
            layer_norm_forward_rows(x, weight, bias, eps, y, stats, first, count);
        });
    }

    int64_t layer_norm_backward_scratch_bytes(int64_t rows, int64_t n) const override {
        return norm_backward_scratch_bytes(rows, n);
    }
    void layer_norm_backward(ConstView dy, ConstView x, ConstView weight, const float* stats,
                             ConstView addend, View dx, Accumulator weight_gradient,
                             Accumulator bias_gradient, std::byte* scratch) override {
        if (bias_gradient.asked()) sum_rows(dy, bias_gradient, scratch);
        const int64_t blocks = ceil_div(x.rows, kNormRows);
        auto* partial = weight_gradient.asked() ? reinterpret_cast<float*>(scratch) : nullptr;
        const NormBackward args{dy, x, weight, stats, stats + x.rows, addend, dx, partial};
        team_.parallel(blocks, [&](int64_t block) { layer_norm_backward_block(args, block); });
        add_partial(partial, blocks, x.cols, weight_gradient);
    }

    void sum_rows(ConstView x, Accumulator sums, std::byte* scratch) override {
        const int64_t blocks = ceil_div(x.rows, kNormRows);
        auto* partial = reinterpret_cast<float*>(scratch);
        team_.parallel(blocks, [&](int64_t block) { sum_rows_block(x, partial, block); });
        add_partial(partial, blocks, x.cols, sums);
    }

    void rope(View x, const Rope& rope) override {
        const int64_t half = rope.head_dim / 2;
        FERRY_CHECK(half <= kMaxHeadDim / 2 && rope.head_dim % 2 == 0);
        const double amplitude = rope.amplitude, turn = rope.inverse ? -amplitude : amplitude;
        const auto turn_rows = [&](int64_t position, int64_t first, int64_t step) {
            float cosine[kMaxHeadDim / 2], sine[kMaxHeadDim / 2];
            for (int64_t i = 0; i < half; ++i) {
                const double angle = static_cast<double>(position) * rope.frequencies[i];
                cosine[i] = static_cast<float>(amplitude * std::cos(angle));
                sine[i] = static_cast<float>(turn * std::sin(angle));
            }
            rotate_rows(x, rope, first, step, cosine, sine);
        };
        const bool documents = rope.document_start != nullptr;
        constexpr int64_t kPositions = 16;
        // A position of all sequences together, unless documents begin where they like.
        const int64_t count = documents ? x.rows : std::min(rope.sequence, x.rows);
        team_.parallel(ceil_div(count, kPositions), [&](int64_t part) {
            const int64_t last = std::min((part + 1) * kPositions, count);
            for (int64_t i = part * kPositions; i < last; ++i) {
                if (documents)
                    turn_rows(i % rope.sequence - rope.document_start[i], i, x.rows);
                else
                    turn_rows(i, i, rope.sequence);
            }
        });
    }

    int64_t attention_forward_scratch_bytes(const Attention& shape) const override {
        return 2 * keys_size(shape) * 4;
    }

    void attention_forward(const Attention& shape, ConstView q, ConstView k, ConstView v, View out,
                           float* lse, std::byte* scratch) override {
        forward({.shape = shape, .q = q, .k = k, .v = v}, out, lse, scratch);
    }

    int64_t attention_backward_scratch_bytes(const Attention& shape) const override {
        return (3 * keys_size(shape) + keys_size(shape) / shape.kv_heads * shape.heads) * 4;
    }

    void attention_backward(const Attention& shape, ConstView q, ConstView k, ConstView v,
                            ConstView out, ConstView dout, const float* lse, View dq, View dk,
                            View dv, std::byte* scratch) override {
        AttentionCall call{.shape = shape, .q = q, .k = k, .v = v, .out = out, .dout = dout};
        call.lse = lse;
        call.dq = dq;
        call.dk = dk;
        call.dv = dv;
        backward(call, scratch);
    }

    // A part may begin and end within tiles.
    int64_t part_scratch_bytes(const Attention& shape, int64_t queries,
                               int64_t keys) const override {
        const auto size = [&](int64_t tokens, int64_t heads) {
            return shape.sequences * heads * (tokens / kAttentionTile + 2) * kAttentionTile *
                   round_up(shape.head_dim, kHeadUnit);
        };
        return (3 * size(keys, shape.kv_heads) + size(queries, shape.heads)) * 4;
    }

    void part_forward(const Attention& shape, SequencePart queries, SequencePart keys, ConstView q,
                      ConstView k, ConstView v, View out, float* lse, std::byte* scratch) override {
        FERRY_CHECK(shape.sequences == 1);
        AttentionCall call{.shape = shape, .q = q, .k = k, .v = v};
        call.queries = queries;
        call.keys = keys;
        forward(call, out, lse, scratch);
    }

    void part_backward(const Attention& shape, SequencePart queries, SequencePart keys, ConstView q,
                       ConstView k, ConstView v, ConstView out, ConstView dout, const float* lse,
                       View dq, View dk, View dv, std::byte* scratch) override {
        FERRY_CHECK(shape.sequences == 1);
        AttentionCall call{.shape = shape, .q = q, .k = k, .v = v, .out = out, .dout = dout};
        call.lse = lse;
        call.dq = dq;
        call.dk = dk;
        call.dv = dv;
        call.queries = queries;
        call.keys = keys;
        backward(call, scratch);
    }

    void merge_parts(int64_t heads, ConstView part, const float* part_lse, View sum,
                     float* sum_lse) override {
        team_.parallel(heads, [&](int64_t head) {
            merge_head(part, part_lse + head * sum.rows, sum, sum_lse + head * sum.rows,
                       head * (sum.cols / heads), sum.cols / heads);
        });
    }

    void swiglu_forward(ConstView gate_up, View y) override {
        for_rows(y.rows, y.cols, [&](int64_t first, int64_t count) {
            swiglu_forward_rows(gate_up, y, first, count);
        });
    }

    void swiglu_backward(View dy, View gate_up) override {
        for_rows(dy.rows, dy.cols, [&](int64_t first, int64_t count) {
            swiglu_backward_rows(dy, gate_up, first, count);
        });
    }

    void gelu_forward(ConstView x, View y) override {
        for_rows(y.rows, y.cols,
                 [&](int64_t first, int64_t count) { gelu_forward_rows(x, y, first, count); });
    }

    void gelu_backward(View dy, View x) override {
        for_rows(dy.rows, dy.cols,
                 [&](int64_t first, int64_t count) { gelu_backward_rows(dy, x, first, count); });
    }

    void own_rows(const int32_t* tokens, int64_t count, int64_t first, int64_t rows,
                  int32_t* own) override {
        for (int64_t t = 0; t < count; ++t) {
            const bool here = tokens[t] >= first && tokens[t] < first + rows;
            own[t] = here ? static_cast<int32_t>(tokens[t] - first) : -1;
        }
    }

    void embed(const int32_t* tokens, ConstView table, ConstView positions,
               const int32_t* document_start, View x) override {
        for_rows(x.rows, x.cols, [&](int64_t first, int64_t count) {
            for (int64_t t = first; t < first + count; ++t) {
                if (tokens[t] < 0) {
                    std::memset(row_of(x, t), 0, static_cast<size_t>(x.cols * size_of(x.type)));
                    continue;
                }
                const void* token = row_of(table, tokens[t]);
                if (positions.data == nullptr) {
                    copy_row(token, table.type, x.cols, row_of(x, t), x.type);
                } else {
                    const int64_t before = document_start == nullptr ? 0 : document_start[t];
                    sum_row(token, table.type, row_of(positions, t % positions.rows - before),
                            positions.type, x.cols, row_of(x, t), x.type);
                }
            }
        });
    }

    int64_t embed_backward_scratch_bytes(int64_t) const override { return 0; }
    void embed_backward(const int32_t* tokens, ConstView dx, float* gradient, std::byte*) override {
        for_columns(dx, [&](int64_t t, int64_t col, int64_t count) {
            if (tokens[t] < 0) return;
            add_row(gradient + tokens[t] * dx.cols + col, dx.block(t, 1, col, count).data, dx.type,
                    count);
        });
    }

    void positions_backward(ConstView dx, int64_t sequence, const int32_t* document_start,
                            float* gradient, std::byte*) override {
        if (document_start != nullptr) {
            return for_columns(dx, [&](int64_t t, int64_t col, int64_t count) {
                const int64_t position = t % sequence - document_start[t];
                add_row(gradient + position * dx.cols + col, dx.block(t, 1, col, count).data,
                        dx.type, count);
            });
        }
        for_rows(std::min(sequence, dx.rows), dx.cols, [&](int64_t first, int64_t count) {
            for (int64_t position = first; position < first + count; ++position) {
                for (int64_t t = position; t < dx.rows; t += sequence)
                    add_row(gradient + position * dx.cols, row_of(dx, t), dx.type, dx.cols);
            }
        });
    }

    int64_t cross_entropy_scratch_bytes(int64_t tokens) const override { return tokens * 8; }

    void cross_entropy(ConstView logits, const int32_t* targets, float scale, View dlogits,
                       double* loss_sum, std::byte* scratch) override {
        FERRY_CHECK(logits.type == DType::f32 && logits.cols > 0);
        auto* losses = reinterpret_cast<double*>(scratch);
        for_rows(logits.rows, logits.cols, [&](int64_t first, int64_t count) {
            cross_entropy_rows(logits, targets, scale, dlogits, losses, first, count);
        });
        for (int64_t t = 0; t < logits.rows; ++t) *loss_sum += losses[t];
    }

    void loss_parts(ConstView logits, const int32_t* own_targets, double* parts) override {
        FERRY_CHECK(logits.type == DType::f32 && logits.cols > 0);
        for_rows(logits.rows, logits.cols, [&](int64_t first, int64_t count) {
            loss_parts_rows(logits, own_targets, parts, first, count);
        });
    }

    void cross_entropy_of_parts(ConstView logits, const LossTargets& targets, const double* parts,
                                int ranks, float scale, View dlogits, double* loss_sum,
                                std::byte* scratch) override {
        auto* losses = reinterpret_cast<double*>(scratch);
        for_rows(logits.rows, logits.cols, [&](int64_t first, int64_t count) {
            cross_entropy_of_parts_rows(logits, targets, parts, ranks, scale, dlogits, losses,
                                        first, count);
        });
        for (int64_t t = 0; t < logits.rows; ++t) *loss_sum += losses[t];
    }

    void round_gradient(const float* accumulator, int64_t count, DType wire_type, void* wire,
                        float* leaves) override {
        for_leaves(count, [&](int64_t at, int64_t here) {
            round_leaf(accumulator + at, here, wire_type,
                       static_cast<std::byte*>(wire) + at * size_of(wire_type),
                       leaves + at / kLeaf);
        });
    }

    void sum_gradient(ConstView parts, void* wire, float* leaves) override {
        for_leaves(parts.cols, [&](int64_t at, int64_t here) {
            std::array<float, kLeaf> sum;
            const auto part = [&](int64_t rank) { return parts.block(rank, 1, at, here).data; };
            copy_row(part(0), parts.type, here, sum.data(), DType::f32);
            for (int64_t rank = 1; rank < parts.rows; ++rank)
                add_row(sum.data(), part(rank), parts.type, here);
            round_leaf(sum.data(), here, parts.type,
                       static_cast<std::byte*>(wire) + at * size_of(parts.type),
                       leaves + at / kLeaf);
        });
    }

    void add(float* a, const float* b, int64_t count) override {
        for_rows(ceil_div(count, kGrain), kGrain, [&](int64_t part, int64_t) {
            const int64_t at = part * kGrain;
            add_row(a + at, b + at, DType::f32, std::min(kGrain, count - at));
        });
    }

    void fill_zero(void* data, int64_t bytes) override {
        constexpr int64_t kBytes = 1 << 20;
        team_.parallel(ceil_div(bytes, kBytes), [&](int64_t i) {
            std::memset(static_cast<std::byte*>(data) + i * kBytes, 0,
                        static_cast<size_t>(std::min(kBytes, bytes - i * kBytes)));
        });
    }

    void cast(ConstView from, View to) override {
        for_rows(to.rows, to.cols, [&](int64_t first, int64_t count) {
            for (int64_t r = first; r < first + count; ++r) {
                copy_row(row_of(from, r), from.type, to.cols, row_of(to, r), to.type);
            }
        });
    }

    void copy_out(ConstView from, View to) override { cast(from, to); }

    void check_finite(ConstView x, uint32_t* nonfinite) override {
        std::atomic<uint32_t> found{0};
        for_rows(x.rows, x.cols, [&](int64_t first, int64_t count) {
            for (int64_t r = first; r < first + count; ++r) {
                if (!row_is_finite(row_of(x, r), x.type, x.cols))
                    found.store(1, std::memory_order_relaxed);
            }
        });
        *nonfinite |= found.load();
    }

private:
    static constexpr int64_t kLeaf = 4096;  // elements of a norm leaf

    // body(first element, elements) for each leaf.
    template <class Body>
    void for_leaves(int64_t count, const Body& body) {
        constexpr int64_t kPart = 16 * kLeaf;
        team_.parallel(ceil_div(count, kPart), [&](int64_t part) {
            const int64_t last = std::min(count, (part + 1) * kPart);
            for (int64_t at = part * kPart; at < last; at += kLeaf)
                body(at, std::min(kLeaf, last - at));
        });
    }

    // body(token, first column, columns): a part of the columns sees all tokens in order.
    template <class Body>
    void for_columns(const ConstView& x, const Body& body) {
        constexpr int64_t kCols = 128;
        team_.parallel(ceil_div(x.cols, kCols), [&](int64_t i) {
            const int64_t col = i * kCols, count = std::min(kCols, x.cols - col);
            for (int64_t t = 0; t < x.rows; ++t) body(t, col, count);
        });
    }

    // body(first row, rows) over parts of about kGrain elements.
    template <class Body>
    void for_rows(int64_t rows, int64_t cols, const Body& body) {
        const int64_t step = rows_per_task(cols);
        team_.parallel(ceil_div(rows, step),
                       [&](int64_t i) { body(i * step, std::min(step, rows - i * step)); });
    }

    // sums += the blocks' partial sums, where they are asked for.
    void add_partial(const float* partial, int64_t blocks, int64_t cols, Accumulator sums) {
        if (!sums.asked()) return;
        constexpr int64_t kCols = 1024;
        team_.parallel(ceil_div(cols, kCols), [&](int64_t i) {
            add_partial_cols(partial, blocks, cols, i * kCols, std::min(kCols, cols - i * kCols),
                             sums);
        });
    }

    void forward(AttentionCall call, View out, float* lse, std::byte* scratch) {
        const Attention& shape = call.shape;
        FERRY_CHECK(shape.head_dim <= kMaxHeadDim);
        call.k_transposed = reinterpret_cast<float*>(scratch);
        call.v_rows = call.k_transposed + keys_size(call);
        pack(call, false);
        const int64_t end = AttentionCall::end_tile(call.queries);
        team_.parallel(
            shape.sequences * shape.heads * AttentionCall::tiles(call.queries), [&](int64_t i) {
                // The longest rows first.
                const int64_t tile = end - 1 - i / (shape.sequences * shape.heads);
                const int64_t head = i % shape.heads, sequence = i / shape.heads % shape.sequences;
                attend_tile(call, out, lse, sequence, head, tile);
            });
    }

    void backward(AttentionCall call, std::byte* scratch) {
        const Attention& shape = call.shape;
        FERRY_CHECK(shape.head_dim <= kMaxHeadDim);
        const int64_t keys = keys_size(call);
        call.k_transposed = reinterpret_cast<float*>(scratch);
        call.v_transposed = call.k_transposed + keys;
        call.k_rows = call.v_transposed + keys;
        call.dq_sum = call.k_rows + keys;
        pack(call, true);
        team_.parallel(shape.sequences * shape.kv_heads, [&](int64_t i) {
            attend_backward(call, i / shape.kv_heads, i % shape.kv_heads);
        });
    }

    // Columns [first, first + count) of all rows.
    static void merge_head(ConstView part, const float* part_lse, View sum, float* sum_lse,
                           int64_t first, int64_t count) {
        constexpr float kNone = -std::numeric_limits<float>::infinity();
        for (int64_t row = 0; row < sum.rows; ++row) {
            const float a = sum_lse[row], b = part_lse[row];
            if (b == kNone) continue;
            const float top = std::max(a, b);
            const float of_a = std::exp(a - top), of_b = std::exp(b - top);
            const float share = of_b / (of_a + of_b);
            auto* to = static_cast<float*>(sum.data) + row * sum.ld + first;
            const auto* from = static_cast<const float*>(part.data) + row * part.ld + first;
            for (int64_t i = 0; i < count; ++i) to[i] += share * (from[i] - to[i]);
            sum_lse[row] = top + std::log(of_a + of_b);
        }
    }

    static int64_t keys_size(const AttentionCall& call) {
        return call.shape.sequences * call.shape.kv_heads * AttentionCall::tiles(call.keys) *
               kAttentionTile * call.padded_head();
    }

    static int64_t keys_size(const Attention& shape) {
        return shape.sequences * shape.kv_heads * round_up(shape.sequence, kAttentionTile) *
               round_up(shape.head_dim, kHeadUnit);
    }

    void pack(const AttentionCall& call, bool backward) {
        team_.parallel(call.shape.sequences * call.shape.kv_heads, [&](int64_t i) {
            pack_keys(call, i / call.shape.kv_heads, i % call.shape.kv_heads, backward);
        });
    }

    Team& team_;
    const BlasUse use_{};
};

}  // namespace

std::unique_ptr<Ops> make_cpu_ops(Team& team) { return std::make_unique<CpuOps>(team); }

}  // namespace ferry::ops
