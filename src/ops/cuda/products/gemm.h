// Matrix products by cuBLASLt.
#pragma once

#include <cublasLt.h>

#include <array>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "ops/ops.h"
#include "ops/product_table.h"

namespace ferry::ops::cuda {

// Each shape has one algorithm: the first that cuBLASLt's heuristic offers, or the one in a table.
// The workspace is fixed, and no reduction may change its order. So every run on the same
// architecture and library gives the same bits.
class Products {
public:
    Products(int64_t workspace_bytes, ProductTable table);
    ~Products();
    Products(const Products&) = delete;
    Products& operator=(const Products&) = delete;

    // Whether cuBLASLt can do all of it in one call with one rounding. It can where bias and addend
    // have c's type, and where not both an addend and c itself are added. This asks for shapes
    // alone: at plan time there is no data.
    static bool takes(const Gemm& gemm);
    // Whether it could if the bias were one more row of b, multiplied by a column of ones.
    static bool takes_with_bias_in_depth(const Gemm& gemm);
    // Multiplies, where takes() is true. Returns false and does nothing where cuBLASLt has no
    // algorithm; the log says so once for each shape.
    bool run(const Gemm& gemm, void* workspace, cudaStream_t stream);

    // As TunesProducts has them (ops/product_table.h).
    const ProductTable& given() const { return table_; }
    // Begins a table for that GPU and library; later products add to it.
    void tune(const std::string& made_for) { tuned_.emplace(made_for); }
    const ProductTable& tuned() const { return *tuned_; }

private:
    // The key by which an algorithm is chosen. Alignment, up to 16 bytes, follows from the model:
    // buffers begin at page boundaries, wherever they are.
    struct Key {
        Form form{};
        DType operands{}, output{};
        bool adds = false, biased = false;
        std::array<int64_t, 3> sizes{};    // rows, columns, depth
        std::array<int64_t, 4> strides{};  // for cuBLASLt's A, B, C, D
        std::array<int, 4> alignments{};   // the same; a bias counts as D
        auto operator<=>(const Key&) const = default;
    };
    struct Choice {
        cublasLtMatmulDesc_t product = nullptr;
        cublasLtMatrixLayout_t a{}, b{}, c{}, d{};
        cublasLtMatmulAlgo_t algorithm{};
        bool found = false;
    };
    static Key key_of(const Gemm& gemm);
    static std::string text_of(const Key& key);
    Choice describe(const Gemm& gemm, const Key& key) const;
    void look_up(const ProductTable::Algorithm& known, const Gemm& gemm, Choice& choice) const;
    std::vector<cublasLtMatmulAlgo_t> offered(const Key& key, const Choice& choice, int most) const;
    cublasLtMatmulAlgo_t fastest(const std::vector<cublasLtMatmulAlgo_t>& of, const Gemm& gemm,
                                 const Choice& choice, void* workspace, cudaStream_t stream) const;
    double seconds_of(const cublasLtMatmulAlgo_t& algorithm, const Gemm& gemm, const Choice& choice,
                      void* workspace, cudaStream_t stream) const;
    Choice choose(const Gemm& gemm, const Key& key, void* workspace, cudaStream_t stream);
    cublasStatus_t multiply(const Gemm& gemm, const Choice& choice,
                            const cublasLtMatmulAlgo_t& algorithm, void* workspace,
                            cudaStream_t stream) const;

    int64_t workspace_bytes_;
    const ProductTable table_;
    std::optional<ProductTable> tuned_{};
    cublasLtHandle_t handle_ = nullptr;
    std::map<Key, Choice> choices_;
};

}  // namespace ferry::ops::cuda
