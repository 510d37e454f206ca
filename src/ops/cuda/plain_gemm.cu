// Products that cuBLASLt does not do, and the sums that follow one.
#include "element.h"
#include "kernels.h"
#include "launch.h"

namespace ferry::ops::cuda {
namespace {

constexpr int kSide = 16, kThreads = 256;

// What is added to the sum of products, then the one rounding.
__device__ void finish(const Gemm& g, int64_t row, int64_t col, float sum) {
    if (g.bias.data != nullptr) sum += load(g.bias, 0, col);
    if (g.addend.data != nullptr) sum += load(g.addend, row, col);
    if (g.accumulate) sum += load(g.c, row, col);
    store(sum, g.c, row, col);
}

__global__ void finish_kernel(Gemm g, const float* sum) {
    const int64_t row = blockIdx.x;
    for (int64_t col = threadIdx.x; col < g.c.cols; col += kThreads) {
        finish(g, row, col, sum[row * g.c.cols + col]);
    }
}

// Element i of a's edge is in row i / kSpare; of b's the bias runs along n.
__global__ void edges_kernel(View a_edge, ConstView bias, View b_edge, bool nt) {
    const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
    const int64_t of_a = a_edge.rows * kSpare, of_b = bias.cols * kSpare;
    if (i < of_a) {
        store(i % kSpare == 0 ? 1.0f : 0.0f, a_edge, i / kSpare, i % kSpare);
    } else if (i < of_a + of_b) {
        const int64_t e = i - of_a;
        const int64_t spare = nt ? e % kSpare : e / bias.cols;
        const int64_t col = nt ? e / kSpare : e % bias.cols;
        store(spare == 0 ? load(bias, 0, col) : 0.0f, b_edge, nt ? col : spare, nt ? spare : col);
    }
}

// A block a tile of kSide x kSide, a thread an element; the sum runs over the depth in order.
__global__ void product_kernel(Gemm g) {
    __shared__ float left[kSide][kSide + 1], right[kSide][kSide + 1];
    const int x = static_cast<int>(threadIdx.x) % kSide, y = static_cast<int>(threadIdx.x) / kSide;
    const int64_t row = int64_t{blockIdx.y} * kSide + y, col = int64_t{blockIdx.x} * kSide + x;
    const bool tn = g.form == Form::tn, nt = g.form == Form::nt;
    const int64_t depth = tn ? g.a.rows : g.a.cols;
    float sum = 0;
    for (int64_t first = 0; first < depth; first += kSide) {
        const int64_t a_depth = first + x, b_depth = first + y;
        const bool a_inside = row < g.c.rows && a_depth < depth;
        const bool b_inside = col < g.c.cols && b_depth < depth;
        left[y][x] = !a_inside ? 0.0f : tn ? load(g.a, a_depth, row) : load(g.a, row, a_depth);
        right[y][x] = !b_inside ? 0.0f : nt ? load(g.b, col, b_depth) : load(g.b, b_depth, col);
        __syncthreads();
        for (int p = 0; p < kSide; ++p) sum = fmaf(left[y][p], right[p][x], sum);
        __syncthreads();
    }
    if (row < g.c.rows && col < g.c.cols) finish(g, row, col, sum);
}

}  // namespace

void finish_gemm(const Gemm& gemm, const float* sum, cudaStream_t stream) {
    finish_kernel<<<blocks_for(gemm.c.rows, 1), kThreads, 0, stream>>>(gemm, sum);
    check_launch("bias and addend");
}

void write_bias_edges(View a_edge, ConstView bias, View b_edge, Form form, cudaStream_t stream) {
    const int64_t elements = (a_edge.rows + bias.cols) * kSpare;
    edges_kernel<<<blocks_for(elements, kThreads), kThreads, 0, stream>>>(a_edge, bias, b_edge,
                                                                          form == Form::nt);
    check_launch("a bias as a part of a product's depth");
}

void plain_gemm(const Gemm& gemm, cudaStream_t stream) {
    const dim3 blocks(blocks_for(gemm.c.cols, kSide), blocks_for(gemm.c.rows, kSide));
    product_kernel<<<blocks, kThreads, 0, stream>>>(gemm);
    check_launch("plain product");
}

}  // namespace ferry::ops::cuda
