// One decoder block over one micro-batch:
//   n1 = norm(x_in); q, k, v = n1 W; rope(q, k); x_mid = x_in + attention(q, k, v) Wo
//   n2 = norm(x_mid); gate, up = n2 W; x_out = x_mid + (silu(gate) * up) Wd
// T tokens, H hidden, Q = heads * head_dim, K = kv_heads * head_dim, I intermediate, M tokens of a
// tile of the MLP.
#pragma once

#include <array>

#include "carver.h"
#include "ferry/model.h"

namespace ferry::model {

// Matrices that multiply the same input, one above the other; adjacent ones that train alike count
// as one, so that one GEMM does them.
struct Projection {
    struct Part {
        ops::ConstView weight{};    // [rows, input]
        float* gradient = nullptr;  // fp32, like weight; null: frozen
        int64_t column = 0;         // of the output
    };
    std::array<Part, 3> parts{};
    int count = 0;
    bool trains() const {
        return parts[0].gradient != nullptr || (count > 1 && parts[1].gradient != nullptr) ||
               (count > 2 && parts[2].gradient != nullptr);
    }
};

class Block {
public:
    Block(const Shape& shape, const Numerics& numerics, const Layer& layer, ops::Ops& ops,
          const void* weights, float* gradient, std::byte* scratch);

    void forward(ops::ConstView x_in, ops::View x_out);
    void backward(ops::ConstView x_in, ops::View dx, bool needs_dx);
    static int64_t scratch_bytes(const Shape& shape, const Numerics& numerics, const Layer& layer,
                                 ops::Ops& ops);

private:
    struct Norm {
        ops::ConstView weight{};  // [1, H]
        float* gradient = nullptr;
    };
    // Buffers of a pass; the two groups below share memory, for they are never alive together.
    struct Buffers {
        ops::View n1{}, qkv{}, attended{}, x_mid{};  // [T, H], [T, Q + 2 K], [T, Q], [T, H]
        ops::View dy{}, dn{};                        // [T, H] both, in the compute type
        float *rstd1 = nullptr, *lse = nullptr;      // [T], [heads * T]
        // The MLP's: [M, H], [M, 2 I], [M, I], [M, I], [M].
        ops::View n2{}, gate_up{}, active{}, dactive{};
        float* rstd2 = nullptr;
        // The attention's backward pass: [T, Q], [T, Q + 2 K].
        ops::View dattended{}, dqkv{};
        std::byte* ops = nullptr;
    };

    Projection projection(std::initializer_list<std::string_view> suffixes) const;
    Norm norm(std::string_view suffix) const;
    Buffers cut(Carver& carver) const;
    int64_t op_scratch_bytes() const;
    int64_t mlp_tile() const;

    void apply(const Projection& p, ops::ConstView x, ops::View y, ops::ConstView addend = {});
    void apply_transposed(const Projection& p, ops::ConstView dy, ops::View dx);
    void add_gradient(const Projection& p, ops::ConstView dy, ops::ConstView x);
    void attend(ops::ConstView x_in, ops::View x_mid);
    void mlp(ops::ConstView x_mid);
    void mlp_backward(ops::ConstView x_mid, ops::View dx, bool needs_mid);
    void attention_backward(ops::ConstView x_in, ops::View dx, bool needs_dx, bool into_qkv);
    ops::ConstView in_compute_type(ops::ConstView x, ops::View room);
    ops::Attention attention() const;
    void rope(ops::View qkv, bool inverse);

    const Shape& shape_;
    const Numerics& numerics_;
    const Layer& layer_;
    ops::Ops& ops_;
    const std::byte* weights_;
    float* gradient_;
    int64_t query_, key_;  // columns: Q, K
    Norm norm1_, norm2_;
    Projection qkv_, output_, gate_up_, down_;
    Buffers b_;
};

}  // namespace ferry::model
