// Stands in where the build has no CUDA.
#include "cuda/cuda_device.h"

#ifndef FERRY_CUDA

namespace ferry {

std::unique_ptr<Device> open_cuda_device(Executor&, int) {
    throw Error(Trouble::usage,
                {.what = "this ferry was built without CUDA",
                 .where = "device cuda",
                 .remedy = "build it where nvcc is found (-DFERRY_CUDA=ON), or choose device cpu"});
}

}  // namespace ferry

#endif
