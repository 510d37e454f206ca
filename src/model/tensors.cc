#include "tensors.h"

#include <algorithm>

namespace ferry::model {

using ops::ConstView;
using ops::Form;
using ops::Gemm;
using ops::View;

Parameter LayerMemory::operator()(Role role) const {
    const Tensor* t = layer_.find(role);
    if (t == nullptr) return {};
    const void* at = weights_ == nullptr ? nullptr : weights_ + t->offset * size_of(type_);
    const bool matrix = t->shape.size() > 1;
    return {.value = ConstView::of(at, type_, matrix ? t->shape[0] : 1, t->shape.back()),
            .gradient = t->trainable && gradient_.asked() ? gradient_.at + t->offset : nullptr,
            .fresh = gradient_.fresh};
}

void Norm::forward(ops::Ops& ops, ConstView x, View y, float* stats) const {
    if (bias.exists()) {
        ops.layer_norm_forward(x, weight.value, bias.value, eps, y, stats);
    } else {
        ops.norm_forward(x, weight.value, eps, y, stats);
    }
}

void Norm::backward(ops::Ops& ops, ConstView dy, ConstView x, const float* stats, ConstView addend,
                    View dx, bool first, std::byte* scratch) const {
    if (bias.exists()) {
        ops.layer_norm_backward(dy, x, weight.value, stats, addend, dx, weight.sums(first),
                                bias.sums(first), scratch);
    } else {
        ops.norm_backward(dy, x, weight.value, stats, addend, dx, weight.sums(first), scratch);
    }
}

namespace {

// Whether `next` begins where `before` ends and shares its fate; true too where both are none.
bool continues(const Tensor* before, const Tensor* next) {
    if (before == nullptr || next == nullptr) return before == next;
    return before->offset + before->count == next->offset && before->trainable == next->trainable;
}

}  // namespace

Projection::Projection(const LayerMemory& memory, bool input_major,
                       std::initializer_list<Role> weights, std::initializer_list<Role> biases,
                       bool adds_bias)
    : input_major_(input_major), adds_bias_(adds_bias) {
    const Tensor *last_weight = nullptr, *last_bias = nullptr;
    const Role* bias_role = biases.begin();
    for (const Role role : weights) {
        const Tensor *weight = memory.layer().find(role), *bias = memory.layer().find(*bias_role);
        Part part{.weight = memory(role), .bias = memory(*bias_role++), .column = outputs_};
        if (weight == nullptr) continue;
        const ConstView& w = part.weight.value;
        part.outputs = input_major ? w.cols : w.rows;
        inputs_ = input_major ? w.rows : w.cols;
        type_ = w.type;
        outputs_ += part.outputs;
        // Only rows of one matrix can follow another's.
        if (count_ > 0 && !input_major && continues(last_weight, weight) &&
            continues(last_bias, bias)) {
            Part& before = parts_[static_cast<size_t>(count_ - 1)];
            before.weight.value.rows += part.outputs;
            before.bias.value.cols += part.bias.value.cols;
            before.outputs += part.outputs;
        } else {
            parts_[static_cast<size_t>(count_++)] = part;
        }
        if (bias != nullptr && size_of(type_) == 2) spare_ = ops::kSpare;
        last_weight = weight;
        last_bias = bias;
    }
}

bool Projection::trains() const {
    return std::ranges::any_of(parts(),
                               [](const Part& p) { return p.weight.trains() || p.bias.trains(); });
}

Gemm Projection::forward(const Part& part, ConstView x, View y, ConstView addend) const {
    return {.form = input_major_ ? Form::nn : Form::nt,
            .a = x,
            .b = part.weight.value,
            .c = y.col_range(part.column, part.outputs),
            .bias = adds_bias_ ? part.bias.value : ConstView{},
            .addend = addend,
            .spare = spare_};
}

Gemm Projection::backward(const Part& part, ConstView dy, View dx, ConstView addend) const {
    return {.form = input_major_ ? Form::nt : Form::nn,
            .a = dy.col_range(part.column, part.outputs),
            .b = part.weight.value,
            .c = dx,
            .addend = addend};
}

Gemm Projection::gradient(const Part& part, ConstView dy, ConstView x, bool first) const {
    const ConstView& w = part.weight.value;
    const ConstView slope = dy.col_range(part.column, part.outputs);
    return {.form = Form::tn,
            .a = input_major_ ? x : slope,
            .b = input_major_ ? slope : x,
            .c = View::of(part.weight.gradient, DType::f32, w.rows, w.cols),
            .accumulate = true,
            .fresh = part.weight.fresh && first};
}

View Projection::input(Carver& carver, int64_t tokens) const {
    return spare_ > 0 ? carver.padded_matrix(type_, tokens, inputs_, spare_)
                      : carver.matrix(type_, tokens, inputs_);
}

void Projection::apply(ops::Ops& ops, ConstView x, View y, ConstView addend,
                       std::byte* scratch) const {
    for (const Part& part : parts()) ops.gemm(forward(part, x, y, addend), scratch);
}

void Projection::apply_transposed(ops::Ops& ops, ConstView dy, View dx, std::byte* scratch) const {
    for (const Part& part : parts()) {
        const bool first = &part == &parts_[0];
        ops.gemm(backward(part, dy, dx, first ? ConstView{} : ConstView(dx)), scratch);
    }
}

void Projection::add_gradient(ops::Ops& ops, ConstView dy, ConstView x, bool first,
                              std::byte* scratch) const {
    for (const Part& part : parts()) {
        if (part.weight.trains()) ops.gemm(gradient(part, dy, x, first), scratch);
        if (part.bias.trains())
            ops.sum_rows(dy.col_range(part.column, part.outputs), part.bias.sums(first), scratch);
    }
}

int64_t Projection::scratch_bytes(const ops::Ops& ops, int64_t tokens, DType output) const {
    const View x = View::of(nullptr, type_, tokens, inputs_);
    const View y = View::of(nullptr, output, tokens, outputs_);
    const ConstView dy = ConstView::of(nullptr, type_, tokens, outputs_);
    int64_t most = 0;
    for (const Part& part : parts()) {
        most = std::max({most, ops.gemm_scratch_bytes(forward(part, x, y, y)),
                         ops.gemm_scratch_bytes(backward(part, dy, x, x)),
                         ops.gemm_scratch_bytes(gradient(part, dy, x, false))});
        if (!adds_bias_) {  // the rank that does needs the same plan
            Gemm with_bias = forward(part, x, y, y);
            with_bias.bias = part.bias.value;
            most = std::max(most, ops.gemm_scratch_bytes(with_bias));
        }
        if (part.bias.exists())
            most = std::max(most, ops.norm_backward_scratch_bytes(tokens, part.outputs));
    }
    return most;
}

}  // namespace ferry::model
