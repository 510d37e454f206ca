// What is said of too few queues of a GPU; needs none.
#include <gtest/gtest.h>

#include "cuda/gpu_queues.h"

namespace ferry {
namespace {

TEST(GpuQueues, AreAskedForWhereNobodyHas) { EXPECT_EQ(warning_of_queues(nullptr), ""); }

TEST(GpuQueues, AreEnough) {
    EXPECT_EQ(warning_of_queues("32"), "");
    EXPECT_EQ(warning_of_queues("64"), "");
}

TEST(GpuQueues, AreTooFewForTheStreams) {
    for (const char* given : {"1", "8", "31", "0"}) {
        const std::string said = warning_of_queues(given);
        for (const std::string& part :
             {"CUDA_DEVICE_MAX_CONNECTIONS is \"" + std::string(given) + "\"",
              std::string("fewer queues"), std::string("32 are wanted"),
              std::string("unset it, or set it to 32")})
            EXPECT_NE(said.find(part), std::string::npos) << said;
    }
}

TEST(GpuQueues, AreNoNumber) {
    for (const char* given : {"", "many", "8x", " 32"})
        EXPECT_NE(warning_of_queues(given).find("no number of queues"), std::string::npos) << given;
}

}  // namespace
}  // namespace ferry
