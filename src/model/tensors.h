// A layer's tensors where they lie in memory, and what is made of several of them.
#pragma once

#include <array>
#include <initializer_list>

#include "carver.h"
#include "model/model.h"

namespace ferry::model {

// A weight or bias and where its gradient goes; no data where the layer has no such tensor, or
// where nothing lies in memory yet.
struct Parameter {
    ops::ConstView value{};     // a bias or norm weight is [1, n]
    float* gradient = nullptr;  // fp32, like the value; null: it does not train
    bool fresh = false;         // nothing was added to it when the pass began
    bool exists() const { return value.cols > 0; }
    bool trains() const { return gradient != nullptr; }
    // For an operation to add to. `first`: of the pass's, and it adds to every element.
    ops::Accumulator sums(bool first) const { return {gradient, fresh && first}; }
};

class LayerMemory {
public:
    // `weights` and `gradient` may be null: then only shapes are known, or nothing trains.
    LayerMemory(const Layer& layer, DType type, const void* weights, ops::Accumulator gradient)
        : layer_(layer),
          type_(type),
          weights_(static_cast<const std::byte*>(weights)),
          gradient_(gradient) {}

    Parameter operator()(Role role) const;
    const Layer& layer() const { return layer_; }
    // Of a fresh gradient: zeros what a pass does not write itself. `written(tensor)`: how many
    // elements of a tensor that trains it does, from the first on. Padding it never writes.
    template <class Written>
    void zero_others(ops::Ops& ops, const Written& written) const {
        if (!gradient_.asked() || !gradient_.fresh) return;
        int64_t at = 0;
        const auto zero_to = [&](int64_t end) {
            FERRY_CHECK(end >= at, "tensors stand in the order of their offsets");
            if (end > at) ops.fill_zero(gradient_.at + at, (end - at) * size_of(DType::f32));
        };
        for (const Tensor& tensor : layer_.tensors) {
            const int64_t count = tensor.trainable ? written(tensor) : 0;
            if (count == 0) continue;
            zero_to(tensor.offset);
            at = tensor.offset + count;
        }
        zero_to(layer_.trainable_elements);
    }

private:
    const Layer& layer_;
    DType type_;
    const std::byte* weights_;
    ops::Accumulator gradient_;
};

// RMSNorm of each run of the weight's length, or LayerNorm where there is a bias.
struct Norm {
    Parameter weight{}, bias{};
    double eps = 0;
    bool trains() const { return weight.trains() || bias.trains(); }

    // rows: tokens times runs.
    int64_t stats_floats(int64_t rows) const { return bias.exists() ? 2 * rows : rows; }
    int64_t scratch_bytes(int64_t rows, const ops::Ops& ops) const {
        return bias.exists() ? ops.layer_norm_backward_scratch_bytes(rows, weight.value.cols)
                             : ops.norm_backward_scratch_bytes(rows, weight.value.cols);
    }
    void forward(ops::Ops& ops, ops::ConstView x, ops::View y, float* stats) const;
    // As Ops::norm_backward. `first`: of the pass's that add to the gradients.
    void backward(ops::Ops& ops, ops::ConstView dy, ops::ConstView x, const float* stats,
                  ops::ConstView addend, ops::View dx, bool first, std::byte* scratch) const;
};

// Matrices that multiply the same input, one above the other; adjacent ones that train alike count
// as one, so that one GEMM does them.
class Projection {
public:
    // Takes the roles that the layer has. Each weight's bias, if any, is the role at the same place
    // in `biases`; another rank adds it, unless `adds_bias`.
    Projection(const LayerMemory& memory, bool input_major, std::initializer_list<Role> weights,
               std::initializer_list<Role> biases, bool adds_bias = true);
    bool trains() const;
    int64_t outputs() const { return outputs_; }

    // The [tokens, inputs] that `apply` multiplies. Of 16 bits and with a bias: room for it.
    ops::View input(Carver& carver, int64_t tokens) const;
    // y = x W^T + b + addend, part by part. x: rows of `input`, y: [tokens, outputs].
    void apply(ops::Ops& ops, ops::ConstView x, ops::View y, ops::ConstView addend,
               std::byte* scratch) const;
    // dx = dy W; the parts' contributions are added in order.
    void apply_transposed(ops::Ops& ops, ops::ConstView dy, ops::View dx, std::byte* scratch) const;
    // gradients += dy^T x and the sums of dy, of the parts that train. `first`: of the pass's.
    void add_gradient(ops::Ops& ops, ops::ConstView dy, ops::ConstView x, bool first,
                      std::byte* scratch) const;
    // Scratch that is enough for each of the three, on so many tokens. `output`: y's type.
    int64_t scratch_bytes(const ops::Ops& ops, int64_t tokens, DType output) const;

private:
    struct Part {
        Parameter weight{}, bias{};
        int64_t column = 0, outputs = 0;  // columns of the output that it makes
    };
    ops::Gemm forward(const Part& part, ops::ConstView x, ops::View y, ops::ConstView addend) const;
    ops::Gemm backward(const Part& part, ops::ConstView dy, ops::View dx,
                       ops::ConstView addend) const;
    ops::Gemm gradient(const Part& part, ops::ConstView dy, ops::ConstView x, bool first) const;
    std::span<const Part> parts() const { return {parts_.data(), static_cast<size_t>(count_)}; }
    std::array<Part, 3> parts_{};
    int count_ = 0;
    int64_t inputs_ = 0, outputs_ = 0, spare_ = 0;
    DType type_ = DType::f32;
    bool input_major_, adds_bias_;
};

}  // namespace ferry::model
