#include "status.h"

#include <algorithm>
#include <array>

#include "ferry/device.h"
#include "ferry/units.h"

namespace ferry {

std::string text_of(cudaError_t status) {
    return std::string(cudaGetErrorName(status)) + ", " + cudaGetErrorString(status);
}

void demand(cudaError_t status, const char* call) {
    if (status == cudaSuccess) return;
    if (status == cudaErrorMemoryAllocation) throw out_of_gpu_memory(call);
    throw Error(Trouble::internal, {.what = "the GPU or its driver refused a call",
                                    .where = call,
                                    .measured = text_of(status),
                                    .remedy = "see the driver's messages (dmesg: Xid)"});
}

// Those that CUDA's documentation calls the end of the process's use of the GPU.
bool is_of_earlier_work(cudaError_t status) {
    constexpr std::array kFinal{
        cudaErrorIllegalAddress,      cudaErrorLaunchTimeout,      cudaErrorAssert,
        cudaErrorHardwareStackError,  cudaErrorIllegalInstruction, cudaErrorMisalignedAddress,
        cudaErrorInvalidAddressSpace, cudaErrorInvalidPc,          cudaErrorLaunchFailure,
        cudaErrorECCUncorrectable};
    return std::ranges::find(kFinal, status) != kFinal.end();
}

bool gpu_work_failed() { return is_of_earlier_work(cudaStreamQuery(nullptr)); }

Error out_of_gpu_memory(const std::string& where) {
    size_t free = 0, total = 0;
    const bool known = cudaMemGetInfo(&free, &total) == cudaSuccess;
    const auto text = [](size_t bytes) { return format_bytes(static_cast<int64_t>(bytes)); };
    return Error(Trouble::does_not_fit,
                 {.what = "the GPU has no memory left for a call",
                  .where = where,
                  .measured = known ? text(free) + " free" : text_of(cudaErrorMemoryAllocation),
                  .limit = known ? text(total) + " in all" : "",
                  .remedy = "another process has taken it, as a run reserves its own before its "
                            "first step: stop that process (nvidia-smi lists it), or lower "
                            "budgets.device"});
}

}  // namespace ferry
