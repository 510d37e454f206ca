// Starting a kernel while the one before still runs.
#pragma once

#include <cuda_runtime.h>

#include "launch.h"

namespace ferry::ops::cuda {

// A kernel's start costs nothing where it happens while the kernel before still runs, if the GPU
// can: blocks let the next kernel's come as soon as there is room, and touch no memory before the
// kernel before them is through.
__device__ inline void let_next_start() {
#if __CUDA_ARCH__ >= 900
    cudaTriggerProgrammaticLaunchCompletion();
#endif
}
__device__ inline void wait_for_last() {
#if __CUDA_ARCH__ >= 900
    cudaGridDependencySynchronize();
#endif
}
// Whether the kernel's code has the wait: on a newer GPU the driver may have made it of older PTX,
// of which the version tells the architecture that it was compiled for.
// tests/unit/early_start_test.py compares both architectures' PTX.
template <class... Parameters>
bool may_start_early(void (*kernel)(Parameters...)) {
    cudaFuncAttributes its{};
    return cudaFuncGetAttributes(&its, kernel) == cudaSuccess && its.ptxVersion >= 90;
}
// Of a kernel that begins with wait_for_last. room: bytes of dynamic shared memory.
template <class... Parameters, class... Arguments>
void start(void (*kernel)(Parameters...), dim3 blocks, dim3 threads, int64_t room,
           cudaStream_t stream, const Arguments&... arguments) {
    cudaLaunchAttribute early{};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = blocks;
    config.blockDim = threads;
    config.dynamicSmemBytes = static_cast<size_t>(room);
    config.stream = stream;
    config.attrs = &early;
    config.numAttrs = may_start_early(kernel) ? 1 : 0;
    cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...);
}

}  // namespace ferry::ops::cuda
