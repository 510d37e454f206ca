// Stands in where the build has no CUDA.
#include "ops/matrix_kernels.h"
#include "ops/ops.h"
#include "ops/slow_paths.h"
#include "ops/stopwatch.h"

#ifndef FERRY_CUDA

namespace ferry::ops {

// Nobody can hold a CUDA device in this build.
std::unique_ptr<Ops> make_cuda_ops(Device&, AttentionKernels, int64_t, bool, const ProductTable*) {
    bug("built without CUDA");
}
std::unique_ptr<MatrixKernels> make_cuda_matrix_kernels(Device&, bool) {
    bug("built without CUDA");
}
std::unique_ptr<Stopwatch> make_cuda_stopwatch(Device&) { bug("built without CUDA"); }
std::string cuda_library_versions(AttentionKernels) { return "no cuBLASLt"; }
std::vector<SlowPath> slow_paths(const Ops&) { return {}; }

}  // namespace ferry::ops

#endif
