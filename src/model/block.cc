#include "block.h"

#include <cmath>

namespace ferry::model {

using ops::ConstView;
using ops::Form;
using ops::View;

Block::Block(const Shape& shape, const Numerics& numerics, const Layer& layer, ops::Ops& ops,
             const void* weights, float* gradient, std::byte* scratch)
    : shape_(shape),
      numerics_(numerics),
      layer_(layer),
      ops_(ops),
      weights_(static_cast<const std::byte*>(weights)),
      gradient_(gradient),
      query_(shape.heads * shape.head_dim),
      key_(shape.kv_heads * shape.head_dim),
      norm1_(norm("input_layernorm.weight")),
      norm2_(norm("post_attention_layernorm.weight")),
      qkv_(projection({"q_proj.weight", "k_proj.weight", "v_proj.weight"})),
      output_(projection({"o_proj.weight"})),
      gate_up_(projection({"gate_proj.weight", "up_proj.weight"})),
      down_(projection({"down_proj.weight"})) {
    Carver carver(scratch);
    b_ = cut(carver);
}

int64_t Block::scratch_bytes(const Shape& shape, const Numerics& numerics, const Layer& layer,
                             ops::Ops& ops) {
    const Block block(shape, numerics, layer, ops, nullptr, nullptr, nullptr);
    Carver carver(nullptr);
    block.cut(carver);
    return carver.peak();
}

Projection Block::projection(std::initializer_list<std::string_view> suffixes) const {
    Projection p;
    const Tensor* before = nullptr;
    int64_t column = 0;
    for (const std::string_view suffix : suffixes) {
        const Tensor& t = layer_.tensor(suffix);
        const bool joins = before != nullptr && before->offset + before->count == t.offset &&
                           before->trainable == t.trainable;
        if (joins) {
            p.parts[static_cast<size_t>(p.count - 1)].weight.rows += t.shape[0];
        } else {
            const void* at =
                weights_ == nullptr ? nullptr : weights_ + t.offset * size_of(numerics_.compute);
            p.parts[static_cast<size_t>(p.count++)] = {
                .weight = ConstView::of(at, numerics_.compute, t.shape[0], t.shape[1]),
                .gradient = t.trainable && gradient_ != nullptr ? gradient_ + t.offset : nullptr,
                .column = column};
        }
        column += t.shape[0];
        before = &t;
    }
    return p;
}

Block::Norm Block::norm(std::string_view suffix) const {
    const Tensor& t = layer_.tensor(suffix);
    const void* at =
        weights_ == nullptr ? nullptr : weights_ + t.offset * size_of(numerics_.compute);
    return {.weight = ConstView::of(at, numerics_.compute, 1, t.count),
            .gradient = t.trainable && gradient_ != nullptr ? gradient_ + t.offset : nullptr};
}

int64_t Block::mlp_tile() const {
    const int64_t tokens = numerics_.tokens();
    return numerics_.mlp_tile > 0 ? std::min(numerics_.mlp_tile, tokens) : tokens;
}

Block::Buffers Block::cut(Carver& carver) const {
    const int64_t tokens = numerics_.tokens(), tile = mlp_tile();
    const int64_t hidden = shape_.hidden, inner = shape_.intermediate;
    const DType compute = numerics_.compute;
    Buffers b;
    b.n1 = carver.matrix(compute, tokens, hidden);
    b.qkv = carver.matrix(compute, tokens, query_ + 2 * key_);
    b.attended = carver.matrix(compute, tokens, query_);
    b.x_mid = carver.matrix(numerics_.residual, tokens, hidden);
    b.dy = carver.matrix(compute, compute == numerics_.residual ? 0 : tokens, hidden);
    b.dn = carver.matrix(compute, tokens, hidden);
    b.rstd1 = carver.floats(tokens);
    b.lse = carver.floats(shape_.heads * tokens);
    b.ops = carver.bytes(op_scratch_bytes());
    const int64_t shared = carver.mark();
    b.n2 = carver.matrix(compute, tile, hidden);
    b.gate_up = carver.matrix(compute, tile, 2 * inner);
    b.active = carver.matrix(compute, tile, inner);
    b.dactive = carver.matrix(compute, tile, inner);
    b.rstd2 = carver.floats(tile);
    carver.rewind(shared);
    b.dattended = carver.matrix(compute, tokens, query_);
    b.dqkv = carver.matrix(compute, tokens, query_ + 2 * key_);
    return b;
}

int64_t Block::op_scratch_bytes() const {
    const int64_t tokens = numerics_.tokens(), tile = mlp_tile(), hidden = shape_.hidden;
    const int64_t widest = std::max(query_ + 2 * key_, 2 * shape_.intermediate);
    const DType compute = numerics_.compute;
    int64_t most = ops_.norm_backward_scratch_bytes(tokens, hidden);
    most = std::max(most, ops_.attention_forward_scratch_bytes(attention()));
    most = std::max(most, ops_.attention_backward_scratch_bytes(attention()));
    const auto gemm = [&](Form form, int64_t m, int64_t n, int64_t k, DType out) {
        const bool tn = form == Form::tn, nt = form == Form::nt;
        const ops::Gemm g{.form = form,
                          .a = ConstView::of(nullptr, compute, tn ? k : m, tn ? m : k),
                          .b = ConstView::of(nullptr, compute, nt ? n : k, nt ? k : n),
                          .c = View::of(nullptr, out, m, n),
                          .accumulate = tn};
        most = std::max(most, ops_.gemm_scratch_bytes(g));
    };
    // Every matrix of the block, forward, its input's gradient and its own.
    const auto all = [&](int64_t rows, int64_t out, int64_t in, DType type) {
        gemm(Form::nt, rows, out, in, type);
        gemm(Form::nn, rows, in, out, compute);
        gemm(Form::tn, out, in, rows, DType::f32);
    };
    all(tokens, widest, hidden, compute);
    all(tokens, query_ + 2 * key_, hidden, compute);
    all(tokens, hidden, query_, numerics_.residual);
    all(tile, 2 * shape_.intermediate, hidden, compute);
    all(tile, hidden, shape_.intermediate, numerics_.residual);
    return most;
}

// ---------------------------------------------------------------- pieces

// y = x W^T + addend, part by part.
void Block::apply(const Projection& p, ConstView x, View y, ConstView addend) {
    for (int i = 0; i < p.count; ++i) {
        const Projection::Part& part = p.parts[static_cast<size_t>(i)];
        ops_.gemm({.form = Form::nt,
                   .a = x,
                   .b = part.weight,
                   .c = y.col_range(part.column, part.weight.rows),
                   .addend = addend},
                  b_.ops);
    }
}

// dx = dy W; the parts' contributions are added in order.
void Block::apply_transposed(const Projection& p, ConstView dy, View dx) {
    for (int i = 0; i < p.count; ++i) {
        const Projection::Part& part = p.parts[static_cast<size_t>(i)];
        ops_.gemm({.form = Form::nn,
                   .a = dy.col_range(part.column, part.weight.rows),
                   .b = part.weight,
                   .c = dx,
                   .addend = i == 0 ? ConstView{} : ConstView(dx)},
                  b_.ops);
    }
}

// gradient += dy^T x, of the parts that train.
void Block::add_gradient(const Projection& p, ConstView dy, ConstView x) {
    for (int i = 0; i < p.count; ++i) {
        const Projection::Part& part = p.parts[static_cast<size_t>(i)];
        if (part.gradient == nullptr) continue;
        ops_.gemm({.form = Form::tn,
                   .a = dy.col_range(part.column, part.weight.rows),
                   .b = x,
                   .c = View::of(part.gradient, DType::f32, part.weight.rows, part.weight.cols),
                   .accumulate = true},
                  b_.ops);
    }
}

ConstView Block::in_compute_type(ConstView x, View room) {
    if (x.type == numerics_.compute) return x;
    const View copy = room.row_range(0, x.rows);
    ops_.cast(x, copy);
    return copy;
}

ops::Attention Block::attention() const {
    return {.sequences = numerics_.micro_batch,
            .sequence = numerics_.sequence,
            .heads = shape_.heads,
            .kv_heads = shape_.kv_heads,
            .head_dim = shape_.head_dim,
            .scale = 1 / std::sqrt(static_cast<double>(shape_.head_dim)),
            .type = numerics_.compute};
}

// Queries and keys lie side by side, so one rotation turns both.
void Block::rope(View qkv, bool inverse) {
    ops_.rope(qkv.col_range(0, query_ + key_), {.sequence = numerics_.sequence,
                                                .heads = shape_.heads + shape_.kv_heads,
                                                .head_dim = shape_.head_dim,
                                                .theta = shape_.rope_theta,
                                                .inverse = inverse});
}

// ---------------------------------------------------------------- passes

void Block::attend(ConstView x_in, View x_mid) {
    ops_.norm_forward(x_in, norm1_.weight, shape_.norm_eps, b_.n1, b_.rstd1);
    apply(qkv_, b_.n1, b_.qkv);
    rope(b_.qkv, false);
    ops_.attention_forward(attention(), b_.qkv.col_range(0, query_), b_.qkv.col_range(query_, key_),
                           b_.qkv.col_range(query_ + key_, key_), b_.attended, b_.lse, b_.ops);
    apply(output_, b_.attended, x_mid, x_in);
}

// n2, gate and up, and their product, of a tile of x_mid.
void Block::mlp(ConstView x_mid) {
    const int64_t tokens = x_mid.rows;
    ops_.norm_forward(x_mid, norm2_.weight, shape_.norm_eps, b_.n2.row_range(0, tokens), b_.rstd2);
    apply(gate_up_, b_.n2.row_range(0, tokens), b_.gate_up.row_range(0, tokens));
    ops_.swiglu_forward(b_.gate_up.row_range(0, tokens), b_.active.row_range(0, tokens));
}

void Block::forward(ConstView x_in, View x_out) {
    attend(x_in, x_out);  // x_out holds x_mid until the MLP is added to it
    for (int64_t first = 0; first < x_out.rows; first += mlp_tile()) {
        const View x = x_out.row_range(first, std::min(mlp_tile(), x_out.rows - first));
        mlp(x);
        apply(down_, b_.active.row_range(0, x.rows), x, x);
    }
}

void Block::backward(ConstView x_in, View dx, bool needs_dx) {
    const bool into_qkv = needs_dx || norm1_.gradient != nullptr || qkv_.trains();
    const bool needs_mid = into_qkv || output_.trains();
    attend(x_in, b_.x_mid);
    for (int64_t first = 0; first < dx.rows; first += mlp_tile()) {
        const int64_t count = std::min(mlp_tile(), dx.rows - first);
        mlp_backward(b_.x_mid.row_range(first, count), dx.row_range(first, count), needs_mid);
    }
    if (needs_mid) attention_backward(x_in, dx, needs_dx, into_qkv);
}

// dx holds d(x_out) and receives d(x_mid).
void Block::mlp_backward(ConstView x_mid, View dx, bool needs_mid) {
    const bool into_norm = needs_mid || norm2_.gradient != nullptr;
    const bool into_gate = into_norm || gate_up_.trains();
    if (!into_gate && !down_.trains()) return;
    const int64_t tokens = x_mid.rows;
    const View gate_up = b_.gate_up.row_range(0, tokens), dactive = b_.dactive.row_range(0, tokens);
    const View n2 = b_.n2.row_range(0, tokens), dn = b_.dn.row_range(0, tokens);
    mlp(x_mid);
    const ConstView dy = in_compute_type(dx, b_.dy);
    add_gradient(down_, dy, b_.active.row_range(0, tokens));
    if (!into_gate) return;
    apply_transposed(down_, dy, dactive);
    ops_.swiglu_backward(dactive, gate_up);
    add_gradient(gate_up_, gate_up, n2);
    if (!into_norm) return;
    apply_transposed(gate_up_, gate_up, dn);
    ops_.norm_backward(dn, x_mid, norm2_.weight, b_.rstd2, needs_mid ? ConstView(dx) : ConstView{},
                       needs_mid ? dx : View{}, norm2_.gradient, b_.ops);
}

// dx holds d(x_mid) and receives d(x_in).
void Block::attention_backward(ConstView x_in, View dx, bool needs_dx, bool into_qkv) {
    const ConstView dy = in_compute_type(dx, b_.dy);
    add_gradient(output_, dy, b_.attended);
    if (!into_qkv) return;
    apply_transposed(output_, dy, b_.dattended);
    ops_.attention_backward(attention(), b_.qkv.col_range(0, query_),
                            b_.qkv.col_range(query_, key_), b_.qkv.col_range(query_ + key_, key_),
                            b_.attended, b_.dattended, b_.lse, b_.dqkv.col_range(0, query_),
                            b_.dqkv.col_range(query_, key_), b_.dqkv.col_range(query_ + key_, key_),
                            b_.ops);
    rope(b_.dqkv, true);
    add_gradient(qkv_, b_.dqkv, b_.n1);
    if (!needs_dx && norm1_.gradient == nullptr) return;
    apply_transposed(qkv_, b_.dqkv, b_.dn);
    ops_.norm_backward(b_.dn, x_in, norm1_.weight, b_.rstd1, needs_dx ? ConstView(dx) : ConstView{},
                       needs_dx ? dx : View{}, norm1_.gradient, b_.ops);
}

}  // namespace ferry::model
