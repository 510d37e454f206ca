// cuDNN's attention kernels, each built once for the calls of its shape.
#pragma once

#ifdef FERRY_CUDNN

#include <cuda_runtime.h>
#include <cudnn.h>

#include <array>
#include <compare>
#include <map>
#include <memory>
#include <string>

#include "ferry/dtype.h"
#include "ferry/units.h"

namespace cudnn_frontend::graph {
class Graph;
}

namespace ferry::ops::cuda {

// The operands of a call, by the numbers that graphs know them by.
constexpr size_t kQ = 0, kK = 1, kV = 2, kOut = 3, kLse = 4, kDout = 5, kDq = 6, kDk = 7, kDv = 8;
constexpr size_t kOperands = 9;
using OperandData = std::array<void*, kOperands>;  // a forward call has the first five

// The key of a graph: the shape of a call, and how far apart rows are. Log-sum-exps are
// [sequences, heads, queries], without gaps.
struct CudnnCall {
    bool backward = false;
    int64_t sequences = 0, queries = 0, keys = 0;
    int64_t heads = 0, kv_heads = 0, head_dim = 0;
    // The last query sees the last key, each before it one less; else all see all.
    bool causal = true;
    int64_t window = 0;  // keys that a causal call's query sees; 0: all
    DType type = DType::bf16;
    double scale = 0;
    std::array<int64_t, kOperands> row{};  // elements from one token to the next
    auto operator<=>(const CudnnCall&) const = default;
};

constexpr int64_t kMostWorkspace = kGiB + kGiB / 4;  // the most that a graph may want

struct CudnnGraph {
    std::shared_ptr<cudnn_frontend::graph::Graph> graph{};  // null: cuDNN has none
    int64_t bytes = 0;                                      // its workspace's
    std::string why{};                                      // there is none
};

class CudnnGraphs {
public:
    explicit CudnnGraphs(cudaStream_t stream);
    ~CudnnGraphs();
    CudnnGraphs(const CudnnGraphs&) = delete;
    CudnnGraphs& operator=(const CudnnGraphs&) = delete;

    // Null before of(): nobody has asked.
    const CudnnGraph* known(const CudnnCall& call) const;
    // Built where it is not known. Stays where it is. Throws as CudnnAttention says.
    const CudnnGraph& of(const CudnnCall& call);
    // Notes that there is none for this call.
    void refuse(const CudnnCall& call) { built_.try_emplace(call); }

    void run(const CudnnCall& call, const CudnnGraph& graph, const OperandData& operands,
             std::byte* workspace);

private:
    cudnnHandle_t handle_ = nullptr;
    std::map<CudnnCall, CudnnGraph> built_{};
};

}  // namespace ferry::ops::cuda

#endif
