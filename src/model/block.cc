#include "block.h"

#include <cmath>

#include "families.h"

namespace ferry::model {

using ops::ConstView;
using ops::View;

Block::Block(const Shape& shape, const Numerics& numerics, const RopeTable& rope, ops::Ops& ops,
             const LayerMemory& memory, const Mask& mask, std::byte* scratch)
    : Block(shape, numerics, rope, ops, memory, mask, names_of(shape.family).input_major) {
    Carver carver(scratch);
    b_ = cut(carver, 0);
}

Block::Block(const Shape& shape, const Numerics& numerics, const RopeTable& rope, ops::Ops& ops,
             const LayerMemory& memory, const Mask& mask, bool input_major)
    : shape_(shape),
      numerics_(numerics),
      rope_(rope),
      ops_(ops),
      mask_(mask),
      index_(memory.layer().index),
      query_(shape.heads * shape.head_dim),
      key_(shape.kv_heads * shape.head_dim),
      norm1_{memory(Role::attention_norm), memory(Role::attention_norm_bias), shape.norm_eps},
      norm2_{memory(Role::mlp_norm), memory(Role::mlp_norm_bias), shape.norm_eps},
      query_norm_{memory(Role::query_norm), {}, shape.norm_eps},
      key_norm_{memory(Role::key_norm), {}, shape.norm_eps},
      qkv_(memory, input_major, {Role::query, Role::key, Role::value, Role::query_key_value},
           {Role::query_bias, Role::key_bias, Role::value_bias, Role::query_key_value_bias}),
      output_(memory, input_major, {Role::output}, {Role::output_bias}),
      up_(memory, input_major, {Role::gate, Role::up}, {Role::gate_bias, Role::up_bias}),
      down_(memory, input_major, {Role::down}, {Role::down_bias}) {}

int64_t Block::scratch_bytes(const Shape& shape, const Numerics& numerics, const RopeTable& rope,
                             ops::Ops& ops, const Layer& layer) {
    const LayerMemory nowhere(layer, numerics.compute, nullptr, nullptr);
    const Mask mask{.pattern = shape.pattern_of(layer.index)};
    const Block block(shape, numerics, rope, ops, nowhere, mask, nullptr);
    Carver carver(nullptr);
    block.cut(carver, block.op_scratch_bytes());
    return carver.peak();
}

void Block::cut_attention(Carver& carver, Buffers& b) const {
    const int64_t tokens = numerics_.tokens();
    b.attended = output_.input(carver, tokens);
    b.lse = carver.floats(shape_.heads * tokens);
}

void Block::cut_saved(Saved what, Carver& carver, Buffers& b) const {
    if (what == Saved::attention) return cut_attention(carver, b);
    b.inner = carver.matrix(numerics_.compute, numerics_.tokens(), up_.outputs());
}

int64_t Block::saved_bytes(const Shape& shape, const Numerics& numerics, const RopeTable& rope,
                           ops::Ops& ops, const Layer& layer, Saved what) {
    const LayerMemory nowhere(layer, numerics.compute, nullptr, nullptr);
    Carver carver(nullptr);
    Buffers unused;
    Block(shape, numerics, rope, ops, nowhere, {}, nullptr).cut_saved(what, carver, unused);
    return carver.peak();
}

void Block::save(Saved what, std::byte* memory, bool known) {
    Carver carver(memory);
    cut_saved(what, carver, b_);
    saved_[at(what)] = true;
    known_[at(what)] = known;
}

int64_t Block::mlp_tile() const {
    const int64_t tokens = numerics_.tokens();
    return numerics_.mlp_tile > 0 ? std::min(numerics_.mlp_tile, tokens) : tokens;
}

Block::Buffers Block::cut(Carver& carver, int64_t op_scratch_bytes) const {
    const int64_t tokens = numerics_.tokens(), tile = mlp_tile();
    const int64_t hidden = shape_.hidden;
    const int64_t normed = shape_.head_norms ? tokens : 0;
    const DType compute = numerics_.compute;
    Buffers b;
    b.n1 = qkv_.input(carver, tokens);
    b.qkv = carver.matrix(compute, tokens, query_ + 2 * key_);
    b.normed = carver.matrix(compute, normed, query_ + key_);
    cut_attention(carver, b);
    b.x_mid = carver.matrix(numerics_.residual, tokens, hidden);
    b.dy = carver.matrix(compute, compute == numerics_.residual ? 0 : tokens, hidden);
    b.dn = carver.matrix(compute, tokens, hidden);
    b.stats1 = carver.floats(norm1_.stats_floats(tokens));
    b.query_rstd = carver.floats(normed * shape_.heads);
    b.key_rstd = carver.floats(normed * shape_.kv_heads);
    if (shape_.head_norms)
        b.angles = carver.floats(ops_.rope_angles_floats(rope(shape_.heads, false)));
    const int64_t shared = carver.mark();
    b.n2 = up_.input(carver, tile);
    b.inner = carver.matrix(compute, tile, up_.outputs());
    b.active = down_.input(carver, tile);
    b.stats2 = carver.floats(norm2_.stats_floats(tile));
    carver.rewind(shared);
    b.dattended = carver.matrix(compute, tokens, query_);
    b.dqkv = carver.matrix(compute, tokens, query_ + 2 * key_);
    carver.rewind(carver.peak());
    b.ops = carver.bytes(op_scratch_bytes);
    return b;
}

int64_t Block::op_scratch_bytes() const {
    const int64_t tokens = numerics_.tokens(), tile = mlp_tile();
    const DType compute = numerics_.compute, residual = numerics_.residual;
    int64_t most = std::max(
        {ops_.attention_forward_scratch_bytes(attention()),
         ops_.attention_backward_scratch_bytes(attention()), norm1_.scratch_bytes(tokens, ops_),
         norm2_.scratch_bytes(tile, ops_), qkv_.scratch_bytes(ops_, tokens, compute),
         output_.scratch_bytes(ops_, tokens, residual), up_.scratch_bytes(ops_, tile, compute),
         down_.scratch_bytes(ops_, tile, residual)});
    if (shape_.head_norms)
        most = std::max(most, query_norm_.scratch_bytes(tokens * shape_.heads, ops_));
    return most;
}

// ---------------------------------------------------------------- pieces

ConstView Block::in_compute_type(ConstView x, View room) {
    if (x.type == numerics_.compute) return x;
    const View copy = room.row_range(0, x.rows);
    ops_.cast(x, copy);
    return copy;
}

ops::Attention Block::attention() const {
    const int64_t window = shape_.window_of(index_);
    return {.sequences = numerics_.micro_batch,
            .sequence = numerics_.sequence,
            .heads = shape_.heads,
            .kv_heads = shape_.kv_heads,
            .head_dim = shape_.head_dim,
            .scale = 1 / std::sqrt(static_cast<double>(shape_.head_dim)),
            .type = numerics_.compute,
            .window = window < numerics_.sequence ? window : 0,
            .pattern = mask_.pattern,
            .blocks = mask_.lists,
            .documents = numerics_.documents,
            .document_start = mask_.documents.start,
            .document_end = mask_.documents.end};
}

ops::Rope Block::rope(int64_t heads, bool inverse) const {
    return {.sequence = numerics_.sequence,
            .heads = heads,
            .head_dim = shape_.head_dim,
            .frequencies = rope_.frequencies.data(),
            .amplitude = rope_.amplitude,
            .inverse = inverse,
            .document_start = mask_.documents.start};
}

// Norms of queries' and keys' heads, where the family has them, and their rotation.
void Block::turn_heads() {
    FERRY_CHECK(!shape_.head_norms || !rope_.frequencies.empty());
    if (rope_.frequencies.empty()) return;  // the embedding knows the positions
    // Queries and keys lie side by side, so one rotation turns both.
    if (!shape_.head_norms) return ops_.rope(seen(), rope(shape_.heads + shape_.kv_heads, false));
    const ops::Rope of_queries = rope(shape_.heads, false), of_keys = rope(shape_.kv_heads, false);
    ops_.rope_angles(of_queries, b_.angles);
    ops_.norm_rope_forward(queries(b_.qkv), query_norm_.weight.value, query_norm_.eps,
                           queries(b_.normed), b_.query_rstd, of_queries, b_.angles);
    ops_.norm_rope_forward(keys(b_.qkv), key_norm_.weight.value, key_norm_.eps, keys(b_.normed),
                           b_.key_rstd, of_keys, b_.angles);
}

// dqkv holds the gradients of what turn_heads gave, and receives those of what it took.
void Block::turn_heads_back() {
    if (rope_.frequencies.empty()) return;
    if (!shape_.head_norms) {
        return ops_.rope(b_.dqkv.col_range(0, query_ + key_),
                         rope(shape_.heads + shape_.kv_heads, true));
    }
    ops_.norm_rope_backward(queries(b_.dqkv), queries(b_.qkv), query_norm_.weight.value,
                            b_.query_rstd, query_norm_.weight.gradient, rope(shape_.heads, true),
                            b_.angles, b_.ops);
    ops_.norm_rope_backward(keys(b_.dqkv), keys(b_.qkv), key_norm_.weight.value, b_.key_rstd,
                            key_norm_.weight.gradient, rope(shape_.kv_heads, true), b_.angles,
                            b_.ops);
}

// ---------------------------------------------------------------- passes

void Block::attend(ConstView x_in, View x_mid) {
    norm1_.forward(ops_, x_in, b_.n1, b_.stats1);
    qkv_.apply(ops_, b_.n1, b_.qkv, {}, b_.ops);
    turn_heads();
    if (!known_[at(Saved::attention)]) attention_forward();
    output_.apply(ops_, b_.attended, x_mid, x_in, b_.ops);
}

void Block::attention_forward() {
    ops_.attention_forward(attention(), queries(seen()), keys(seen()), values(b_.qkv), b_.attended,
                           b_.lse, b_.ops);
}

View Block::inner_of(int64_t first, int64_t tokens) const {
    return b_.inner.row_range(saved_[at(Saved::mlp)] ? first : 0, tokens);
}

void Block::compute(Saved what) {
    if (what == Saved::attention) return attention_forward();
    for (int64_t first = 0; first < numerics_.tokens(); first += mlp_tile()) {
        const int64_t count = std::min(mlp_tile(), numerics_.tokens() - first);
        up_.apply(ops_, b_.n2.row_range(0, count), inner_of(first, count), {}, b_.ops);
    }
}

// n2 and what the MLP's first matrices make of it, of a tile of x_mid.
void Block::mlp(ConstView x_mid, int64_t first) {
    const View n2 = b_.n2.row_range(0, x_mid.rows);
    norm2_.forward(ops_, x_mid, n2, b_.stats2);
    if (!known_[at(Saved::mlp)]) up_.apply(ops_, n2, inner_of(first, x_mid.rows), {}, b_.ops);
}

// Applies the activation to it.
void Block::activate(ConstView inner) {
    const View active = b_.active.row_range(0, inner.rows);
    if (shape_.gated) {
        ops_.swiglu_forward(inner, active);
    } else {
        ops_.gelu_forward(inner, active);
    }
}

// One pass over both: `active` holds its gradient and receives what forward gave.
void Block::activate_backward(View active, View inner) {
    if (shape_.gated) {
        ops_.swiglu_backward(active, inner);
    } else {
        ops_.gelu_backward(active, inner);
    }
}

void Block::forward(ConstView x_in, View x_out) {
    attend(x_in, b_.x_mid);
    for (int64_t first = 0; first < x_out.rows; first += mlp_tile()) {
        const int64_t count = std::min(mlp_tile(), x_out.rows - first);
        const ConstView x_mid = b_.x_mid.row_range(first, count);
        mlp(x_mid, first);
        activate(inner_of(first, count));
        // Not into x_mid itself: on a GPU that costs a copy of it first.
        down_.apply(ops_, b_.active.row_range(0, count), x_out.row_range(first, count), x_mid,
                    b_.ops);
    }
}

void Block::backward(ConstView x_in, View dx, bool needs_dx) {
    const bool into_heads = needs_dx || norm1_.trains() || qkv_.trains();
    const bool into_qkv = into_heads || query_norm_.trains() || key_norm_.trains();
    const bool needs_mid = into_qkv || output_.trains();
    attend(x_in, b_.x_mid);
    for (int64_t first = 0; first < dx.rows; first += mlp_tile()) {
        const int64_t count = std::min(mlp_tile(), dx.rows - first);
        mlp_backward(b_.x_mid.row_range(first, count), first, dx.row_range(first, count),
                     needs_mid);
    }
    if (needs_mid) attention_backward(x_in, dx, needs_dx, into_qkv);
}

// dx holds d(x_out) and receives d(x_mid).
void Block::mlp_backward(ConstView x_mid, int64_t first, View dx, bool needs_mid) {
    const bool into_norm = needs_mid || norm2_.trains();
    const bool into_up = into_norm || up_.trains();
    if (!into_up && !down_.trains()) return;
    const int64_t tokens = x_mid.rows;
    const View inner = inner_of(first, tokens), active = b_.active.row_range(0, tokens);
    const View n2 = b_.n2.row_range(0, tokens), dn = b_.dn.row_range(0, tokens);
    mlp(x_mid, first);
    const ConstView dy = in_compute_type(dx, b_.dy);
    if (!into_up) {
        activate(inner);
        return down_.add_gradient(ops_, dy, active, b_.ops);
    }
    down_.apply_transposed(ops_, dy, active, b_.ops);
    activate_backward(active, inner);
    down_.add_gradient(ops_, dy, active, b_.ops);
    up_.add_gradient(ops_, inner, n2, b_.ops);
    if (!into_norm) return;
    up_.apply_transposed(ops_, inner, dn, b_.ops);
    norm2_.backward(ops_, dn, x_mid, b_.stats2, needs_mid ? ConstView(dx) : ConstView{},
                    needs_mid ? dx : View{}, b_.ops);
}

// dx holds d(x_mid) and receives d(x_in).
void Block::attention_backward(ConstView x_in, View dx, bool needs_dx, bool into_qkv) {
    const ConstView dy = in_compute_type(dx, b_.dy);
    output_.add_gradient(ops_, dy, b_.attended, b_.ops);
    if (!into_qkv) return;
    output_.apply_transposed(ops_, dy, b_.dattended, b_.ops);
    ops_.attention_backward(attention(), queries(seen()), keys(seen()), values(b_.qkv), b_.attended,
                            b_.dattended, b_.lse, queries(b_.dqkv), keys(b_.dqkv), values(b_.dqkv),
                            b_.ops);
    turn_heads_back();
    qkv_.add_gradient(ops_, b_.dqkv, b_.n1, b_.ops);
    if (!needs_dx && !norm1_.trains()) return;
    qkv_.apply_transposed(ops_, b_.dqkv, b_.dn, b_.ops);
    norm1_.backward(ops_, b_.dn, x_in, b_.stats1, needs_dx ? ConstView(dx) : ConstView{},
                    needs_dx ? dx : View{}, b_.ops);
}

}  // namespace ferry::model
