// Stands in where the build has no CUDA.
#include "ferry/error.h"
#include "ferry/optim.h"

#ifndef FERRY_CUDA

namespace ferry::optim::cuda {
namespace {

[[noreturn]] void refuse() {
    throw Error(Trouble::usage, {.what = "this ferry was built without CUDA",
                                 .remedy = "build it with -DFERRY_CUDA=ON, or use the CPU"});
}

}  // namespace

bool available() { return false; }
void update(const Span&, const Scalars&, void*) { refuse(); }
void update(std::span<const Span>, const Scalars&, void*) { refuse(); }
void recast(const float*, int64_t, DType, void*, void*) { refuse(); }
void leaf_norms(const void*, DType, int64_t, float*, void*) { refuse(); }

}  // namespace ferry::optim::cuda

#endif
