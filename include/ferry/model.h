// A decoder-only transformer, one layer at a time: what its flat buffers hold, and the forward and
// backward pass of each kind of layer over one micro-batch.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "ferry/base.h"
#include "ferry/ops.h"

namespace ferry::model {

// Llama-style: RMSNorm, RoPE, grouped-query attention, SwiGLU. hidden, intermediate, ... in
// elements.
struct Shape {
    int64_t hidden = 0, layers = 0, heads = 0, kv_heads = 0, head_dim = 0, intermediate = 0;
    int64_t vocab = 0;
    bool tie_embeddings = false;
    double rope_theta = 10000, norm_eps = 1e-5;
};

// What orders or rounds a floating-point operation (numerics.md). Nothing else may.
struct Numerics {
    int64_t sequence = 0;        // tokens a sequence
    int64_t micro_batch = 0;     // sequences a kernel
    int64_t head_tile = 1024;    // tokens a tile of the fused head and loss
    int64_t mlp_tile = 0;        // tokens a tile of the MLP; 0: whole micro-batch
    DType compute = DType::f32;  // weights and GEMM inputs
    DType residual = DType::f32;
    DType wire = DType::f32;  // gradients, rounded once
    int64_t tokens() const { return sequence * micro_batch; }
};

struct Tensor {
    std::string name{};  // Hugging Face's: model.layers.0.self_attn.q_proj.weight
    std::vector<int64_t> shape{};
    int64_t offset = 0, count = 0;  // elements in the layer's flat buffer
    bool decays = true, trainable = true;
};

// A run of the flat buffer; offset and count are multiples of 4,096, the padding holds zeros.
struct Segment {
    int64_t offset = 0, count = 0;
    bool decays = true, trainable = true;
};

enum class LayerKind : uint8_t { embedding, block, head };

// One flat buffer, ordered [trainable, decayed | trainable, not decayed | frozen].
struct Layer {
    LayerKind kind = LayerKind::block;
    int64_t index = 0;  // of the block
    std::vector<Tensor> tensors{};
    std::vector<Segment> segments{};
    int64_t elements = 0;            // of the buffer, padded
    int64_t trainable_elements = 0;  // its prefix that has gradients and optimizer state
    const Tensor& tensor(std::string_view suffix) const;  // by the end of its name
};

// Embedding, blocks, head. With tied embeddings the head's layer holds the final norm alone and the
// head multiplies by the embedding's table. `freeze` are glob patterns ('*' and '?') over tensor
// names; a pattern that matches nothing throws Trouble::usage. Norm weights do not decay unless
// `decay_norms`.
std::vector<Layer> layers_of(const Shape& shape, std::span<const std::string> freeze,
                             bool decay_norms);

// Every method is called inside a job of the compute stream; pointers are device memory, laid out
// as Layer says, in the compute type; activations are [tokens, hidden] in the residual type.
// `scratch` has scratch_bytes(). Nothing allocates.
class Decoder {
public:
    Decoder(Shape shape, Numerics numerics, std::vector<Layer> layers, ops::Ops& ops);
    const Shape& shape() const noexcept { return shape_; }
    const Numerics& numerics() const noexcept { return numerics_; }
    const std::vector<Layer>& layers() const noexcept { return layers_; }
    int64_t activation_bytes() const;  // of one block input of one micro-batch
    int64_t scratch_bytes() const;     // the largest of any call below

    // tokens: [micro_batch, sequence] int32, each in [0, vocab).
    void embed(const int32_t* tokens, const void* table, void* x) const;
    // *nonfinite |= 1 when an element of x_out is NaN or Inf.
    void forward(int64_t block, const void* weights, const void* x_in, void* x_out,
                 uint32_t* nonfinite, std::byte* scratch) const;
    // Recomputes the block from x_in. dx holds d(x_out) and receives d(x_in), unless !needs_dx.
    // Adds to `gradient` (fp32, the layer's trainable prefix).
    void backward(int64_t block, const void* weights, const void* x_in, void* dx, bool needs_dx,
                  float* gradient, std::byte* scratch) const;
    // Final norm, logits, cross-entropy, fused over tiles of numerics().head_tile tokens. targets:
    // int32, -1 where not real. `table` and `table_gradient` are the embedding's when tied, else
    // null. Each target's gradient carries `scale` (1 / the step's real targets). dx receives
    // d(x). gradient pointers may be null where nothing in them trains. dx may be null. Adds the
    // losses (natural logarithm) over real targets to *loss_sum.
    void head(const void* weights, const void* table, const void* x, const int32_t* targets,
              float scale, void* dx, float* gradient, float* table_gradient, double* loss_sum,
              std::byte* scratch) const;
    void head_loss(const void* weights, const void* table, const void* x, const int32_t* targets,
                   double* loss_sum, std::byte* scratch) const;
    // Adds each token's row of dx to gradient [vocab, hidden], in token order.
    void embed_backward(const int32_t* tokens, const void* dx, float* gradient) const;

private:
    Shape shape_;
    Numerics numerics_;
    std::vector<Layer> layers_;
    ops::Ops& ops_;
};

// fp32 master weights of elements [first, first + out.size()) of a layer's flat buffer: normal with
// standard deviation 0.02 (residual projections 0.02 / sqrt(2 layers)), norms one, padding zero.
// A function of (seed, tensor, element) only.
void initialise(const Shape& shape, const Layer& layer, int64_t layer_index, uint32_t seed,
                int64_t first, std::span<float> out);

}  // namespace ferry::model
