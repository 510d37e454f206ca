// A GPU: its context, one arena, three streams. Host code only; kernels live in ops and optim.
#include "cuda_device.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <utility>

#include "base/log.h"
#include "cuda_stream.h"
#include "ferry/units.h"
#include "free_before.h"
#include "gpu_queues.h"
#include "status.h"
#include "visible_gpus.h"

namespace ferry {
namespace {

constexpr int kGpu = 0;  // CUDA_VISIBLE_DEVICES chooses

std::string version_text(int version) {
    return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

// Leaves the process one GPU of those that it would see, before the driver looks: so every thread,
// and every library's thread, uses that one and takes no context on another. That holds for the
// process's life.
void see_only(int gpu) {
    constexpr const char* kVisible = "CUDA_VISIBLE_DEVICES";
    static int seen = -1;
    if (seen == gpu) return;
    FERRY_CHECK(seen < 0, "a process uses one GPU");
    setenv(kVisible, only_gpu(std::getenv(kVisible), gpu).c_str(), 1);
    seen = gpu;
    // The driver looks once, when a process first uses CUDA.
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess || count <= 1) return;
    throw Error(Trouble::usage,
                {.what = "this process used CUDA before ferry opened its GPU",
                 .where = "rank " + std::to_string(gpu) + " of this host, from 0",
                 .measured = "it sees " + std::to_string(count) + " GPUs",
                 .limit = "1, its own",
                 .remedy = "start ferry first, or start each rank with CUDA_VISIBLE_DEVICES set to "
                           "its GPU"});
}

// A queue of the GPU for each stream, before the driver looks: by default it has eight, and streams
// that share one wait for each other. A receive that waits for another rank would hold up kernels
// that this rank's answer needs. A value that is set stays, and is warned of once where it is less.
void ask_for_queues() {
    static const bool kAsked = [] {
        const std::string warning = warning_of_queues(std::getenv(kQueuesVariable));
        if (!warning.empty()) log_warn(warning);
        setenv(kQueuesVariable, std::to_string(kQueues).c_str(), 0);
        return true;
    }();
    static_cast<void>(kAsked);
}

// Before anything else: whether there is a GPU that this build can drive.
void demand_gpu(int gpu) {
    int count = 0;
    const cudaError_t status = cudaGetDeviceCount(&count);
    if (status == cudaSuccess && count > 0) return;
    int driver = 0, runtime = 0;
    cudaDriverGetVersion(&driver);
    cudaRuntimeGetVersion(&runtime);
    cudaGetLastError();
    if (status == cudaErrorInsufficientDriver && driver > 0) {
        throw Error(Trouble::usage,
                    {.what = "the NVIDIA driver is too old for this ferry",
                     .where = "device cuda",
                     .measured = "the driver knows CUDA " + version_text(driver),
                     .limit = "built with CUDA " + version_text(runtime),
                     .remedy = "update the driver, build ferry with an older CUDA toolkit, or "
                               "choose device cpu"});
    }
    if (driver > 0 && gpu > 0) {
        throw Error(Trouble::usage,
                    {.what = "this host has fewer GPUs than ranks",
                     .where = "rank " + std::to_string(gpu) + " of this host, from 0",
                     .measured = "no GPU of that number",
                     .remedy = "start fewer ranks on it: look at nvidia-smi"});
    }
    throw Error(Trouble::usage,
                {.what = driver > 0 ? "this machine has no GPU that CUDA can use"
                                    : "this machine has no NVIDIA driver",
                 .where = "device cuda",
                 .measured = status == cudaSuccess ? "0 GPUs visible"
                             : driver > 0          ? text_of(status)
                                                   : "libcuda.so.1 does not answer",
                 .remedy = "look at nvidia-smi and CUDA_VISIBLE_DEVICES, or choose device cpu"});
}

int64_t free_now() {
    size_t free = 0, total = 0;
    demand(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
    return static_cast<int64_t>(free);
}

// Free bytes before this process took its context. Where the driver's library does not say, all of
// the GPU: then what other processes hold counts as this one's, which errs on the safe side.
int64_t free_at_start() {
    std::array<char, 32> id{};
    demand(cudaDeviceGetPCIBusId(id.data(), static_cast<int>(id.size()), kGpu),
           "cudaDeviceGetPCIBusId");
    const int64_t known = free_bytes_of_gpu(id.data());
    if (known >= 0) return known;
    size_t free = 0, total = 0;
    demand(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
    log_warn(
        "the driver's management library (libnvidia-ml.so.1) is missing: memory that other "
        "processes hold on the GPU counts as ferry's own");
    return static_cast<int64_t>(total);
}

// The same, asked at the process's first device: what that one made the driver load stays loaded.
int64_t free_before_process() {
    static const int64_t kFree = free_at_start();
    return kFree;
}

class CudaDevice final : public Device {
public:
    explicit CudaDevice(Executor& executor)
        : compute_(executor, "compute", pages_, failures_),
          h2d_(executor, "h2d", pages_, failures_),
          d2h_(executor, "d2h", pages_, failures_) {
        streams_ = {&compute_, &h2d_, &d2h_};
        demand(cudaGetDeviceProperties(&properties_, kGpu), "cudaGetDeviceProperties");
    }
    ~CudaDevice() override { cudaFree(base_); }

    DeviceKind kind() const noexcept override { return DeviceKind::cuda; }
    std::string architecture() const override {
        return "cuda sm_" + std::to_string(properties_.major) + std::to_string(properties_.minor);
    }
    std::string pci_address() const override {
        std::array<char, 32> text{};
        snprintf(text.data(), text.size(), "%04x:%02x:%02x.0",
                 static_cast<unsigned>(properties_.pciDomainID),
                 static_cast<unsigned>(properties_.pciBusID),
                 static_cast<unsigned>(properties_.pciDeviceID));
        return text.data();
    }

    // The GPU tells only what is free: another process that gives memory back counts as well.
    int64_t overhead_bytes() const override {
        return std::max<int64_t>(0, free_before_process() - free_now() - bytes_);
    }
    int64_t free_bytes() const override { return free_now(); }

    void reserve(int64_t bytes) override {
        cudaFree(std::exchange(base_, nullptr));
        bytes_ = 0;
        const int64_t wanted = round_up(std::max<int64_t>(bytes, 1), 2 * kMiB);
        const int64_t free = free_now();
        const cudaError_t status = cudaMalloc(&base_, static_cast<size_t>(wanted));
        if (status != cudaSuccess) {
            throw Error(Trouble::does_not_fit,
                        {.what = "the GPU's memory cannot be reserved",
                         .where = std::string(properties_.name),
                         .measured = format_bytes(wanted) + " needed, " + text_of(status),
                         .limit = format_bytes(free) + " free",
                         .remedy = "lower budgets.device, or stop what else uses the GPU"});
        }
        bytes_ = wanted;
        demand(cudaMemset(base_, 0, static_cast<size_t>(wanted)), "cudaMemset");
        demand(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    }
    std::span<std::byte> memory() noexcept override {
        return {static_cast<std::byte*>(base_), static_cast<size_t>(bytes_)};
    }

    void lock_pages(std::span<std::byte> host) override {
        const cudaError_t status =
            cudaHostRegister(host.data(), host.size(), cudaHostRegisterPortable);
        if (status != cudaSuccess) {
            throw Error(Trouble::does_not_fit,
                        {.what = "host memory cannot be page-locked for the GPU",
                         .where = "cudaHostRegister",
                         .measured = format_bytes(static_cast<int64_t>(host.size())) + ", " +
                                     text_of(status),
                         .remedy = "lower budgets.host, or raise the limit on locked memory of "
                                   "this machine or container"});
        }
        pages_.add(host);
    }
    void unlock_pages(std::span<std::byte> host) noexcept override {
        cudaHostUnregister(host.data());
        pages_.remove(host);
    }

    void check() override { failures_.check(); }

private:
    cudaDeviceProp properties_{};
    void* base_ = nullptr;
    int64_t bytes_ = 0;
    LockedPages pages_;
    Failures failures_;
    CudaStream compute_, h2d_, d2h_;
};

}  // namespace

std::unique_ptr<Device> open_cuda_device(Executor& executor, int gpu) {
    FERRY_CHECK(!executor.simulated(), "a GPU does not run in virtual time");
    ask_for_queues();
    if (gpu > 0) see_only(gpu);
    demand_gpu(gpu);
    free_before_process();  // this is before, if anything is
    return std::make_unique<CudaDevice>(executor);
}

}  // namespace ferry
