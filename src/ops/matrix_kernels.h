// What orthogonalising a matrix by Newton-Schulz (train/kernels/newton_schulz.h) asks of a device:
// products, two kernels of its own, and the way to the matrix where the device has other memory
// than the host. Results are a function of values and shapes, as those of Ops.
#pragma once

#include <memory>

#include "ferry/device.h"
#include "ferry/team.h"
#include "ops/ops.h"

namespace ferry::ops {

class MatrixKernels {
public:
    virtual ~MatrixKernels() = default;
    virtual Ops& ops() = 0;
    // x /= max(n, least), n the square root of the sum of the leaves, added in double in index
    // order; n is rounded to fp32 before it divides. The leaves may be overwritten.
    virtual void divide_by_norm(float* x, int64_t count, float* leaves, float least) = 0;
    // square = a I + b gram + c square; both [side, side]. Each operation is rounded once.
    virtual void polynomial(float a, float b, float c, const float* gram, float* square,
                            int64_t side) = 0;
    // Between host and device memory, in the order of the kernels. fetch() waits until `host` has
    // its values; the processors' kernels have the host's memory, and nobody sends them any.
    virtual void send(float* device, const float* host, int64_t count) = 0;
    virtual void fetch(float* host, const float* device, int64_t count) = 0;
};

std::unique_ptr<MatrixKernels> make_cpu_matrix_kernels(Team& team);
// `beside`: on a stream of their own, which goes before the device's compute stream; else on that.
// The device outlives them. Calls come from one thread at a time.
std::unique_ptr<MatrixKernels> make_cuda_matrix_kernels(Device& device, bool beside);

}  // namespace ferry::ops
