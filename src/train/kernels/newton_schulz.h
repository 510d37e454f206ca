// Newton-Schulz, as torch.optim.Muon defines it (its _zeropower_via_newtonschulz; after Jordan et
// al. 2024, https://kellerjordan.github.io/posts/muon/, and Bernstein & Newhouse 2024):
//   x  = u / max(|u|, 1e-7)                           |u|: the Frobenius norm
//   ns_steps times, with x as wide as it is high or wider (else with its transpose):
//     s = x x^T;  x = (a I + b s + c s s) x
// torch rounds x, s and their polynomial to bf16. Here all is fp32, or with optimizer.ns_products
// each product rounds its two factors to bf16. Then 5 steps end 1e-2 apart in norm. Products are
// Ops::gemm's, and the norm's leaves are added as the gradient's are. So the bits depend on the
// matrix and the device alone, and not on threads or on where the state lies.
#pragma once

#include <cstddef>
#include <memory>
#include <span>

#include "ferry/config.h"
#include "ops/matrix_kernels.h"
#include "planner/planner.h"

namespace ferry::train {

class NewtonSchulz {
public:
    // `room`: scratch of the products, then a workspace as large as the largest matrix needs
    // (planner::MatrixWorkspace). It is memory of the kernels' device, and outlives them.
    NewtonSchulz(const OptimizerConfig& config, std::unique_ptr<ops::MatrixKernels> kernels,
                 std::span<std::byte> room, int64_t scratch_bytes);

    ops::MatrixKernels& kernels() { return *kernels_; }
    // Where a matrix is put: rows x cols elements, then zeros up to a multiple of 4,096.
    float* workspace() const { return reinterpret_cast<float*>(workspace_.data()); }
    // Makes it orthogonal; returns where it then stands, in the workspace.
    float* orthogonalise(int64_t rows, int64_t cols, int64_t count);

private:
    struct Iteration;
    // A factor of a product: x itself, or rounded at `narrow`.
    ops::ConstView factor(const float* x, int64_t rows, int64_t cols, float* narrow);
    void iterate(const Iteration& one);

    const int64_t steps_;
    const NewtonSchulzCoefficients coefficients_;
    const DType products_;
    const std::unique_ptr<ops::MatrixKernels> kernels_;
    std::byte* const scratch_;
    const std::span<std::byte> workspace_;
};

// Bytes that these operations want for the products of every matrix of Muon's in the model.
int64_t matrix_scratch_bytes(const ops::Ops& ops, const std::vector<model::Layer>& layers);

}  // namespace ferry::train
