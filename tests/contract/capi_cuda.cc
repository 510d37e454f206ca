// The C ABI's calls on a CUDA stream, and memory that is locked for a GPU.
#ifdef FERRY_CUDA
#include <cuda_runtime.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "ferry/optim.h"
#include "tests/support/c_abi.h"
#include "tests/support/temporary_directory.h"

namespace ferry {
namespace {

constexpr int64_t kCount = 10'000;

class CapiCuda : public testing::Test {
protected:
    void SetUp() override {
        if (!optim::cuda::available()) GTEST_SKIP() << "no CUDA device";
        ASSERT_EQ(cudaStreamCreate(&stream_), cudaSuccess);
    }
    ~CapiCuda() override {
        for (float* memory : memory_) cudaFree(memory);
        if (stream_) cudaStreamDestroy(stream_);
    }

    float* on_device(const std::vector<float>& values) {
        float* memory = nullptr;
        EXPECT_EQ(cudaMalloc(&memory, values.size() * 4), cudaSuccess);
        EXPECT_EQ(cudaMemcpy(memory, values.data(), values.size() * 4, cudaMemcpyDefault),
                  cudaSuccess);
        memory_.push_back(memory);
        return memory;
    }
    std::vector<float> back(const float* memory, size_t count) {
        std::vector<float> values(count);
        EXPECT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
        EXPECT_EQ(cudaMemcpy(values.data(), memory, count * 4, cudaMemcpyDefault), cudaSuccess);
        return values;
    }

    cudaStream_t stream_ = nullptr;
    std::vector<float*> memory_{};
};

TEST_F(CapiCuda, GivesTheBitsOfTheCpu) {
    std::vector<float> gradient(kCount), p(kCount), m(kCount), v(kCount), leaves(3),
        rounded(kCount);
    for (size_t i = 0; i < gradient.size(); ++i) {
        gradient[i] = std::sin(static_cast<float>(i));
        p[i] = std::cos(static_cast<float>(i));
    }
    auto hyper = sized<ferry_hyper>();
    auto update = sized<ferry_update>();
    ASSERT_DONE(ferry_hyper_default(FERRY_ADAMW, &hyper));
    update.count = kCount;
    update.gradient = on_device(gradient);
    update.p = on_device(p), update.m = on_device(m), update.v = on_device(v);
    float* const device_leaves = on_device(leaves);
    float* const device_rounded = on_device(rounded);
    ASSERT_DONE(
        ferry_optim_leaf_norms_cuda(update.gradient, FERRY_F32, kCount, device_leaves, stream_));
    ASSERT_DONE(ferry_optim_update_cuda(&hyper, 1, 0.5, &update, stream_));
    ASSERT_DONE(ferry_optim_recast_cuda(update.p, kCount, FERRY_F32, device_rounded, stream_));
    const auto device_p = back(update.p, kCount);
    const auto found_leaves = back(device_leaves, leaves.size());
    const auto found_rounded = back(device_rounded, rounded.size());
    update.gradient = gradient.data();
    update.p = p.data(), update.m = m.data(), update.v = v.data();
    ASSERT_DONE(ferry_optim_leaf_norms(nullptr, gradient.data(), FERRY_F32, kCount, leaves.data()));
    ASSERT_DONE(ferry_optim_update(nullptr, &hyper, 1, 0.5, &update));
    EXPECT_EQ(memcmp(device_p.data(), p.data(), kCount * 4), 0);
    EXPECT_EQ(found_leaves, leaves);
    EXPECT_EQ(found_rounded, p);
}

TEST_F(CapiCuda, LocksPoolsAndStores) {
    const auto locked = [](const void* memory) {
        cudaPointerAttributes attributes{};
        return cudaPointerGetAttributes(&attributes, memory) == cudaSuccess &&
               attributes.type == cudaMemoryTypeHost;
    };
    auto pool_options = sized<ferry_pool_options>();
    pool_options.budget_bytes = 4 << 20;
    pool_options.lock_for = FERRY_DEVICE_CUDA;
    ferry_pool* pool = nullptr;
    void* memory = nullptr;
    ASSERT_DONE(ferry_pool_create(&pool_options, &pool));
    ASSERT_DONE(ferry_pool_reserve(pool, "buffers", 4 << 20, &memory));
    EXPECT_TRUE(locked(memory));
    ASSERT_DONE(ferry_pool_destroy(pool));

    const TemporaryDirectory directory;
    ferry_path path = path_at(directory.path());
    auto options = sized<ferry_store_options>();
    options.paths = &path, options.path_count = 1;
    options.host_bytes = 4 << 20;
    options.lock_for = FERRY_DEVICE_CUDA;
    ferry_store* store = nullptr;
    uint32_t object = 0;
    uint64_t lease = 0;
    ASSERT_DONE(ferry_store_create(&options, &store));
    ASSERT_DONE(ferry_store_register(store, 1 << 20, FERRY_NVME, &object));
    ASSERT_DONE(ferry_store_open(store));
    ASSERT_DONE(ferry_store_acquire(store, object, FERRY_OVERWRITE, &lease, &memory));
    EXPECT_TRUE(locked(memory));
    ASSERT_DONE(ferry_store_release(store, lease));
    ASSERT_DONE(ferry_store_destroy(store));
}

}  // namespace
}  // namespace ferry
#endif
