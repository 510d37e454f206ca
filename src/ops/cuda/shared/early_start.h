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
// of which the version tells the architecture that it was compiled for. Asked once for each kernel
// and GPU; from any thread.
// tests/tree/early_start_test.py compares both architectures' PTX.
bool may_start_early(const void* kernel);
// Of a kernel that begins with wait_for_last. room: bytes of dynamic shared memory.
// A launch that fails is the thread's last error: the caller's check_launch() throws it by name.
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
    config.numAttrs = may_start_early(reinterpret_cast<const void*>(kernel)) ? 1 : 0;
    cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...);
}

}  // namespace ferry::ops::cuda
