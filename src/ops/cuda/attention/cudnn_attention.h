// cuDNN's fused attention: for 16-bit types and heads of 64 to 128 elements, multiples of 16, on
// GPUs from sm_80 on. It rounds probabilities and their slopes to the compute type before they meet
// the other factor; ferry's own kernels do not.
#pragma once

#include <cuda_runtime.h>

#include <memory>
#include <optional>
#include <string>

#include "ops/ops.h"

namespace ferry::ops::cuda {

// The operands of attention_backward.
struct BackwardOperands {
    ConstView q, k, v, out, dout;
    const float* lse = nullptr;
    View dq, dk, dv;
};

class CudnnAttention {
public:
    // Null where this build has no cuDNN. Throws internal when it cannot start. most_slope_bytes:
    // make_cuda_ops has it.
    static std::unique_ptr<CudnnAttention> make(cudaStream_t stream, int64_t most_slope_bytes);
    virtual ~CudnnAttention() = default;

    // Workspace of a pass; nothing where cuDNN has no deterministic kernel for the shape, or asks
    // for more than cudnn_graphs.h allows. A function of shape, GPU and library version. The first
    // call for a shape lets cuDNN choose and build its kernels: throws does_not_fit where the GPU
    // has no memory for them, internal where a library is missing.
    virtual std::optional<int64_t> forward_bytes(const Attention& shape) = 0;
    virtual std::optional<int64_t> backward_bytes(const Attention& shape) = 0;
    // Why this shape has no workspace, in words.
    virtual std::string why_not(const Attention& shape, bool backward) = 0;

    // Arguments are those of Ops. False, and nothing done, for shapes that have no workspace, which
    // begins at a multiple of 256 bytes.
    virtual bool forward(const Attention& shape, ConstView q, ConstView k, ConstView v, View out,
                         float* lse, std::byte* workspace) = 0;
    virtual bool backward(const Attention& shape, const BackwardOperands& operands,
                          std::byte* workspace) = 0;
};

// "9.14.0"; empty where this build has none.
std::string cudnn_version();

}  // namespace ferry::ops::cuda
