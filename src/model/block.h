// One decoder block over one micro-batch:
//   n1 = norm(x_in); q, k, v = n1 W [+ b]; [q, k = norm of each head]; [rope(q, k)]
//   x_mid = x_in + attention(q, k, v) Wo [+ b]
//   n2 = norm(x_mid); gate, up = n2 W [+ b]; x_out = x_mid + (silu(gate) * up) Wd [+ b]
//   or, without a gate, gelu(up) Wd
// The shape decides on the parts in brackets. T tokens, H hidden, Q = heads * head_dim,
// K = kv_heads * head_dim, I intermediate, M tokens of a tile: of the MLP, and of the norms
// before it and before attention.
//
// Ranks that share the tensors have some of the heads each, and a part of I; Q, K and I are a
// rank's own. Of x_in, x_mid and x_out each has R of the T rows, and of their gradients. x_mid and
// x_out, and in backward the gradients of n1 and n2, are sums over the ranks (add_up): each adds up
// its own rows, in rank order. Products take all T rows: n1 and n2, and in backward the gradients
// of x_out and x_mid, are gathered in the compute type. W is then T with the ranks' padding.
// Gradients of norms are sums of the ranks' rows.
//
// Ranks that share the sequences have T tokens each of W = T * ranks. Attention, with the norms and
// rotation of heads, is of W tokens and the rank's own heads; all else is of its T tokens and all
// heads. Exchanges lie between (share_heads, share_tokens). In ring order attention is of T tokens
// and all heads as well, and keys and queries of other parts come and go within it.
//
// Backward may leave the gradients of matrices and biases to a pass of their own, which multiplies
// what the first one has kept.
#pragma once

#include <optional>

#include "carver.h"
#include "model/gradients.h"
#include "model/model.h"
#include "ring_attention.h"
#include "slice_sum.h"
#include "tensors.h"

namespace ferry::model {

class Block {
public:
    Block(const Shape& shape, const Numerics& numerics, const RopeTable& rope, ops::Ops& ops,
          const LayerMemory& memory, const Mask& mask, std::byte* scratch);

    void forward(ops::ConstView x_in, ops::View x_out);
    void backward(ops::ConstView x_in, ops::View dx, bool needs_dx);
    // Behind save(): backward keeps in `memory` what it would multiply for the gradients of
    // matrices and biases, or it lies there for add_weight_gradients(). Gradients of norms backward
    // then adds to `norms`, where they stand one after the other (kNormRoles).
    void defer(std::byte* memory);
    void add_norms_to(float* norms);
    // What such a backward left undone; and adds `norms`, unless null, to the layer's gradient.
    void add_weight_gradients(bool needs_dx, const float* norms);
    // The part of forward that backward leaves out where its result was saved, alone.
    void compute(Saved what);
    static int64_t scratch_bytes(const Shape& shape, const Numerics& numerics,
                                 const RopeTable& rope, ops::Ops& ops, const Layer& layer);

    // Results go there instead of to scratch; backward, if they are `known`, finds them there.
    static int64_t saved_bytes(const Shape& shape, const Numerics& numerics, const RopeTable& rope,
                               ops::Ops& ops, const Layer& layer, Saved what);
    void save(Saved what, std::byte* memory, bool known);
    // Of what backward keeps where it defers, and saves nothing.
    static int64_t deferred_bytes(const Shape& shape, const Numerics& numerics,
                                  const RopeTable& rope, ops::Ops& ops, const Layer& layer);
    // With the ranks that share tensors, of a block that trains.
    static BlockExchanges::Group exchanges_of_slices(const Shape& shape, const Numerics& numerics,
                                                     const RopeTable& rope, ops::Ops& ops,
                                                     const Layer& layer);

private:
    // Buffers of a pass; the two groups below share memory, for they are never alive together. So
    // do n1 and dn1, n2 and dn2, x_mid and dattended.
    struct Buffers {
        // [M, H], [T, Q + 2 K], [T, Q], [T, H]. Of ranks that share tensors n1 is [W, H], and so
        // are n2 and the gradients of both; x_mid is [R, H].
        ops::View n1{}, qkv{}, attended{}, x_mid{};
        // Of ranks that share sequences, which have the two before of their own heads and W tokens:
        // the same of all heads.
        ops::View all_heads{}, all_attended{};
        // Of ranks that share tensors: their sums', a rank's part of what attention or the MLP
        // gives, or the gradient of it, [W, H]; and what they give each other of keys and values,
        // and of the gradients of norms.
        SliceSum::Room sums{};
        std::byte* part = nullptr;
        ops::View own_keys{};
        std::byte* all_keys = nullptr;
        float *norm_gradient = nullptr, *all_norm_gradients = nullptr;
        ops::View normed{};                       // [T, Q + K], where heads have norms
        ops::View dy{}, dn1{};                    // [T, H], [M, H], in the compute type
        float *stats1 = nullptr, *lse = nullptr;  // norm1's of a tile; log-sum-exp, [heads * T]
        float *query_rstd = nullptr, *key_rstd = nullptr;  // [T, heads], [T, kv_heads]
        float* angles = nullptr;                           // of norm_rope, likewise
        // The MLP's: [M, H], [M, 2 I] or [M, I], of all T tokens where it is saved, [M, I], of
        // norm2.
        ops::View n2{}, dn2{}, inner{}, active{};
        float* stats2 = nullptr;
        // The attention's backward pass: [T, Q + 2 K]; before the groups, [T, Q].
        ops::View dqkv{}, dattended{};
        // Where backward defers: of x_mid and of x_out, in the compute type.
        ops::View dmid{}, dout{};
        // What ranks of a sequence send and receive, around the attention of both passes.
        std::byte *sent = nullptr, *received = nullptr;
        RingAttention::Room ring{};
        std::byte* ops = nullptr;
    };

    Block(const Shape& shape, const Numerics& numerics, const RopeTable& rope, ops::Ops& ops,
          const LayerMemory& memory, const Mask& mask, bool input_major);
    // `op_scratch_bytes` comes last: only who measures needs it.
    Buffers cut(Carver& carver, int64_t op_scratch_bytes);
    void cut_attention(Carver& carver, Buffers& b) const;
    void cut_saved(Saved what, Carver& carver, Buffers& b) const;
    void cut_deferred(Carver& carver, Buffers& b) const;
    // The rows of a tile that begins at this token: of what is kept, or the only ones that are.
    ops::View tile_of(const ops::View& all, int64_t first, int64_t tokens) const {
        return all.row_range(deferring_ ? first : 0, tokens);
    }
    // Likewise of a norm's output, or of its gradient, which ranks that share tensors have
    // gathered.
    ops::View normed(const ops::View& all, int64_t first, int64_t tokens) const {
        return all.row_range(deferring_ || slices() ? first : 0, tokens);
    }
    ops::View slope_of_normed(const ops::View& all, int64_t first, int64_t tokens) const {
        return all.row_range(slices() ? first : 0, tokens);
    }
    // Rows of n1 and n2; of them those that this rank makes at once.
    int64_t normed_rows() const { return slices() ? sums_.rows.padded : tile(); }
    int64_t norm_rows() const { return slices() ? sums_.rows.each : tile(); }
    ops::ConstView slope(ops::ConstView dx, const ops::View& kept, int64_t first);
    template <class Each>
    void for_norms(const Each& each);
    template <class Each>
    void for_trained_norms(const Each& each);
    int64_t op_scratch_bytes() const;
    int64_t tile() const;
    // body(first, tokens) for each tile of so many.
    template <class Body>
    void for_tiles(int64_t tokens, const Body& body) const {
        for (int64_t first = 0; first < tokens; first += tile())
            body(first, std::min(tile(), tokens - first));
    }
    // Of this rank's heads.
    ops::View queries(const ops::View& of) const { return of.col_range(0, own_.query); }
    ops::View keys(const ops::View& of) const { return of.col_range(own_.query, own_.key); }
    ops::View values(const ops::View& of) const {
        return of.col_range(own_.query + own_.key, own_.key);
    }
    // Queries and keys, side by side, as attention sees them.
    ops::View seen() const {
        return shape_.head_norms ? b_.normed : b_.qkv.col_range(0, own_.query + own_.key);
    }

    // Heads, and the columns of their queries and of their keys.
    struct Heads {
        int64_t queries = 0, keys = 0, query = 0, key = 0;
        int64_t seen() const { return query + key; }
        int64_t all() const { return query + 2 * key; }
    };
    Heads heads(int64_t of_keys) const;
    bool shares() const { return numerics_.parts > 1 && !numerics_.ring; }
    Heads heads_of(HeadShare share) const {
        return heads(numerics_.ring ? shape_.kv_heads : share.count);
    }
    // Rows of heads, with room for as many as any rank has: a plan is every rank's.
    ops::View of_heads(Carver& carver, int64_t columns, int64_t most) const;
    enum class Columns : uint8_t { queries_keys_values, queries };
    template <class Each>
    void for_heads(int part, Columns columns, const Each& each) const;
    int64_t message_bytes(Columns columns) const;
    bool slices() const { return numerics_.slices > 1; }
    bool exchanges() const { return numerics_.parts > 1 || slices(); }
    void cut_slices(Carver& carver, Buffers& b);
    ops::View part(DType type) const {
        return ops::View::of(b_.part, type, sums_.rows.padded, shape_.hidden);
    }
    void add_up(ops::View all, ops::ConstView addend, ops::View sum) {
        sums_.add_up(all, addend, sum, b_.sums);
    }
    // The norm of this rank's rows, and of all of them.
    void share_normed(const Norm& norm, ops::ConstView x, ops::View n, float* stats);
    // dx of all rows, in the compute type.
    ops::ConstView share_slope(ops::ConstView dx, ops::View room);
    // A norm's backward pass, of this rank's rows; dn holds its part of what they are sums of.
    void norm_backward(const Norm& norm, ops::View dn, ops::ConstView x, const float* stats,
                       ops::ConstView addend, ops::View dx);
    // Where this rank's part of a norm's gradient goes.
    ops::Accumulator part_of(const Parameter& of_norm);
    int64_t norm_floats();
    // The gradients of keys and values, from the queries of all ranks that have these heads.
    void add_up_keys();
    void add_up_norms();
    void drop_keys(ops::View dqkv);
    // [T, all heads] to [W, own heads], and back.
    void share_heads(ops::ConstView from, ops::View to, Columns columns);
    void share_tokens(ops::ConstView from, ops::View to, Columns columns);
    ops::View qkv_of_tokens() const { return shares() ? b_.all_heads : b_.qkv; }
    ops::View dqkv_of_tokens() const { return shares() ? b_.all_heads : b_.dqkv; }
    ops::View attended_of_tokens() const { return shares() ? b_.all_attended : b_.attended; }

    void attend(ops::ConstView x_in, ops::View x_mid);
    void attention_forward();
    void compute_projections();
    // The output of the MLP's first matrices for the tile that begins at this token.
    ops::View inner_of(int64_t first, int64_t tokens) const;
    void mlp(int64_t first, int64_t tokens);
    void activate(ops::ConstView inner, ops::View active);
    void activate_backward(ops::View active, ops::View inner);
    void mlp_backward(ops::View dx, const InputGradients& asked);
    void mlp_products_backward(ops::ConstView dy, int64_t first, const InputGradients& asked);
    void add_mlp_gradients(ops::ConstView dy, int64_t first, const InputGradients& asked);
    bool writes(Role role) const;
    void attention_backward(ops::ConstView x_in, ops::View dx, bool needs_dx,
                            const InputGradients& asked);
    void projections_backward(ops::ConstView x_in, ops::View dqkv, ops::View dx, bool needs_dx,
                              const InputGradients& asked);
    ops::Rope rope(int64_t heads, bool inverse) const;
    void turn_heads();
    void turn_heads_back();
    ops::ConstView in_compute_type(ops::ConstView x, ops::View room);
    ops::Attention attention(const Heads& heads) const;

    const Shape& shape_;
    const Numerics& numerics_;
    const RopeTable& rope_;
    ops::Ops& ops_;
    const Mask mask_;
    OfSaved<bool> saved_{}, known_{};
    bool deferring_ = false;
    const LayerMemory memory_;
    const Layer& layer_;
    int64_t index_;  // of the block
    SliceSum sums_;
    Heads all_, own_, most_;  // most_: of any rank
    std::optional<RingAttention> ring_{};
    Norm norm1_, norm2_, query_norm_, key_norm_;
    Projection qkv_, output_, up_, down_;
    Buffers b_;
};

}  // namespace ferry::model
