// Products that cuBLASLt does not do, and the sums that follow one.
#include "ops/cuda/shared/kernels.h"
#include "ops/cuda/shared/launch.h"
#include "ops/cuda/shared/pack.h"

namespace ferry::ops::cuda {
namespace {

constexpr int kSide = 16, kThreads = 256;

// Adds what is added to the sum of products, then rounds once.
__device__ void finish(const Gemm& g, int64_t row, int64_t col, float sum) {
    if (g.bias.data != nullptr) sum += load(g.bias, 0, col);
    if (g.addend.data != nullptr) sum += load(g.addend, row, col);
    if (g.accumulate) sum += g.fresh ? 0.0f : load(g.c, row, col);
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

// ---------------------------------------------------------------- edges

constexpr int kMostEdge = static_cast<int>(kTensorUnit) - 1;

// A warp a row of a few columns: c [m, edge], a [m, k], b [edge, k].
__global__ void __launch_bounds__(kThreads) columns_kernel(Gemm g) {
    const int64_t row = int64_t{blockIdx.x} * (kThreads / 32) + threadIdx.x / 32;
    if (row >= g.c.rows) return;
    const auto edge = static_cast<int>(g.c.cols);
    const int64_t lane = threadIdx.x % 32, depth = g.a.cols;
    float sums[kMostEdge] = {};
#pragma unroll 2
    for (int64_t p = lane * kPack; p < depth; p += 32 * kPack) {
        const int count = pack_count(depth, p);
        const Pack a = load_pack(g.a, row, p, count);
#pragma unroll
        for (int j = 0; j < kMostEdge; ++j) {
            if (j >= edge) break;
            const Pack b = load_pack(g.b, j, p, count);
#pragma unroll
            for (int k = 0; k < kPack; ++k) sums[j] = fmaf(a.at[k], b.at[k], sums[j]);
        }
    }
#pragma unroll
    for (int j = 0; j < kMostEdge; ++j) {
        if (j >= edge) break;
        for (int half = 16; half > 0; half /= 2)
            sums[j] += __shfl_xor_sync(0xffffffffu, sums[j], half);
        if (lane == 0) finish(g, row, j, sums[j]);
    }
}

// A few rows: c [edge, n], a [k, edge], b [k, n]. A block has kAcross packs of columns; each of
// kDown threads of a pack adds every kDown-th step of the depth, then these are added in order.
constexpr int kAcross = 8, kDown = kThreads / kAcross;
__global__ void __launch_bounds__(kThreads) rows_kernel(Gemm g) {
    __shared__ float room[kDown][kAcross * kPack + 4];
    const int x = static_cast<int>(threadIdx.x) % kAcross;
    const int y = static_cast<int>(threadIdx.x) / kAcross;
    const int64_t begin = int64_t{blockIdx.x} * kAcross * kPack, col = begin + x * kPack;
    const auto edge = static_cast<int>(g.c.rows);
    const int64_t depth = col < g.c.cols ? g.a.rows : 0;
    const int count = pack_count(g.c.cols, col);
    float sums[kMostEdge][kPack] = {};
#pragma unroll 8
    for (int64_t p = y; p < depth; p += kDown) {
        const Pack b = load_pack(g.b, p, col, count);
#pragma unroll
        for (int j = 0; j < kMostEdge; ++j) {
            if (j >= edge) break;
            const float a = load(g.a, p, j);
#pragma unroll
            for (int k = 0; k < kPack; ++k) sums[j][k] = fmaf(a, b.at[k], sums[j][k]);
        }
    }
#pragma unroll
    for (int j = 0; j < kMostEdge; ++j) {
        if (j >= edge) break;
        __syncthreads();  // the row before was read by all
#pragma unroll
        for (int k = 0; k < kPack; ++k) room[y][x * kPack + k] = sums[j][k];
        __syncthreads();
        const int64_t mine = begin + threadIdx.x;
        if (threadIdx.x >= kAcross * kPack || mine >= g.c.cols) continue;
        float sum = 0;
        for (int part = 0; part < kDown; ++part) sum += room[part][threadIdx.x];
        finish(g, j, mine, sum);
    }
}

// The last steps of the depth onto the sum of those before: a [m, edge], b [edge, n].
__global__ void depth_kernel(Gemm g, const float* sum) {
    const int64_t row = blockIdx.x;
    for (int64_t col = threadIdx.x; col < g.c.cols; col += kThreads) {
        float own = sum[row * g.c.cols + col];
        for (int64_t p = 0; p < g.a.cols; ++p)
            own = fmaf(load(g.a, row, p), load(g.b, p, col), own);
        finish(g, row, col, own);
    }
}

}  // namespace

void columns_of_gemm(const Gemm& gemm, cudaStream_t stream) {
    FERRY_CHECK(gemm.form == Form::nt && gemm.c.cols < kTensorUnit);
    columns_kernel<<<blocks_for(gemm.c.rows, kThreads / 32), kThreads, 0, stream>>>(gemm);
    check_launch("last columns of a product");
}

void rows_of_gemm(const Gemm& gemm, cudaStream_t stream) {
    FERRY_CHECK(gemm.form == Form::tn && gemm.c.rows < kTensorUnit);
    rows_kernel<<<blocks_for(gemm.c.cols, kAcross * kPack), kThreads, 0, stream>>>(gemm);
    check_launch("last rows of a product");
}

void finish_depth(const Gemm& gemm, const float* sum, cudaStream_t stream) {
    FERRY_CHECK(gemm.form == Form::nn);
    depth_kernel<<<blocks_for(gemm.c.rows, 1), kThreads, 0, stream>>>(gemm, sum);
    check_launch("last steps of a product's depth");
}

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
