// Newton-Schulz's kernels on a GPU: those of its compute stream, or those beside it.
#include "ops/matrix_kernels.h"

#include <cuda_runtime.h>

#include "newton_schulz.h"
#include "ops/cuda/shared/launch.h"

namespace ferry::ops {
namespace {

constexpr int64_t kLeaf = 4096;

class CudaMatrixKernels final : public MatrixKernels {
public:
    CudaMatrixKernels(Device& device, bool beside)
        : device_(device), own_(beside ? make_stream() : nullptr) {
        stream_ = beside ? own_ : native(StreamKind::compute);
        ops_ = cuda::ops_on_stream(device, stream_);
        // A thread that waits for an event sleeps.
        cuda::check_launch("event", cudaEventCreateWithFlags(
                                        &event_, cudaEventDisableTiming | cudaEventBlockingSync));
    }
    ~CudaMatrixKernels() override {
        cudaStreamSynchronize(stream_);
        cudaEventDestroy(event_);
        if (own_ != nullptr) cudaStreamDestroy(own_);
    }
    CudaMatrixKernels(const CudaMatrixKernels&) = delete;
    CudaMatrixKernels& operator=(const CudaMatrixKernels&) = delete;

    Ops& ops() override { return *ops_; }

    void divide_by_norm(float* x, int64_t count, float* leaves, float least) override {
        cuda::divide_by_norm(x, count, leaves, ceil_div(count, kLeaf), least, stream_);
    }
    void polynomial(float a, float b, float c, const float* gram, float* square,
                    int64_t side) override {
        cuda::polynomial(a, b, c, gram, square, side, stream_);
    }

    // By the device's streams for copies, which know where page-locked regions end.
    void send(float* device, const float* host, int64_t count) override {
        device_.stream(StreamKind::h2d).copy(device, host, count * 4);
        cuda::check_launch("event", cudaEventRecord(event_, native(StreamKind::h2d)));
        cuda::check_launch("event", cudaStreamWaitEvent(stream_, event_));
    }
    void fetch(float* host, const float* device, int64_t count) override {
        wait_for(stream_);  // here, so that other copies do not wait behind this one
        device_.stream(StreamKind::d2h).copy(host, device, count * 4);
        wait_for(native(StreamKind::d2h));
    }

private:
    static cudaStream_t make_stream() {
        int least = 0, greatest = 0;
        cuda::check_launch("stream", cudaDeviceGetStreamPriorityRange(&least, &greatest));
        cudaStream_t stream = nullptr;
        cuda::check_launch("stream",
                           cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, greatest));
        return stream;
    }
    cudaStream_t native(StreamKind kind) const {
        return static_cast<cudaStream_t>(device_.stream(kind).native());
    }
    // For what was enqueued until now. Device::check() names what failed of it.
    void wait_for(cudaStream_t stream) {
        cuda::check_launch("event", cudaEventRecord(event_, stream));
        cuda::check_launch("event", cudaEventSynchronize(event_));
    }

    Device& device_;
    cudaStream_t own_ = nullptr, stream_ = nullptr;
    std::unique_ptr<Ops> ops_{};
    cudaEvent_t event_ = nullptr;
};

}  // namespace

std::unique_ptr<MatrixKernels> make_cuda_matrix_kernels(Device& device, bool beside) {
    return std::make_unique<CudaMatrixKernels>(device, beside);
}

}  // namespace ferry::ops
