// Results of CUDA runtime calls as errors.
#pragma once

#include <cuda_runtime.h>

#include <string>

#include "ferry/base.h"

namespace ferry {

// "cudaErrorIllegalAddress, an illegal memory access was encountered"
std::string text_of(cudaError_t status);
// Throws Trouble::internal naming the call, unless it succeeded.
void demand(cudaError_t status, const char* call);

}  // namespace ferry
