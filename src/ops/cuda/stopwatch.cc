// Events of the compute stream, and captured graphs to count launches.
#include "ops/stopwatch.h"

#include <cuda_runtime.h>

#include "ferry/error.h"
#include "ops/cuda/shared/launch.h"

namespace ferry::ops {
namespace {

class CudaStopwatch final : public Stopwatch {
public:
    explicit CudaStopwatch(cudaStream_t stream) : stream_(stream) {}
    ~CudaStopwatch() override {
        for (cudaEvent_t event : events_) cudaEventDestroy(event);
    }
    CudaStopwatch(const CudaStopwatch&) = delete;
    CudaStopwatch& operator=(const CudaStopwatch&) = delete;

    void mark() override {
        if (marks_ == events_.size()) {
            cudaEventCreate(&events_.emplace_back());
            cuda::check_launch("event");
        }
        cudaEventRecord(events_[marks_++], stream_);
        cuda::check_launch("event");
    }

    std::vector<double> seconds() override {
        std::vector<double> found;
        if (marks_ > 0) cudaEventSynchronize(events_[marks_ - 1]);
        for (size_t i = 1; i < marks_; ++i) {
            float ms = 0;
            cudaEventElapsedTime(&ms, events_[i - 1], events_[i]);
            found.push_back(static_cast<double>(ms) * 1e-3);
        }
        cuda::check_launch("event");
        marks_ = 0;
        return found;
    }

    int64_t launches(const std::function<void()>& work) override {
        if (cudaStreamBeginCapture(stream_, cudaStreamCaptureModeRelaxed) != cudaSuccess) {
            cudaGetLastError();
            return -1;
        }
        bool captured = true;
        try {
            work();
        } catch (const Error&) {  // a call that no graph can hold
            captured = false;
        }
        cudaGraph_t graph = nullptr;
        const cudaError_t ended = cudaStreamEndCapture(stream_, &graph);
        size_t nodes = 0;
        captured = captured && ended == cudaSuccess && graph != nullptr &&
                   cudaGraphGetNodes(graph, nullptr, &nodes) == cudaSuccess;
        if (graph != nullptr) cudaGraphDestroy(graph);
        cudaGetLastError();
        return captured ? static_cast<int64_t>(nodes) : -1;
    }

private:
    cudaStream_t stream_;
    std::vector<cudaEvent_t> events_{};
    size_t marks_ = 0;
};

}  // namespace

std::unique_ptr<Stopwatch> make_cuda_stopwatch(Device& device) {
    auto* stream = static_cast<cudaStream_t>(device.stream(StreamKind::compute).native());
    return std::make_unique<CudaStopwatch>(stream);
}

}  // namespace ferry::ops
