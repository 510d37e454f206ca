// Operations that touch each element once: rotation, gates, conversions.
#include <algorithm>

#include "ops/cuda/norms/rotation.h"
#include "ops/cuda/shared/kernels.h"
#include "ops/cuda/shared/launch.h"
#include "ops/cuda/shared/pack.h"

namespace ferry::ops::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kMaxRopeDim = 256;

// The frequencies travel with the launch.
struct Frequencies {
    double of[kMaxRopeDim / 2];
};

// A block a position; its angles, in double, serve all heads of all sequences. With documents,
// where positions begin anew, a block a row.
__global__ void rope_kernel(View x, Rope rope, Frequencies frequencies) {
    __shared__ float cosine[kMaxRopeDim / 2], sine[kMaxRopeDim / 2];
    const int64_t first_row = blockIdx.x, half = rope.head_dim / 2;
    const bool documents = rope.document_start != nullptr;
    const int64_t position =
        documents ? first_row % rope.sequence - rope.document_start[first_row] : first_row;
    const double turn = rope.inverse ? -rope.amplitude : rope.amplitude;
    for (int64_t i = threadIdx.x; i < half; i += kThreads) {
        const double angle = static_cast<double>(position) * frequencies.of[i];
        cosine[i] = static_cast<float>(rope.amplitude * cos(angle));
        sine[i] = static_cast<float>(turn * sin(angle));
    }
    __syncthreads();
    // Items of all sequences in turn: a row alone may have fewer than the block has threads.
    const auto packs = static_cast<int>(ceil_div(half, kPack));
    const auto of_row = static_cast<int>(rope.heads) * packs;
    const auto rows = documents ? 1 : static_cast<int>(ceil_div(x.rows - first_row, rope.sequence));
    for (int64_t item = threadIdx.x; item < int64_t{rows} * of_row; item += kThreads) {
        const int64_t row = first_row + item / of_row * rope.sequence;
        const int p = static_cast<int>(item % of_row), first = p % packs * kPack;
        const int64_t col = p / packs * rope.head_dim + first;
        const int count = pack_count(half, first);
        const RawPack raw_a = fetch_pack(x, row, col, count);
        const RawPack raw_b = fetch_pack(x, row, col + half, count);
        Pack a = widen_pack(raw_a, x.type, count), b = widen_pack(raw_b, x.type, count);
#pragma unroll
        for (int i = 0; i < kPack; ++i) {
            if (i >= count) break;
            rotate_pair(a.at[i], b.at[i], cosine[first + i], sine[first + i]);
        }
        store_pack(a, x, row, col);
        store_pack(b, x, row, col + half);
    }
}

// A thread an angle.
__global__ void angles_kernel(Rope rope, Frequencies frequencies, float2* angles) {
    const int64_t half = rope.head_dim / 2, i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
    if (i >= rope.all_positions() * half) return;
    const double angle = static_cast<double>(i / half) * frequencies.of[i % half];
    angles[i] = {static_cast<float>(rope.amplitude * cos(angle)),
                 static_cast<float>(rope.amplitude * sin(angle))};
}

// The compiler's exact reciprocal branches for every element, for operands near the ends of the
// range. This is its sequence for all others, and what it is given stays among them.
__device__ float reciprocal(float y) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(y));
    return fmaf(r, fmaf(-y, r, 1.0f), r);
}
__device__ float sigmoid(float x) {
    constexpr float kLeast = -87.0f;  // below it the reciprocal is hardly a float
    return reciprocal(1.0f + expf(-fmaxf(x, kLeast)));
}

__global__ void swiglu_forward_kernel(ConstView gate_up, View y) {
    const auto [row, col, count] = cell_of(y.cols);
    if (count <= 0) return;
    const RawPack raw_gate = fetch_pack(gate_up, row, col, count);
    const RawPack raw_up = fetch_pack(gate_up, row, y.cols + col, count);
    Pack gate = widen_pack(raw_gate, gate_up.type, count);
    const Pack up = widen_pack(raw_up, gate_up.type, count);
#pragma unroll
    for (int i = 0; i < kPack; ++i) gate.at[i] = gate.at[i] * sigmoid(gate.at[i]) * up.at[i];
    store_pack(gate, y, row, col);
}

__global__ void swiglu_backward_kernel(View dy, View gate_up) {
    const auto [row, col, count] = cell_of(dy.cols);
    if (count <= 0) return;
    const RawPack raw_d = fetch_pack(dy, row, col, count);
    const RawPack raw_gate = fetch_pack(gate_up, row, col, count);
    const RawPack raw_up = fetch_pack(gate_up, row, dy.cols + col, count);
    Pack d = widen_pack(raw_d, dy.type, count);
    Pack gates = widen_pack(raw_gate, gate_up.type, count);
    Pack ups = widen_pack(raw_up, gate_up.type, count);
#pragma unroll
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
}

// x / 2 (1 + tanh(z)) = x sigmoid(2 z).
constexpr float kGeluScale = 1.5957691216057308f, kGeluCube = 0.044715f;  // 2 sqrt(2 / pi)
__device__ float gelu_sigmoid(float x) {
    return sigmoid(kGeluScale * x * (1.0f + kGeluCube * x * x));
}

// Rows whose packs all lie at multiples of 16 bytes, of one type of 16 bits: a thread has the same
// pack of kRowsAtOnce rows, and all are under way before the first is worked on.
constexpr int kRowsAtOnce = 2;
struct WholeRows {
    const uint4* x;
    uint4* y;
    int64_t rows, x_packs, y_packs;  // from row to row
    unsigned across;                 // packs of a row
};
template <DType kType>
__global__ void __launch_bounds__(kThreads) whole_gelu_kernel(const WholeRows a) {
    const unsigned pieces = (a.across + blockDim.x - 1) / blockDim.x;
    const unsigned pack = blockIdx.x % pieces * blockDim.x + threadIdx.x;
    const int64_t first = int64_t{blockIdx.x / pieces} * kRowsAtOnce;
    if (pack >= a.across) return;
    uint4 raw[kRowsAtOnce];
#pragma unroll
    for (int n = 0; n < kRowsAtOnce; ++n)
        raw[n] = first + n < a.rows ? a.x[(first + n) * a.x_packs + pack] : uint4{};
#pragma unroll
    for (int n = 0; n < kRowsAtOnce; ++n) {
        Pack values = widen_pack({raw[n], {}}, kType, kPack);
#pragma unroll
        for (int k = 0; k < kPack; ++k) values.at[k] *= gelu_sigmoid(values.at[k]);
        if (first + n < a.rows) put_pack(values, a.y + (first + n) * a.y_packs + pack, kType);
    }
}

__global__ void gelu_forward_kernel(ConstView x, View y) {
    const auto [row, col, count] = cell_of(y.cols);
    if (count <= 0) return;
    Pack pack = load_pack(x, row, col, count);
#pragma unroll
    for (int i = 0; i < kPack; ++i) pack.at[i] *= gelu_sigmoid(pack.at[i]);
    store_pack(pack, y, row, col);
}

__global__ void gelu_backward_kernel(View dy, View x) {
    const auto [row, col, count] = cell_of(dy.cols);
    if (count <= 0) return;
    const RawPack raw_x = fetch_pack(x, row, col, count), raw_d = fetch_pack(dy, row, col, count);
    Pack pack = widen_pack(raw_x, x.type, count), d = widen_pack(raw_d, dy.type, count);
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
        const float value = pack.at[i], s = gelu_sigmoid(value);
        // d (x s(u)) = s + x s (1 - s) u'
        const float slope = kGeluScale * (1.0f + 3.0f * kGeluCube * value * value);
        pack.at[i] = d.at[i] * (s + value * s * ((1.0f - s) * slope));
        d.at[i] = value * s;
    }
    store_pack(d, dy, row, col);
    store_pack(pack, x, row, col);
}

__global__ void cast_kernel(ConstView from, View to) {
    const auto [row, col, count] = cell_of(to.cols);
    if (count > 0) store_pack(load_pack(from, row, col, count), to, row, col);
}

// A thread four elements.
__global__ void add_kernel(float* a, const float* b, int64_t count) {
    const int64_t i = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * 4;
    const bool fits = reinterpret_cast<uintptr_t>(a) % 16 == 0 &&
                      reinterpret_cast<uintptr_t>(b) % 16 == 0 && i + 4 <= count;
    if (!fits) {
        for (int64_t k = i; k < min(i + 4, count); ++k) a[k] += b[k];
        return;
    }
    auto& to = *reinterpret_cast<float4*>(a + i);
    const float4 x = to, y = *reinterpret_cast<const float4*>(b + i);
    to = make_float4(x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w);
}

__global__ void add_rows_kernel(ConstView part, View sums) {
    const auto [row, col, count] = cell_of(part.cols);
    if (count <= 0) return;
    const RawPack raw_part = fetch_pack(part, row, col, count);
    const RawPack raw_sums = fetch_pack(sums, row, col, count);
    const Pack more = widen_pack(raw_part, part.type, count);
    Pack pack = widen_pack(raw_sums, sums.type, count);
#pragma unroll
    for (int i = 0; i < kPack; ++i) pack.at[i] += more.at[i];
    store_pack(pack, sums, row, col);
}

__global__ void check_finite_kernel(ConstView x, uint32_t* nonfinite) {
    const auto [row, col, count] = cell_of(x.cols);
    if (count <= 0) return;
    const Pack pack = load_pack(x, row, col, count);
    bool bad = false;
#pragma unroll
    for (int i = 0; i < kPack; ++i) bad |= !isfinite(pack.at[i]);
    if (bad) atomicOr(nonfinite, 1u);
}

// A thread kChecks times 16 bytes, far enough apart that a warp's lie together. `exponent`: the
// bits that all are set in what is not finite, of each element of a word.
constexpr int kChecks = 8;
__global__ void __launch_bounds__(kThreads)
    check_words_kernel(const uint4* words, int64_t count, uint32_t exponent, uint32_t* nonfinite) {
    const int64_t first = int64_t{blockIdx.x} * kThreads * kChecks + threadIdx.x;
    uint4 four[kChecks];
#pragma unroll
    for (int k = 0; k < kChecks; ++k) {
        const int64_t i = first + k * kThreads;
        four[k] = i < count ? words[i] : uint4{};
    }
    bool bad = false;
#pragma unroll
    for (int k = 0; k < kChecks; ++k) {
        for (const uint32_t word : {four[k].x, four[k].y, four[k].z, four[k].w}) {
            const uint32_t low = exponent & 0xffffu, high = exponent & 0xffff0000u;
            bad |= low == 0 ? (word & high) == high : (word & low) == low || (word & high) == high;
        }
    }
    if (bad) atomicOr(nonfinite, 1u);
}

uint32_t exponent_of(DType type) {
    switch (type) {
        case DType::bf16:
            return 0x7f807f80u;
        case DType::f16:
            return 0x7c007c00u;
        default:
            return 0x7f800000u;
    }
}

}  // namespace

bool runs_here() {
    cudaFuncAttributes attributes;
    const bool runs = cudaFuncGetAttributes(&attributes, add_kernel) == cudaSuccess;
    cudaGetLastError();  // leaves no error behind for who asks next
    return runs;
}

void rope(View x, const Rope& rope, cudaStream_t stream) {
    const int64_t positions =
        rope.document_start != nullptr ? x.rows : std::min(rope.sequence, x.rows);
    if (positions == 0) return;
    Frequencies frequencies{};
    std::copy_n(rope.frequencies, rope.head_dim / 2, frequencies.of);
    rope_kernel<<<blocks_for(positions, 1), kThreads, 0, stream>>>(x, rope, frequencies);
    check_launch("rope");
}

int64_t rope_angles_floats(const Rope& rope) {
    return rope.head_dim == kRotatedHead ? rope.all_positions() * kRotatedHead : 0;
}

void rope_angles(const Rope& rope, float* angles, cudaStream_t stream) {
    Frequencies frequencies{};
    std::copy_n(rope.frequencies, rope.head_dim / 2, frequencies.of);
    const int64_t count = rope.all_positions() * (rope.head_dim / 2);
    angles_kernel<<<blocks_for(count, kThreads), kThreads, 0, stream>>>(
        rope, frequencies, reinterpret_cast<float2*>(angles));
    check_launch("angles of rope");
}

void swiglu_forward(ConstView gate_up, View y, cudaStream_t stream) {
    if (y.rows == 0 || y.cols == 0) return;
    const Cells cells = cells_of(y.rows, y.cols);
    swiglu_forward_kernel<<<cells.blocks, cells.threads, 0, stream>>>(gate_up, y);
    check_launch("swiglu forward");
}

void swiglu_backward(View dy, View gate_up, cudaStream_t stream) {
    if (dy.rows == 0 || dy.cols == 0) return;
    const Cells cells = cells_of(dy.rows, dy.cols);
    swiglu_backward_kernel<<<cells.blocks, cells.threads, 0, stream>>>(dy, gate_up);
    check_launch("swiglu backward");
}

namespace {

template <class AnyView>
bool has_whole_packs(const AnyView& v) {
    return v.cols % kPack == 0 && (v.ld % kPack == 0 || v.rows == 1) &&
           reinterpret_cast<uintptr_t>(v.data) % 16 == 0;
}

// As few threads as possible without a pack, as many as possible a block.
unsigned threads_for(int64_t packs) {
    constexpr int64_t kWarp = 32, kLeast = 128;
    int64_t best = kThreads;
    for (int64_t threads = kThreads; threads >= kLeast; threads -= kWarp) {
        if (round_up(packs, threads) < round_up(packs, best)) best = threads;
    }
    return static_cast<unsigned>(best);
}

// False, and nothing done, where rows do not lie so.
bool start_whole_gelu(ConstView x, View y, cudaStream_t stream) {
    if (x.type != y.type || x.type == DType::f32 || !has_whole_packs(x) || !has_whole_packs(y))
        return false;
    const int64_t packs = y.cols / kPack;
    const unsigned threads = threads_for(packs);
    const auto blocks = static_cast<unsigned>(ceil_div(y.rows, int64_t{kRowsAtOnce}) *
                                              ceil_div(packs, int64_t{threads}));
    const WholeRows rows{static_cast<const uint4*>(x.data),
                         static_cast<uint4*>(y.data),
                         y.rows,
                         x.ld / kPack,
                         y.ld / kPack,
                         static_cast<unsigned>(packs)};
    if (x.type == DType::bf16) {
        whole_gelu_kernel<DType::bf16><<<blocks, threads, 0, stream>>>(rows);
    } else {
        whole_gelu_kernel<DType::f16><<<blocks, threads, 0, stream>>>(rows);
    }
    check_launch("gelu forward");
    return true;
}

}  // namespace

void gelu_forward(ConstView x, View y, cudaStream_t stream) {
    if (y.rows == 0 || y.cols == 0) return;
    if (start_whole_gelu(x, y, stream)) return;
    const Cells cells = cells_of(y.rows, y.cols);
    gelu_forward_kernel<<<cells.blocks, cells.threads, 0, stream>>>(x, y);
    check_launch("gelu forward");
}

void gelu_backward(View dy, View x, cudaStream_t stream) {
    if (dy.rows == 0 || dy.cols == 0) return;
    const Cells cells = cells_of(dy.rows, dy.cols);
    gelu_backward_kernel<<<cells.blocks, cells.threads, 0, stream>>>(dy, x);
    check_launch("gelu backward");
}

void cast(ConstView from, View to, cudaStream_t stream) {
    if (to.rows == 0 || to.cols == 0) return;
    const Cells cells = cells_of(to.rows, to.cols);
    cast_kernel<<<cells.blocks, cells.threads, 0, stream>>>(from, to);
    check_launch("cast");
}

void add(float* a, const float* b, int64_t count, cudaStream_t stream) {
    if (count == 0) return;
    add_kernel<<<blocks_for(count, kThreads * 4), kThreads, 0, stream>>>(a, b, count);
    check_launch("add");
}

void add(ConstView part, View sums, cudaStream_t stream) {
    if (part.rows == 0 || part.cols == 0) return;
    const Cells cells = cells_of(part.rows, part.cols);
    add_rows_kernel<<<cells.blocks, cells.threads, 0, stream>>>(part, sums);
    check_launch("add rows");
}

void check_finite(ConstView x, uint32_t* nonfinite, cudaStream_t stream) {
    if (x.rows == 0 || x.cols == 0) return;
    const int64_t bytes = x.rows * x.cols * size_of(x.type);
    const bool together = (x.ld == x.cols || x.rows == 1) && bytes % 16 == 0 &&
                          reinterpret_cast<uintptr_t>(x.data) % 16 == 0;
    if (together) {
        const int64_t count = bytes / 16;
        check_words_kernel<<<blocks_for(count, kThreads * kChecks), kThreads, 0, stream>>>(
            static_cast<const uint4*>(x.data), count, exponent_of(x.type), nonfinite);
    } else {
        const Cells cells = cells_of(x.rows, x.cols);
        check_finite_kernel<<<cells.blocks, cells.threads, 0, stream>>>(x, nonfinite);
    }
    check_launch("check finite");
}

}  // namespace ferry::ops::cuda
