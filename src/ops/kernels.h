// The kernels of the CPU's operations: work for one thread, compiled for every SIMD target and
// dispatched to the best one that this processor runs. `first`/`count` are rows.
#pragma once

#include <algorithm>

#include "blas.h"
#include "ferry/units.h"
#include "ops/part_attention.h"

namespace ferry::ops {

// A rectangle of c, at most kTileRows x kTileCols.
constexpr int64_t kTileRows = 512, kTileCols = 512;
struct Rectangle {
    int64_t row, rows, col, cols;
};
// A product's part, by a BLAS that is held to one thread.
void gemm_tile(const Gemm& gemm, const Rectangle& at, Sgemm sgemm);

// ---------------------------------------------------------------- rows

// Rows of a norm are the runs of its weight's length, those of a row of the matrix in order.
struct NormBackward {
    ConstView dy, x, weight;
    const float* mean;  // null: RMSNorm
    const float* rstd;
    ConstView addend;
    View dx;
    float* partial;  // [blocks of kNormRows, weight.cols]; null: the weight does not train
};
constexpr int64_t kNormRows = 64;
void norm_forward_rows(ConstView x, ConstView weight, double eps, View y, float* rstd,
                       int64_t first, int64_t count);
void layer_norm_forward_rows(ConstView x, ConstView weight, ConstView bias, double eps, View y,
                             float* stats, int64_t first, int64_t count);
// Rows of one block of kNormRows.
void norm_backward_block(const NormBackward& args, int64_t block);
void layer_norm_backward_block(const NormBackward& args, int64_t block);
// partial[block] = the sum of a block of kNormRows rows of x.
void sum_rows_block(ConstView x, float* partial, int64_t block);
// gradient[col..] takes in the blocks' partial sums, in order, in double.
void add_partial_cols(const float* partial, int64_t blocks, int64_t cols, int64_t col,
                      int64_t count, Accumulator gradient);
// Rows first, first + step, ..., which have one position; cosine and sine: [head_dim / 2].
void rotate_rows(View x, const Rope& rope, int64_t first, int64_t step, const float* cosine,
                 const float* sine);
void swiglu_forward_rows(ConstView gate_up, View y, int64_t first, int64_t count);
void swiglu_backward_rows(View dy, View gate_up, int64_t first, int64_t count);
void gelu_forward_rows(ConstView x, View y, int64_t first, int64_t count);
void gelu_backward_rows(View dy, View x, int64_t first, int64_t count);
// losses: one double a row.
void loss_parts_rows(ConstView logits, const int32_t* own_targets, double* parts, int64_t first,
                     int64_t count);
void cross_entropy_of_parts_rows(ConstView logits, const Ops::LossTargets& targets,
                                 const double* parts, int ranks, float scale, View dlogits,
                                 double* losses, int64_t first, int64_t count);
void cross_entropy_rows(ConstView logits, const int32_t* targets, float scale, View dlogits,
                        double* losses, int64_t first, int64_t count);
void copy_row(const void* from, DType from_type, int64_t count, void* to, DType to_type);
void add_row(float* a, const void* b, DType b_type, int64_t count);
// to = a + b.
void sum_row(const void* a, DType a_type, const void* b, DType b_type, int64_t count, void* to,
             DType to_type);
void round_leaf(const float* accumulator, int64_t count, DType wire_type, void* wire, float* leaf);
bool row_is_finite(const void* x, DType type, int64_t count);

// ---------------------------------------------------------------- attention

// Query and key tiles are kAttentionTile tokens; a head's columns are padded to a multiple of
// kHeadUnit. Padding holds zeros.
constexpr int64_t kAttentionTile = 64, kHeadUnit = 32, kMaxHeadDim = 512;
struct AttentionCall {
    Attention shape{};
    ConstView q{}, k{}, v{}, out{}, dout{};
    const float* lse = nullptr;
    View dq{}, dk{}, dv{};
    // Which of a sequence's tokens the rows of q, and those of k and v, are. Tiles are cut from the
    // sequence's first token on, so that a tile lies in one block of a pattern.
    SequencePart queries{0, shape.sequence}, keys{0, shape.sequence};
    // Scratch. S: the tiles of the part's tokens, D: head_dim rounded up to kHeadUnit.
    float* k_transposed = nullptr;  // [sequences, kv_heads, S / tile, D, tile]
    float* v_transposed = nullptr;  // the same; backward only
    float* k_rows = nullptr;        // [sequences, kv_heads, S, D]; backward only
    float* v_rows = nullptr;        // the same; forward only
    float* dq_sum = nullptr;        // [sequences, heads, S, D]; backward only
    int64_t padded_head() const { return round_up(shape.head_dim, kHeadUnit); }
    static int64_t first_tile(const SequencePart& part) { return part.first / kAttentionTile; }
    static int64_t end_tile(const SequencePart& part) {
        return part.count == 0 ? first_tile(part) : ceil_div(part.end(), kAttentionTile);
    }
    static int64_t tiles(const SequencePart& part) { return end_tile(part) - first_tile(part); }
    // Where the log-sum-exp of a row of q stands.
    int64_t lse_index(int64_t row, int64_t head) const {
        return (row / queries.count * shape.heads + head) * queries.count + row % queries.count;
    }
    // The first of the keys, within the sequence, that the query at `position` sees.
    int64_t first_key(int64_t sequence, int64_t position) const {
        const int64_t first = std::max(shape.first_key(position), keys.first);
        if (!shape.documents) return first;
        return std::max<int64_t>(first, shape.document_start[sequence * shape.sequence + position]);
    }
    // One more than the last query that sees the key at `position`.
    int64_t end_query(int64_t sequence, int64_t position) const {
        const int64_t end = shape.end_query(position);
        if (!shape.documents) return end;
        return std::min<int64_t>(end, shape.document_end[sequence * shape.sequence + position]);
    }
};
// Keys and values of one sequence and key/value head into scratch.
void pack_keys(const AttentionCall& call, int64_t sequence, int64_t kv_head, bool backward);
void attend_tile(const AttentionCall& call, View out, float* lse, int64_t sequence, int64_t head,
                 int64_t tile);
// All heads of one sequence that read one key/value head.
void attend_backward(const AttentionCall& call, int64_t sequence, int64_t kv_head);

}  // namespace ferry::ops
