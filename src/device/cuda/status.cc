#include "status.h"

namespace ferry {

std::string text_of(cudaError_t status) {
    return std::string(cudaGetErrorName(status)) + ", " + cudaGetErrorString(status);
}

void demand(cudaError_t status, const char* call) {
    if (status == cudaSuccess) return;
    throw Error(Trouble::internal,
                {.what = "the GPU or its driver refused a call",
                 .where = call,
                 .measured = text_of(status),
                 .remedy = "see the driver's messages (dmesg: Xid); another process may have taken "
                           "the GPU's memory"});
}

}  // namespace ferry
