// Which of the GPUs that its launcher shows it a rank takes; needs no GPU.
#include <gtest/gtest.h>

#include "cuda/visible_gpus.h"
#include "ferry/error.h"

namespace ferry {
namespace {

TEST(OnlyGpu, IsTheNumberItselfWhereAllAreSeen) {
    EXPECT_EQ(only_gpu(nullptr, 1), "1");
    EXPECT_EQ(only_gpu(nullptr, 7), "7");  // whether there are so many, the driver says
}

TEST(OnlyGpu, IsOneOfTheListInItsOrder) {
    EXPECT_EQ(only_gpu("3", 0), "3");
    EXPECT_EQ(only_gpu("3,1,2", 0), "3");
    EXPECT_EQ(only_gpu("3,1,2", 2), "2");
    EXPECT_EQ(only_gpu("GPU-4f2a,MIG-9c1e", 1), "MIG-9c1e");
}

TEST(OnlyGpu, IsRefusedWhereTheListIsTooShort) {
    for (const auto& [given, gpu] : {std::pair{"", 0}, {"3", 1}, {"3,1", 2}, {"3,1,", 2}}) {
        try {
            only_gpu(given, gpu);
            ADD_FAILURE() << given;
        } catch (const Error& error) {
            EXPECT_EQ(error.trouble(), Trouble::usage);
            EXPECT_EQ(error.problem().what, "this host has fewer GPUs than ranks");
            EXPECT_EQ(error.problem().where, "CUDA_VISIBLE_DEVICES");
            EXPECT_EQ(error.problem().measured, "\"" + std::string(given) + "\", for rank " +
                                                    std::to_string(gpu) + " of those that see it");
            // A launcher that gives each rank one GPU, as number 0, is told what to do instead.
            EXPECT_NE(error.problem().remedy.find("--gpu-bind=none"), std::string::npos);
        }
    }
}

}  // namespace
}  // namespace ferry
