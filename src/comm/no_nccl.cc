// Stands in where the build has no NCCL.
#ifndef FERRY_NCCL

#include "comm/comm.h"

namespace ferry::comm {
namespace {

Error no_nccl() {
    return {Trouble::usage,
            {.what = "this ferry was built without NCCL and cannot train on several GPUs",
             .where = "device",
             .remedy = "build it where CUDA and NCCL are found (-DFERRY_NCCL=ON), set device to "
                       "cpu, or start it alone"}};
}

}  // namespace

std::unique_ptr<Communicator> make_nccl(Device&, Executor&, std::unique_ptr<Communicator>,
                                        const CommOptions&) {
    throw no_nccl();
}

std::unique_ptr<Communicator> make_nccl(Device&, Executor&, const NcclRanks&, const CommOptions&) {
    throw no_nccl();
}

}  // namespace ferry::comm

#endif
