// The kernels of the GPU's operations. Each enqueues on `stream`; arguments are those of Ops.
#pragma once

#include <cuda_runtime.h>

#include "ops/ops.h"

namespace ferry::ops::cuda {

// Whether the kernels were compiled for the current GPU.
bool runs_here();

// ---------------------------------------------------------------- products

// c = round(sum + bias + addend + (reads_c() ? c : 0)), sum: fp32 [m, n].
void finish_gemm(const Gemm& gemm, const float* sum, cudaStream_t stream);
// The edges of a product whose bias is a part of its depth: a's spare columns, [m, kSpare], become
// 1, 0, ...; b's rows or columns (of nt) behind its own, [kSpare, n] or [n, kSpare], bias, 0, ...
void write_bias_edges(View a_edge, ConstView bias, View b_edge, Form form, cudaStream_t stream);
// Tensor cores want what lies next to each other in memory, of every operand, in multiples of so
// many elements of 16 bits: else cuBLASLt's kernels run at an eighth of their speed. These do the
// few columns (nt) or rows (tn) behind the last multiple, and the last steps of the depth (nn),
// whose c = round(sum + a b + ...) has the sum of those before.
constexpr int64_t kTensorUnit = 8;
void columns_of_gemm(const Gemm& gemm, cudaStream_t stream);
void rows_of_gemm(const Gemm& gemm, cudaStream_t stream);
void finish_depth(const Gemm& gemm, const float* sum, cudaStream_t stream);
// The whole product by ferry's own kernel: for what cuBLASLt does not do.
void plain_gemm(const Gemm& gemm, cudaStream_t stream);

// ---------------------------------------------------------------- norms

constexpr int64_t kNormRows = 16;  // rows that a partial sum of the weight's gradient takes
void norm_forward(ConstView x, ConstView weight, double eps, View y, float* rstd,
                  cudaStream_t stream);
// partial: [ceil(tokens * runs / kNormRows), weight.cols], where the weight trains.
void norm_backward(ConstView dy, ConstView x, ConstView weight, const float* rstd, ConstView addend,
                   View dx, Accumulator weight_gradient, float* partial, cudaStream_t stream);
void layer_norm_forward(ConstView x, ConstView weight, ConstView bias, double eps, View y,
                        float* stats, cudaStream_t stream);
// partial: twice as much where the bias trains.
void layer_norm_backward(ConstView dy, ConstView x, ConstView weight, const float* stats,
                         ConstView addend, View dx, Accumulator weight_gradient,
                         Accumulator bias_gradient, float* partial, cudaStream_t stream);
void sum_rows(ConstView x, Accumulator sums, float* partial, cudaStream_t stream);

// ---------------------------------------------------------------- attention

constexpr int64_t kMaxHeadDim = 128;
void attention_forward(const Attention& shape, ConstView q, ConstView k, ConstView v, View out,
                       float* lse, cudaStream_t stream);
// delta = the sum over a head of out * dout: as many as log-sum-exps, in their order.
void attention_delta(const Attention& shape, ConstView out, ConstView dout, float* delta,
                     cudaStream_t stream);
void attention_backward(const Attention& shape, ConstView q, ConstView k, ConstView v,
                        ConstView out, ConstView dout, const float* lse, View dq, View dk, View dv,
                        float* delta, cudaStream_t stream);

// As PartAttention's.
void merge_parts(int64_t heads, ConstView part, const float* part_lse, View sum, float* sum_lse,
                 cudaStream_t stream);

// Types of 16 bits that the GPU's tensor cores multiply; fp32 runs without them.
bool has_tensor_cores_for(DType type);
void tensor_attention_forward(const Attention& shape, ConstView q, ConstView k, ConstView v,
                              View out, float* lse, cudaStream_t stream);
void tensor_attention_backward(const Attention& shape, ConstView q, ConstView k, ConstView v,
                               ConstView dout, const float* lse, const float* delta, View dq,
                               View dk, View dv, cudaStream_t stream);

// ---------------------------------------------------------------- rows

void rope(View x, const Rope& rope, cudaStream_t stream);
// Of heads of so many elements a norm turns what it has at hand; the two behind it return false,
// and do nothing, where it does not.
int64_t rope_angles_floats(const Rope& rope);
void rope_angles(const Rope& rope, float* angles, cudaStream_t stream);
bool norm_rope_forward(ConstView x, ConstView weight, double eps, View y, float* rstd,
                       const Rope& rope, const float* angles, cudaStream_t stream);
bool norm_rope_backward(View d, ConstView x, ConstView weight, const float* rstd,
                        Accumulator weight_gradient, const Rope& rope, const float* angles,
                        float* partial, cudaStream_t stream);
void swiglu_forward(ConstView gate_up, View y, cudaStream_t stream);
void swiglu_backward(View dy, View gate_up, cudaStream_t stream);
void gelu_forward(ConstView x, View y, cudaStream_t stream);
void gelu_backward(View dy, View x, cudaStream_t stream);
void cast(ConstView from, View to, cudaStream_t stream);
void add(float* a, const float* b, int64_t count, cudaStream_t stream);
void add(ConstView part, View sums, cudaStream_t stream);  // sums += part, of any types
void check_finite(ConstView x, uint32_t* nonfinite, cudaStream_t stream);

void own_rows(const int32_t* tokens, int64_t count, int64_t first, int64_t rows, int32_t* own,
              cudaStream_t stream);
void embed(const int32_t* tokens, ConstView table, ConstView positions,
           const int32_t* document_start, View x, cudaStream_t stream);
int64_t embed_backward_scratch_bytes(int64_t tokens);
void positions_backward(ConstView dx, int64_t sequence, const int32_t* document_start,
                        float* gradient, std::byte* scratch, cudaStream_t stream);
void embed_backward(const int32_t* tokens, ConstView dx, float* gradient, std::byte* scratch,
                    cudaStream_t stream);

// losses: one double a row.
void cross_entropy(ConstView logits, const int32_t* targets, float scale, View dlogits,
                   double* loss_sum, double* losses, cudaStream_t stream);
void loss_parts(ConstView logits, const int32_t* own_targets, double* parts, cudaStream_t stream);
void cross_entropy_of_parts(ConstView logits, const Ops::LossTargets& targets, const double* parts,
                            int ranks, float scale, View dlogits, double* loss_sum, double* losses,
                            cudaStream_t stream);

void round_gradient(const float* accumulator, int64_t count, DType wire_type, void* wire,
                    float* leaves, cudaStream_t stream);
void sum_gradient(ConstView parts, void* wire, float* leaves, cudaStream_t stream);

}  // namespace ferry::ops::cuda
