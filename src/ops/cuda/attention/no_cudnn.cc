// Stands in where the build has no cuDNN.
#include "cudnn_attention.h"

#ifndef FERRY_CUDNN

namespace ferry::ops::cuda {

std::unique_ptr<CudnnAttention> CudnnAttention::make(cudaStream_t, int64_t) { return nullptr; }
std::string cudnn_version() { return {}; }

}  // namespace ferry::ops::cuda

#endif
