// What a build without Triton offers in its place.
#include "sparse_attention.h"

#ifndef FERRY_TRITON

namespace ferry::ops::cuda {

SparseAttention::SparseAttention(cudaStream_t stream, bool) : stream_(stream) {}
std::string SparseAttention::why_not(const Attention&) const {
    return "this build has no Triton (FERRY_TRITON)";
}
bool SparseAttention::is_faster_backward(const Attention&) const { return false; }
std::string triton_version() { return {}; }
int64_t SparseAttention::forward_bytes(const Attention&) { bug("built without Triton"); }
int64_t SparseAttention::backward_bytes(const Attention&) { bug("built without Triton"); }
void SparseAttention::forward(const Attention&, ConstView, ConstView, ConstView, View, float*,
                              std::byte*) {
    bug("built without Triton");
}
void SparseAttention::backward(const Attention&, const BackwardOperands&, std::byte*) {
    bug("built without Triton");
}
int64_t SparseAttention::part_bytes(const Attention&, int64_t, int64_t) {
    bug("built without Triton");
}
void SparseAttention::part_forward(const Attention&, const SequencePart&, const SequencePart&,
                                   ConstView, ConstView, ConstView, View, float*, std::byte*) {
    bug("built without Triton");
}
void SparseAttention::part_backward(const Attention&, const SequencePart&, const SequencePart&,
                                    const BackwardOperands&, std::byte*) {
    bug("built without Triton");
}

}  // namespace ferry::ops::cuda

#endif
