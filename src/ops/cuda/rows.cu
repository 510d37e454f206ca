// Operations that touch each element once: rotation, gates, conversions.
#include <algorithm>

#include "kernels.h"
#include "launch.h"
#include "pack.h"

namespace ferry::ops::cuda {
namespace {

constexpr int kThreads = 256;

// The frequencies travel with the launch.
struct Frequencies {
    double of[kMaxHeadDim / 2];
};

// A block a position; its angles, in double, serve all heads of all sequences.
__global__ void rope_kernel(View x, Rope rope, Frequencies frequencies) {
    __shared__ float cosine[kMaxHeadDim / 2], sine[kMaxHeadDim / 2];
    const int64_t position = blockIdx.x, half = rope.head_dim / 2;
    const double turn = rope.inverse ? -rope.amplitude : rope.amplitude;
    for (int64_t i = threadIdx.x; i < half; i += kThreads) {
        const double angle = static_cast<double>(position) * frequencies.of[i];
        cosine[i] = static_cast<float>(rope.amplitude * cos(angle));
        sine[i] = static_cast<float>(turn * sin(angle));
    }
    __syncthreads();
    for (int64_t row = position; row < x.rows; row += rope.sequence) {
        const int64_t packs = ceil_div(half, kPack);
        for (int64_t p = threadIdx.x; p < rope.heads * packs; p += kThreads) {
            const int64_t first = p % packs * kPack, col = p / packs * rope.head_dim + first;
            const int count = pack_count(half, first);
            Pack a = load_pack(x, row, col, count), b = load_pack(x, row, col + half, count);
            for (int i = 0; i < kPack; ++i) {
                const float c = cosine[first + i], s = sine[first + i], was = a.at[i];
                a.at[i] = was * c - b.at[i] * s;
                b.at[i] = b.at[i] * c + was * s;
            }
            store_pack(a, x, row, col);
            store_pack(b, x, row, col + half);
        }
    }
}

__device__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

__global__ void swiglu_forward_kernel(ConstView gate_up, View y) {
    const int64_t row = blockIdx.x;
    each_pack<kThreads>(y.cols, [&](int64_t col, int count) {
        Pack gate = load_pack(gate_up, row, col, count);
        const Pack up = load_pack(gate_up, row, y.cols + col, count);
        for (int i = 0; i < kPack; ++i) gate.at[i] = gate.at[i] * sigmoid(gate.at[i]) * up.at[i];
        store_pack(gate, y, row, col);
    });
}

__global__ void swiglu_backward_kernel(View dy, View gate_up) {
    const int64_t row = blockIdx.x;
    each_pack<kThreads>(dy.cols, [&](int64_t col, int count) {
        Pack d = load_pack(dy, row, col, count);
        Pack gates = load_pack(gate_up, row, col, count);
        Pack ups = load_pack(gate_up, row, dy.cols + col, count);
        for (int i = 0; i < kPack; ++i) {
            const float gate = gates.at[i], up = ups.at[i], s = sigmoid(gate);
            // d silu(g) = s (1 + g (1 - s))
            gates.at[i] = d.at[i] * up * (s * (1.0f + gate * (1.0f - s)));
            ups.at[i] = d.at[i] * (gate * s);
            d.at[i] = gate * s * up;
        }
        store_pack(d, dy, row, col);
        store_pack(gates, gate_up, row, col);
        store_pack(ups, gate_up, row, dy.cols + col);
    });
}

// x / 2 (1 + tanh(z)) = x sigmoid(2 z).
constexpr float kGeluScale = 1.5957691216057308f, kGeluCube = 0.044715f;  // 2 sqrt(2 / pi)
__device__ float gelu_sigmoid(float x) {
    return sigmoid(kGeluScale * x * (1.0f + kGeluCube * x * x));
}

__global__ void gelu_forward_kernel(ConstView x, View y) {
    const int64_t row = blockIdx.x;
    each_pack<kThreads>(y.cols, [&](int64_t col, int count) {
        Pack pack = load_pack(x, row, col, count);
        for (int i = 0; i < kPack; ++i) pack.at[i] *= gelu_sigmoid(pack.at[i]);
        store_pack(pack, y, row, col);
    });
}

__global__ void gelu_backward_kernel(View dy, View x) {
    const int64_t row = blockIdx.x;
    each_pack<kThreads>(dy.cols, [&](int64_t col, int count) {
        Pack pack = load_pack(x, row, col, count), d = load_pack(dy, row, col, count);
        for (int i = 0; i < kPack; ++i) {
            const float value = pack.at[i], s = gelu_sigmoid(value);
            // d (x s(u)) = s + x s (1 - s) u'
            const float slope = kGeluScale * (1.0f + 3.0f * kGeluCube * value * value);
            pack.at[i] = d.at[i] * (s + value * s * ((1.0f - s) * slope));
            d.at[i] = value * s;
        }
        store_pack(d, dy, row, col);
        store_pack(pack, x, row, col);
    });
}

__global__ void cast_kernel(ConstView from, View to) {
    const int64_t row = blockIdx.x;
    each_pack<kThreads>(to.cols, [&](int64_t col, int count) {
        store_pack(load_pack(from, row, col, count), to, row, col);
    });
}

__global__ void add_kernel(float* a, const float* b, int64_t count) {
    const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
    if (i < count) a[i] += b[i];
}

__global__ void check_finite_kernel(ConstView x, uint32_t* nonfinite) {
    const int64_t row = blockIdx.x;
    bool bad = false;
    each_pack<kThreads>(x.cols, [&](int64_t col, int count) {
        const Pack pack = load_pack(x, row, col, count);
        for (int i = 0; i < kPack; ++i) bad |= !isfinite(pack.at[i]);
    });
    if (bad) atomicOr(nonfinite, 1u);
}

}  // namespace

bool runs_here() {
    cudaFuncAttributes attributes;
    const bool runs = cudaFuncGetAttributes(&attributes, add_kernel) == cudaSuccess;
    cudaGetLastError();  // leaves no error behind for who asks next
    return runs;
}

void rope(View x, const Rope& rope, cudaStream_t stream) {
    const int64_t positions = std::min(rope.sequence, x.rows);
    if (positions == 0) return;
    Frequencies frequencies{};
    std::copy_n(rope.frequencies, rope.head_dim / 2, frequencies.of);
    rope_kernel<<<blocks_for(positions, 1), kThreads, 0, stream>>>(x, rope, frequencies);
    check_launch("rope");
}

void swiglu_forward(ConstView gate_up, View y, cudaStream_t stream) {
    if (y.rows == 0) return;
    swiglu_forward_kernel<<<blocks_for(y.rows, 1), kThreads, 0, stream>>>(gate_up, y);
    check_launch("swiglu forward");
}

void swiglu_backward(View dy, View gate_up, cudaStream_t stream) {
    if (dy.rows == 0) return;
    swiglu_backward_kernel<<<blocks_for(dy.rows, 1), kThreads, 0, stream>>>(dy, gate_up);
    check_launch("swiglu backward");
}

void gelu_forward(ConstView x, View y, cudaStream_t stream) {
    if (y.rows == 0) return;
    gelu_forward_kernel<<<blocks_for(y.rows, 1), kThreads, 0, stream>>>(x, y);
    check_launch("gelu forward");
}

void gelu_backward(View dy, View x, cudaStream_t stream) {
    if (dy.rows == 0) return;
    gelu_backward_kernel<<<blocks_for(dy.rows, 1), kThreads, 0, stream>>>(dy, x);
    check_launch("gelu backward");
}

void cast(ConstView from, View to, cudaStream_t stream) {
    if (to.rows == 0) return;
    cast_kernel<<<blocks_for(to.rows, 1), kThreads, 0, stream>>>(from, to);
    check_launch("cast");
}

void add(float* a, const float* b, int64_t count, cudaStream_t stream) {
    if (count == 0) return;
    add_kernel<<<blocks_for(count, kThreads), kThreads, 0, stream>>>(a, b, count);
    check_launch("add");
}

void check_finite(ConstView x, uint32_t* nonfinite, cudaStream_t stream) {
    if (x.rows == 0) return;
    check_finite_kernel<<<blocks_for(x.rows, 1), kThreads, 0, stream>>>(x, nonfinite);
    check_launch("check finite");
}

}  // namespace ferry::ops::cuda
