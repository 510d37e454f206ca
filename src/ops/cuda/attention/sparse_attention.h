// Attention over lists of blocks, documents and wide heads, by the kernels of sparse_attention.py:
// 16-bit types and heads of at most 256 elements, multiples of 8, on GPUs from sm_80 on. They round
// probabilities and their slopes to the compute type before they meet the other factor, as cuDNN
// does. No atomics: the keys' gradients are summed over the transposed lists, the queries' in a
// pass of its own. Beside their operands they need memory that grows with the sequence.
#pragma once

#include <cuda_runtime.h>

#include <map>
#include <memory>
#include <string>

#include "cudnn_attention.h"
#include "ops/part_attention.h"
#include "sparse_images.h"

namespace ferry::ops::cuda {

struct SpanRoom;

class SparseAttention {
public:
    // any_gpu: the code for every GPU, whatever this one is.
    SparseAttention(cudaStream_t stream, bool any_gpu);

    static constexpr int64_t kMaxHeadDim = 256;
    // Why not this shape; empty where it does it. A function of shape, GPU and build.
    std::string why_not(const Attention& shape) const;
    // Whether the backward pass of a dense shape goes this way although cuDNN has a deterministic
    // kernel for it: where this one was the faster of the two. By type, length and width of heads
    // alone.
    bool is_faster_backward(const Attention& shape) const;

    // Scratch of a pass; loads its kernels. Throws does_not_fit where the GPU has no memory for
    // them.
    int64_t forward_bytes(const Attention& shape);
    int64_t backward_bytes(const Attention& shape);
    // Arguments are those of Ops. Operands begin at multiples of 16 bytes, and so do their rows and
    // their heads.
    void forward(const Attention& shape, ConstView q, ConstView k, ConstView v, View out,
                 float* lse, std::byte* scratch);
    void backward(const Attention& shape, const BackwardOperands& operands, std::byte* scratch);

    // The same of some queries and keys of one sequence, as PartAttention has them.
    int64_t part_bytes(const Attention& shape, int64_t queries, int64_t keys);
    void part_forward(const Attention& shape, const SequencePart& queries, const SequencePart& keys,
                      ConstView q, ConstView k, ConstView v, View out, float* lse,
                      std::byte* scratch);
    void part_backward(const Attention& shape, const SequencePart& queries,
                       const SequencePart& keys, const BackwardOperands& operands,
                       std::byte* scratch);

private:
    struct Loaded {
        const SparseImage* image;
        const void* kernel;
    };
    class Parameters;
    const SparseImage* image_for(SparseKernel kernel, const Attention& shape, bool part) const;
    const Loaded& loaded(SparseKernel kernel, const Attention& shape, bool part);
    void forward_of(const Attention& shape, const SpanRoom& room, bool part, ConstView q,
                    ConstView k, ConstView v, View out, float* lse);
    void backward_of(const Attention& shape, const SpanRoom& room, bool part,
                     const BackwardOperands& operands, float* delta);
    void keys_of(const Attention& shape, const SpanRoom& room, bool part,
                 const BackwardOperands& operands, const float* delta);
    void queries_of(const Attention& shape, const SpanRoom& room, bool part,
                    const BackwardOperands& operands, const float* delta);
    void start(const Loaded& to, Parameters& p, const Attention& shape, const SpanRoom& room,
               int64_t blocks, int64_t heads, int64_t section);

    cudaStream_t stream_;
    int architecture_ = 0;  // that of the images that run here; 0: none do
    std::map<const SparseImage*, Loaded> loaded_{};
};

// "3.6.0"; empty where this build has none.
std::string triton_version();

}  // namespace ferry::ops::cuda
