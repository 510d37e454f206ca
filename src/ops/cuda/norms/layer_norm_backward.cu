// LayerNorm, backward.
#include "run_norm_backward.h"

namespace ferry::ops::cuda {

void layer_norm_backward(ConstView dy, ConstView x, ConstView weight, const float* stats,
                         ConstView addend, View dx, Accumulator weight_gradient,
                         Accumulator bias_gradient, float* partial, cudaStream_t stream) {
    if (x.rows == 0) {
        add_nothing(weight.cols, weight_gradient, stream);
        return add_nothing(weight.cols, bias_gradient, stream);
    }
    run_backward(Layered{stats, x.rows}, backward_of(dy, x, weight, addend, dx, partial),
                 weight_gradient, bias_gradient, stream);
    check_launch("layer norm backward");
}

}  // namespace ferry::ops::cuda
