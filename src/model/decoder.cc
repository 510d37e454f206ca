#include <algorithm>

#include "block.h"
#include "carver.h"
#include "ferry/model.h"

namespace ferry::model {
namespace {

using ops::ConstView;
using ops::Form;
using ops::View;

// Buffers of one tile of the head: H hidden, V vocabulary, M tokens of a tile.
struct HeadBuffers {
    View n{}, dn{};            // [M, H], compute type
    View logits{}, dlogits{};  // [M, V], fp32 and compute type; one buffer when both are fp32
    float* rstd = nullptr;     // [M]
    std::byte* ops = nullptr;

    static HeadBuffers cut(const Shape& s, const Numerics& n, ops::Ops& ops, Carver& carver);
};

int64_t head_op_bytes(const Shape& s, const Numerics& n, int64_t tile, ops::Ops& ops) {
    const DType type = n.compute;
    const ConstView table = ConstView::of(nullptr, type, s.vocab, s.hidden);
    const ConstView rows = ConstView::of(nullptr, type, tile, s.hidden);
    const ConstView dlogits = ConstView::of(nullptr, type, tile, s.vocab);
    const View logits = View::of(nullptr, DType::f32, tile, s.vocab);
    const View drows = View::of(nullptr, type, tile, s.hidden);
    const View gradient = View::of(nullptr, DType::f32, s.vocab, s.hidden);
    return std::max(
        {ops.gemm_scratch_bytes({.form = Form::nt, .a = rows, .b = table, .c = logits}),
         ops.gemm_scratch_bytes({.form = Form::nn, .a = dlogits, .b = table, .c = drows}),
         ops.gemm_scratch_bytes(
             {.form = Form::tn, .a = dlogits, .b = rows, .c = gradient, .accumulate = true}),
         ops.norm_backward_scratch_bytes(tile, s.hidden), ops.cross_entropy_scratch_bytes(tile)});
}

HeadBuffers HeadBuffers::cut(const Shape& s, const Numerics& n, ops::Ops& ops, Carver& carver) {
    const int64_t tile = std::min(n.head_tile, n.tokens());
    HeadBuffers b;
    b.n = carver.matrix(n.compute, tile, s.hidden);
    b.dn = carver.matrix(n.compute, tile, s.hidden);
    b.logits = carver.matrix(DType::f32, tile, s.vocab);
    b.dlogits = n.compute == DType::f32 ? b.logits : carver.matrix(n.compute, tile, s.vocab);
    b.rstd = carver.floats(tile);
    b.ops = carver.bytes(head_op_bytes(s, n, tile, ops));
    return b;
}

// Where the head's weights and gradients are; a null gradient trains nothing.
struct HeadTensors {
    ConstView norm{}, table{};  // [1, H], [V, H]
    float *norm_gradient = nullptr, *table_gradient = nullptr;
};

HeadTensors head_tensors(const Shape& s, DType type, const Layer& layer, const void* weights,
                         const void* table, float* gradient, float* table_gradient) {
    const auto* base = static_cast<const std::byte*>(weights);
    const auto gradient_of = [&](const Tensor& t) {
        return gradient != nullptr && t.trainable ? gradient + t.offset : nullptr;
    };
    const Tensor& norm = layer.tensor("norm.weight");
    HeadTensors h;
    h.norm = ConstView::of(base + norm.offset * size_of(type), type, 1, s.hidden);
    h.norm_gradient = gradient_of(norm);
    if (s.tie_embeddings) {
        h.table = ConstView::of(table, type, s.vocab, s.hidden);
        h.table_gradient = table_gradient;
    } else {
        const Tensor& own = layer.tensor("lm_head.weight");
        h.table = ConstView::of(base + own.offset * size_of(type), type, s.vocab, s.hidden);
        h.table_gradient = gradient_of(own);
    }
    return h;
}

// One tile, forward and, where anything asks for it, backward. x, dx: [M, H] residual type.
void head_tile(ops::Ops& ops, const Shape& s, const HeadTensors& h, const HeadBuffers& buffers,
               ConstView x, const int32_t* targets, float scale, View dx, double* loss_sum) {
    const int64_t tokens = x.rows;
    const View n = buffers.n.row_range(0, tokens), dn = buffers.dn.row_range(0, tokens);
    const View logits = buffers.logits.row_range(0, tokens);
    const bool into_norm = dx.data != nullptr || h.norm_gradient != nullptr;
    const bool backward = into_norm || h.table_gradient != nullptr;
    const View dlogits = backward ? buffers.dlogits.row_range(0, tokens) : View{};
    ops.norm_forward(x, h.norm, s.norm_eps, n, buffers.rstd);
    ops.gemm({.form = Form::nt, .a = n, .b = h.table, .c = logits}, buffers.ops);
    ops.cross_entropy(logits, targets, scale, dlogits, loss_sum, buffers.ops);
    if (h.table_gradient != nullptr) {
        ops.gemm({.form = Form::tn,
                  .a = dlogits,
                  .b = n,
                  .c = View::of(h.table_gradient, DType::f32, s.vocab, s.hidden),
                  .accumulate = true},
                 buffers.ops);
    }
    if (!into_norm) return;
    ops.gemm({.form = Form::nn, .a = dlogits, .b = h.table, .c = dn}, buffers.ops);
    ops.norm_backward(dn, x, h.norm, buffers.rstd, {}, dx, h.norm_gradient, buffers.ops);
}

}  // namespace

Decoder::Decoder(Shape shape, Numerics numerics, std::vector<Layer> layers, ops::Ops& ops)
    : shape_(shape), numerics_(numerics), layers_(std::move(layers)), ops_(ops) {
    FERRY_CHECK(static_cast<int64_t>(layers_.size()) == shape_.layers + 2);
    FERRY_CHECK(shape_.kv_heads > 0 && shape_.heads % shape_.kv_heads == 0);
    FERRY_CHECK(shape_.head_dim > 0 && shape_.head_dim % 2 == 0);
    FERRY_CHECK(numerics_.tokens() > 0 && numerics_.head_tile > 0 && numerics_.mlp_tile >= 0);
}

int64_t Decoder::activation_bytes() const {
    return numerics_.tokens() * shape_.hidden * size_of(numerics_.residual);
}

int64_t Decoder::scratch_bytes() const {
    Carver head(nullptr);
    HeadBuffers::cut(shape_, numerics_, ops_, head);
    int64_t most = head.peak();
    if (shape_.layers > 0) {
        most = std::max(most, Block::scratch_bytes(shape_, numerics_, layers_[1], ops_));
    }
    return most;
}

void Decoder::embed(const int32_t* tokens, const void* table, void* x) const {
    ops_.embed(tokens, ConstView::of(table, numerics_.compute, shape_.vocab, shape_.hidden),
               View::of(x, numerics_.residual, numerics_.tokens(), shape_.hidden));
}

void Decoder::embed_backward(const int32_t* tokens, const void* dx, float* gradient) const {
    ops_.embed_backward(
        tokens, ConstView::of(dx, numerics_.residual, numerics_.tokens(), shape_.hidden), gradient);
}

void Decoder::forward(int64_t block, const void* weights, const void* x_in, void* x_out,
                      uint32_t* nonfinite, std::byte* scratch) const {
    Block pass(shape_, numerics_, layers_[static_cast<size_t>(block + 1)], ops_, weights, nullptr,
               scratch);
    const View out = View::of(x_out, numerics_.residual, numerics_.tokens(), shape_.hidden);
    pass.forward(ConstView::of(x_in, numerics_.residual, out.rows, out.cols), out);
    ops_.check_finite(out, nonfinite);
}

void Decoder::backward(int64_t block, const void* weights, const void* x_in, void* dx,
                       bool needs_dx, float* gradient, std::byte* scratch) const {
    const Layer& layer = layers_[static_cast<size_t>(block + 1)];
    if (!needs_dx && layer.trainable_elements == 0) return;
    Block pass(shape_, numerics_, layer, ops_, weights, gradient, scratch);
    const View d = View::of(dx, numerics_.residual, numerics_.tokens(), shape_.hidden);
    pass.backward(ConstView::of(x_in, numerics_.residual, d.rows, d.cols), d, needs_dx);
}

void Decoder::head(const void* weights, const void* table, const void* x, const int32_t* targets,
                   float scale, void* dx, float* gradient, float* table_gradient, double* loss_sum,
                   std::byte* scratch) const {
    const int64_t tokens = numerics_.tokens(), tile = std::min(numerics_.head_tile, tokens);
    const DType type = numerics_.residual;
    Carver carver(scratch);
    const HeadBuffers buffers = HeadBuffers::cut(shape_, numerics_, ops_, carver);
    const HeadTensors h = head_tensors(shape_, numerics_.compute, layers_.back(), weights, table,
                                       gradient, table_gradient);
    const ConstView rows = ConstView::of(x, type, tokens, shape_.hidden);
    const View drows = View::of(dx, type, tokens, shape_.hidden);
    for (int64_t first = 0; first < tokens; first += tile) {
        const int64_t count = std::min(tile, tokens - first);
        head_tile(ops_, shape_, h, buffers, rows.row_range(first, count), targets + first, scale,
                  dx == nullptr ? View{} : drows.row_range(first, count), loss_sum);
    }
}

void Decoder::head_loss(const void* weights, const void* table, const void* x,
                        const int32_t* targets, double* loss_sum, std::byte* scratch) const {
    head(weights, table, x, targets, 0, nullptr, nullptr, nullptr, loss_sum, scratch);
}

}  // namespace ferry::model
