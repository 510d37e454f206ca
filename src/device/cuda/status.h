// Results of CUDA runtime calls as errors.
#pragma once

#include <cuda_runtime.h>

#include <string>

namespace ferry {

// "cudaErrorIllegalAddress, an illegal memory access was encountered"
std::string text_of(cudaError_t status);
// Whether it is the failure of work that had been enqueued, which every later call returns too.
bool is_of_earlier_work(cudaError_t status);
// Throws Trouble::internal naming the call, or does_not_fit where it found no memory, unless it
// succeeded.
void demand(cudaError_t status, const char* call);

}  // namespace ferry
