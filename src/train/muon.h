// Muon's update of a matrix, whole: momentum, orthogonalisation, step (ferry/optim.h).
//
// Newton-Schulz, as torch.optim.Muon defines it (its _zeropower_via_newtonschulz; after Jordan et
// al. 2024, https://kellerjordan.github.io/posts/muon/, and Bernstein & Newhouse 2024):
//   x  = u / max(|u|, 1e-7)                           |u|: the Frobenius norm
//   ns_steps times, with x as wide as it is high or wider (else with its transpose):
//     s = x x^T;  x = (a I + b s + c s s) x
// All of it is fp32, where torch rounds to bf16: 5 steps then end 1e-2 apart in norm. Products are
// Ops::gemm's, cut by the shape alone; the norm's leaves are added as the gradient's are. So the
// bits depend on the matrix alone: not on threads, nor on where the state lies.
#pragma once

#include <memory>
#include <span>

#include "ferry/config.h"
#include "ferry/optim.h"
#include "ferry/team.h"
#include "ops/ops.h"
#include "planner/planner.h"

namespace ferry::train {

class Muon {
public:
    // `workspace`: as large as the largest matrix needs (planner::MatrixWorkspace). Both outlive
    // it.
    Muon(const OptimizerConfig& config, NodeTeams& teams, std::span<std::byte> workspace);

    // `span` is the whole of a segment: rows x cols elements, then padding of zeros. In place or
    // not, with any format of the master and of the moment.
    void update(int64_t rows, int64_t cols, const optim::Span& span, const optim::Scalars& muon);

    // Makes [rows, cols] at the beginning of the workspace orthogonal; returns where it then
    // stands.
    float* orthogonalise(int64_t rows, int64_t cols, int64_t count);

private:
    float* room() const { return reinterpret_cast<float*>(workspace_.data()); }
    // square = a I + b gram + c square.
    void polynomial(const planner::MatrixWorkspace& at);

    const int64_t steps_;
    const NewtonSchulzCoefficients coefficients_;
    const optim::AdjustLr adjust_;
    NodeTeams& teams_;
    const std::unique_ptr<ops::Ops> ops_;  // beside the model's, which may be another device's
    const std::span<std::byte> workspace_;
};

}  // namespace ferry::train
