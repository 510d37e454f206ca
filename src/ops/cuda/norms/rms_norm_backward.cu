// RMSNorm, backward, of rows and of heads that are turned first.
#include "run_norm_backward.h"

namespace ferry::ops::cuda {

void norm_backward(ConstView dy, ConstView x, ConstView weight, const float* rstd, ConstView addend,
                   View dx, Accumulator weight_gradient, float* partial, cudaStream_t stream) {
    if (x.rows == 0) return add_nothing(weight.cols, weight_gradient, stream);
    run_backward(Rms{rstd}, backward_of(dy, x, weight, addend, dx, partial), weight_gradient,
                 nullptr, stream);
    check_launch("norm backward");
}

bool norm_rope_backward(View d, ConstView x, ConstView weight, const float* rstd,
                        Accumulator weight_gradient, const Rope& rope, const float* angles,
                        float* partial, cudaStream_t stream) {
    if (x.rows == 0) return add_nothing(weight.cols, weight_gradient, stream), true;
    if (!rotates_heads(angles, weight.cols) || !lies_whole(d) || !lies_whole(x) ||
        !lies_whole(weight))
        return false;
    Backward a = backward_of(d, x, weight, {}, d, partial);
    a.rotation = rotation_of(rope, angles);
    // The sums of few rows are a kernel apart, which turns nothing.
    const unsigned blocks = blocks_for(a.runs.count, Summing<8, 2, Lie::whole>::kRows);
    if (weight_gradient.asked() && !sums_at_once(weight.cols, blocks)) return false;
    run_backward(Rms{rstd}, a, weight_gradient, nullptr, stream);
    check_launch("norm and rope backward");
    return true;
}

}  // namespace ferry::ops::cuda
