#include "trace/trace.h"

#ifdef FERRY_CUDA
#include <nvtx3/nvToolsExt.h>
#endif

namespace ferry::trace {

#ifdef FERRY_CUDA
Range::Range(const char* name) noexcept { nvtxRangePushA(name); }
Range::~Range() { nvtxRangePop(); }
#else
Range::Range(const char*) noexcept {}
Range::~Range() = default;
#endif

}  // namespace ferry::trace
