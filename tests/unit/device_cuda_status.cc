// The errors that results of CUDA's calls become; needs no GPU.
#ifdef FERRY_CUDA
#include <gtest/gtest.h>

#include "cuda/status.h"
#include "ferry/device.h"

namespace ferry {
namespace {

Error error_of(cudaError_t status) {
    try {
        demand(status, "cudaSomething");
    } catch (const Error& error) {
        return error;
    }
    return Error(Trouble::usage, {.what = "nothing was thrown"});
}

TEST(CudaStatus, SuccessIsSilent) { EXPECT_NO_THROW(demand(cudaSuccess, "cudaSomething")); }

TEST(CudaStatus, ARefusedCallIsNamedWithItsReason) {
    const Error error = error_of(cudaErrorInvalidValue);
    EXPECT_EQ(error.trouble(), Trouble::internal);
    EXPECT_EQ(error.problem().where, "cudaSomething");
    EXPECT_NE(error.problem().measured.find("cudaErrorInvalidValue"), std::string::npos);
}

TEST(CudaStatus, MissingMemoryIsAnotherProcesssDoing) {
    const Error error = error_of(cudaErrorMemoryAllocation);
    EXPECT_EQ(error.trouble(), Trouble::does_not_fit);
    EXPECT_EQ(error.problem().where, "cudaSomething");
    EXPECT_NE(error.problem().remedy.find("another process"), std::string::npos);
}

TEST(CudaStatus, FailuresOfEarlierWorkAreNotTheCallsOwn) {
    EXPECT_TRUE(is_of_earlier_work(cudaErrorIllegalAddress));
    EXPECT_TRUE(is_of_earlier_work(cudaErrorLaunchFailure));
    EXPECT_FALSE(is_of_earlier_work(cudaErrorInvalidValue));
    EXPECT_FALSE(is_of_earlier_work(cudaErrorMemoryAllocation));
    EXPECT_FALSE(is_of_earlier_work(cudaErrorNotReady));
}

}  // namespace
}  // namespace ferry
#endif
