// Matrix products by cuBLASLt.
#pragma once

#include <cublasLt.h>

#include <map>
#include <tuple>

#include "ferry/ops.h"

namespace ferry::ops::cuda {

// The first result of cuBLASLt's heuristic for each shape, with a fixed workspace and no reduction
// whose order could change: the same bits in every run on the same architecture and library.
class Products {
public:
    explicit Products(int64_t workspace_bytes);
    ~Products();
    Products(const Products&) = delete;
    Products& operator=(const Products&) = delete;

    // c = round(a b [+ addend, of c's type] [+ c]) without a bias. False, and nothing done, where
    // cuBLASLt has no algorithm; said in the log once a shape.
    bool run(const Gemm& gemm, void* workspace, cudaStream_t stream);

private:
    // What an algorithm is chosen by. Alignment, up to 16 bytes, follows from the model: buffers
    // begin at page boundaries, wherever they are.
    using Key = std::tuple<Form, DType, DType, std::array<int64_t, 3>, std::array<int64_t, 4>,
                           std::array<int, 4>, bool>;
    struct Choice {
        cublasLtMatmulDesc_t product = nullptr;
        cublasLtMatrixLayout_t a{}, b{}, c{}, d{};
        cublasLtMatmulAlgo_t algorithm{};
        bool found = false;
    };
    Choice choose(const Gemm& gemm, const Key& key) const;

    int64_t workspace_bytes_;
    cublasLtHandle_t handle_ = nullptr;
    std::map<Key, Choice> choices_;
};

}  // namespace ferry::ops::cuda
