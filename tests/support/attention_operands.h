// One call of attention on matrices, forward and backward, as a block makes it.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "matrix.h"
#include "ops/ops.h"

namespace ferry::ops {

// Queries, keys and values side by side, and so are their gradients. `kGap`: elements between rows;
// `shift`: before the first.
template <int64_t kGap>
struct AttentionOperands {
    explicit AttentionOperands(const Attention& s, int64_t shift = 0)
        : shape(s),
          query(s.heads * s.head_dim),
          key(s.kv_heads * s.head_dim),
          qkv(s.type, s.sequences * s.sequence, query + 2 * key, kGap, shift),
          out(s.type, s.sequences * s.sequence, query, kGap, shift),
          dout(out),
          dqkv(qkv),
          lse(static_cast<size_t>(s.heads * s.sequences * s.sequence)) {
        qkv.random(1, 1.5F);
        dout.random(2);
    }
    // Of qkv or dqkv: queries (0), keys (1) or values (2).
    View part(Matrix& of, int i) const {
        const int64_t first = i == 0 ? 0 : query + (i - 1) * key;
        return of.view().col_range(first, i == 0 ? query : key);
    }
    void run(Ops& ops) {
        auto room = scratch_of(std::max(ops.attention_forward_scratch_bytes(shape),
                                        ops.attention_backward_scratch_bytes(shape)));
        ops.attention_forward(shape, part(qkv, 0), part(qkv, 1), part(qkv, 2), out.view(),
                              lse.data(), aligned(room));
        ops.attention_backward(shape, part(qkv, 0), part(qkv, 1), part(qkv, 2), out.view(),
                               dout.view(), lse.data(), part(dqkv, 0), part(dqkv, 1), part(dqkv, 2),
                               aligned(room));
    }

    const Attention shape;
    int64_t query, key;  // elements of a token
    Matrix qkv, out, dout, dqkv;
    std::vector<float> lse;
};

// How far all elements together are from those that are wanted, relative to these.
inline double distance(const Matrix& actual, const Matrix& wanted) {
    double apart = 0, all = 0;
    for (int64_t r = 0; r < actual.rows(); ++r) {
        for (int64_t c = 0; c < actual.cols(); ++c) {
            const double want = wanted.get(r, c), off = actual.get(r, c) - want;
            apart += off * off;
            all += want * want;
        }
    }
    return all == 0 ? std::sqrt(apart) : std::sqrt(apart / all);
}

}  // namespace ferry::ops
