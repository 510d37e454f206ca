// The GPU's operations: checks of what the kernels can do, scratch, and the calls.
#include <cublasLt.h>
#include <cuda_runtime.h>

#include <algorithm>

#include "ops/cuda/attention/cudnn_attention.h"
#include "ops/cuda/attention/sparse_attention.h"
#include "ops/cuda/products/gemm.h"
#include "ops/cuda/products/newton_schulz.h"
#include "ops/cuda/shared/kernels.h"
#include "ops/cuda/shared/launch.h"
#include "ops/cuda/shared/slow_notes.h"
#include "ops/part_attention.h"
#include "ops/product_table.h"

namespace ferry::ops {
namespace cuda {

void check_launch(const char* kernel) { check_launch(kernel, cudaGetLastError()); }

void check_launch(const char* kernel, cudaError_t error) {
    if (error == cudaSuccess || gpu_work_failed()) return;
    if (error == cudaErrorMemoryAllocation) throw out_of_gpu_memory(kernel);
    throw Error(Trouble::internal, {.what = "CUDA did not start a kernel",
                                    .where = kernel,
                                    .measured = std::string(cudaGetErrorName(error)) + ", " +
                                                cudaGetErrorString(error)});
}

namespace {

std::string cublas_version() {
    const size_t version = cublasLtGetVersion();
    return "cuBLASLt " + std::to_string(version / 10000) + "." +
           std::to_string(version % 10000 / 100) + "." + std::to_string(version % 100);
}

float* floats(std::byte* bytes) { return reinterpret_cast<float*>(bytes); }

class CudaOps final : public Ops, public TunesProducts, public PartAttention {
public:
    CudaOps(cudaStream_t stream, int64_t workspace_bytes, AttentionKernels attention,
            int64_t most_slope_bytes, bool any_gpu, ProductTable products, std::string made_for)
        : stream_(stream),
          workspace_bytes_(workspace_bytes),
          made_for_(std::move(made_for)),
          products_(workspace_bytes, std::move(products)),
          cudnn_(attention == AttentionKernels::best
                     ? CudnnAttention::make(stream, most_slope_bytes)
                     : nullptr),
          blocks_(stream, any_gpu) {}

    std::vector<SlowPath> slow_paths() const { return slow_.all(); }
    const ProductTable& given_products() const override { return products_.given(); }
    void tune_products() override { products_.tune(made_for_); }
    const ProductTable& tuned_products() const override { return products_.tuned(); }

    int64_t gemm_scratch_bytes(const Gemm& g) const override {
        const int64_t elements = g.c.rows * g.c.cols;
        const bool in_depth = Products::takes_with_bias_in_depth(g);
        const int64_t sum = Products::takes(g) || in_depth ? 0 : elements * 4;
        if (sum > 0) slow_.note(g);
        const int64_t before = g.form == Form::nn && odd_columns(g) > 0 ? elements * 4 : 0;
        const int64_t copy = g.c.type == DType::f32 || g.addend.cols == 0
                                 ? 0
                                 : std::min(kCopyBytes, elements * size_of(g.c.type));
        return kWorkspaceUnit + workspace_bytes_ + (in_depth ? bytes_of(room_for_b(g)) : 0) +
               std::max({sum, copy, before});
    }

    void gemm(const Gemm& g, std::byte* scratch) override {
        FERRY_CHECK(g.a.type == g.b.type && (!g.accumulate || g.c.type == DType::f32));
        if (g.c.rows == 0 || g.c.cols == 0) return;
        const int64_t depth = g.form == Form::tn ? g.a.rows : g.a.cols;
        if (depth == 0) return plain_gemm(g, stream_);
        FERRY_CHECK(scratch != nullptr);
        std::byte* workspace = workspace_in(scratch);
        std::byte* room = workspace + workspace_bytes_;
        if (const int64_t edge = edge_of(g); edge > 0) return by_parts(g, edge, scratch);
        if (Products::takes_with_bias_in_depth(g)) {
            const Gemm whole = with_bias_in_depth(g, room);
            return rounded_once(whole, workspace, room + bytes_of(room_for_b(g)));
        }
        if (Products::takes(g)) return rounded_once(g, workspace, room);
        float* sum = floats(room);
        const Gemm only{
            .form = g.form, .a = g.a, .b = g.b, .c = View::of(sum, DType::f32, g.c.rows, g.c.cols)};
        if (!products_.run(only, workspace, stream_)) return plain_gemm(g, stream_);
        finish_gemm(g, sum, stream_);
    }

    void norm_forward(ConstView x, ConstView weight, double eps, View y, float* rstd) override {
        cuda::norm_forward(x, weight, eps, y, rstd, stream_);
    }

    int64_t norm_backward_scratch_bytes(int64_t rows, int64_t n) const override {
        return ceil_div(rows, kNormRows) * n * 4;
    }
    void norm_backward(ConstView dy, ConstView x, ConstView weight, const float* rstd,
                       ConstView addend, View dx, Accumulator weight_gradient,
                       std::byte* scratch) override {
        cuda::norm_backward(dy, x, weight, rstd, addend, dx, weight_gradient, floats(scratch),
                            stream_);
    }

    void layer_norm_forward(ConstView x, ConstView weight, ConstView bias, double eps, View y,
                            float* stats) override {
        cuda::layer_norm_forward(x, weight, bias, eps, y, stats, stream_);
    }
    int64_t layer_norm_backward_scratch_bytes(int64_t rows, int64_t n) const override {
        return 2 * norm_backward_scratch_bytes(rows, n);
    }
    void layer_norm_backward(ConstView dy, ConstView x, ConstView weight, const float* stats,
                             ConstView addend, View dx, Accumulator weight_gradient,
                             Accumulator bias_gradient, std::byte* scratch) override {
        cuda::layer_norm_backward(dy, x, weight, stats, addend, dx, weight_gradient, bias_gradient,
                                  floats(scratch), stream_);
    }
    void sum_rows(ConstView x, Accumulator sums, std::byte* scratch) override {
        cuda::sum_rows(x, sums, floats(scratch), stream_);
    }

    void rope(View x, const Rope& rope) override {
        FERRY_CHECK(rope.head_dim <= SparseAttention::kMaxHeadDim);
        cuda::rope(x, rope, stream_);
    }
    int64_t rope_angles_floats(const Rope& rope) const override {
        return cuda::rope_angles_floats(rope);
    }
    void rope_angles(const Rope& rope, float* angles) override {
        if (cuda::rope_angles_floats(rope) > 0) cuda::rope_angles(rope, angles, stream_);
    }
    void norm_rope_forward(ConstView x, ConstView weight, double eps, View y, float* rstd,
                           const Rope& rope, const float* angles) override {
        if (!cuda::norm_rope_forward(x, weight, eps, y, rstd, rope, angles, stream_))
            Ops::norm_rope_forward(x, weight, eps, y, rstd, rope, angles);
    }
    void norm_rope_backward(View d, ConstView x, ConstView weight, const float* rstd,
                            Accumulator weight_gradient, const Rope& rope, const float* angles,
                            std::byte* scratch) override {
        if (!cuda::norm_rope_backward(d, x, weight, rstd, weight_gradient, rope, angles,
                                      floats(scratch), stream_))
            Ops::norm_rope_backward(d, x, weight, rstd, weight_gradient, rope, angles, scratch);
    }

    int64_t attention_forward_scratch_bytes(const Attention& shape) const override {
        check(shape);
        if (by_blocks(shape)) return kWorkspaceUnit + blocks_.forward_bytes(shape);
        const auto cudnn = cudnn_ ? cudnn_->forward_bytes(shape) : std::nullopt;
        if (!cudnn) slow_.note(shape, false, why_own(shape, false));
        return cudnn ? kWorkspaceUnit + *cudnn : 0;
    }
    void attention_forward(const Attention& shape, ConstView q, ConstView k, ConstView v, View out,
                           float* lse, std::byte* scratch) override {
        FERRY_CHECK(q.type == shape.type);
        if (by_blocks(shape))
            return blocks_.forward(shape, q, k, v, out, lse, workspace_in(scratch));
        if (cudnn_ && cudnn_->forward(shape, q, k, v, out, lse, workspace_in(scratch))) return;
        cuda::attention_forward(shape, q, k, v, out, lse, stream_);
    }
    int64_t attention_backward_scratch_bytes(const Attention& shape) const override {
        check(shape);
        if (back_by_blocks(shape)) return kWorkspaceUnit + blocks_.backward_bytes(shape);
        const auto cudnn = cudnn_ ? cudnn_->backward_bytes(shape) : std::nullopt;
        if (!cudnn) slow_.note(shape, true, why_own(shape, true));
        return cudnn ? kWorkspaceUnit + *cudnn : shape.heads * shape.sequences * shape.sequence * 4;
    }
    void attention_backward(const Attention& shape, ConstView q, ConstView k, ConstView v,
                            ConstView out, ConstView dout, const float* lse, View dq, View dk,
                            View dv, std::byte* scratch) override {
        FERRY_CHECK(q.type == shape.type);
        const BackwardOperands all{q, k, v, out, dout, lse, dq, dk, dv};
        if (back_by_blocks(shape)) return blocks_.backward(shape, all, workspace_in(scratch));
        if (cudnn_ && cudnn_->backward(shape, all, workspace_in(scratch))) return;
        cuda::attention_backward(shape, q, k, v, out, dout, lse, dq, dk, dv, floats(scratch),
                                 stream_);
    }

    int64_t part_scratch_bytes(const Attention& shape, int64_t queries,
                               int64_t keys) const override {
        check_parts(shape);
        return kWorkspaceUnit + blocks_.part_bytes(shape, queries, keys);
    }
    void part_forward(const Attention& shape, SequencePart queries, SequencePart keys, ConstView q,
                      ConstView k, ConstView v, View out, float* lse, std::byte* scratch) override {
        blocks_.part_forward(shape, queries, keys, q, k, v, out, lse, workspace_in(scratch));
    }
    void part_backward(const Attention& shape, SequencePart queries, SequencePart keys, ConstView q,
                       ConstView k, ConstView v, ConstView out, ConstView dout, const float* lse,
                       View dq, View dk, View dv, std::byte* scratch) override {
        blocks_.part_backward(shape, queries, keys, {q, k, v, out, dout, lse, dq, dk, dv},
                              workspace_in(scratch));
    }
    void merge_parts(int64_t heads, ConstView part, const float* part_lse, View sum,
                     float* sum_lse) override {
        cuda::merge_parts(heads, part, part_lse, sum, sum_lse, stream_);
    }

    void swiglu_forward(ConstView gate_up, View y) override {
        cuda::swiglu_forward(gate_up, y, stream_);
    }
    void swiglu_backward(View dy, View gate_up) override {
        cuda::swiglu_backward(dy, gate_up, stream_);
    }

    void gelu_forward(ConstView x, View y) override { cuda::gelu_forward(x, y, stream_); }
    void gelu_backward(View dy, View x) override { cuda::gelu_backward(dy, x, stream_); }

    void own_rows(const int32_t* tokens, int64_t count, int64_t first, int64_t rows,
                  int32_t* own) override {
        cuda::own_rows(tokens, count, first, rows, own, stream_);
    }
    void embed(const int32_t* tokens, ConstView table, ConstView positions,
               const int32_t* document_start, View x) override {
        cuda::embed(tokens, table, positions, document_start, x, stream_);
    }
    int64_t embed_backward_scratch_bytes(int64_t tokens) const override {
        return cuda::embed_backward_scratch_bytes(tokens);
    }
    void embed_backward(const int32_t* tokens, ConstView dx, float* gradient,
                        std::byte* scratch) override {
        cuda::embed_backward(tokens, dx, gradient, scratch, stream_);
    }
    void positions_backward(ConstView dx, int64_t sequence, const int32_t* document_start,
                            float* gradient, std::byte* scratch) override {
        cuda::positions_backward(dx, sequence, document_start, gradient, scratch, stream_);
    }

    int64_t cross_entropy_scratch_bytes(int64_t tokens) const override { return tokens * 8; }
    void cross_entropy(ConstView logits, const int32_t* targets, float scale, View dlogits,
                       double* loss_sum, std::byte* scratch) override {
        cuda::cross_entropy(logits, targets, scale, dlogits, loss_sum,
                            reinterpret_cast<double*>(scratch), stream_);
    }
    void loss_parts(ConstView logits, const int32_t* own_targets, double* parts) override {
        cuda::loss_parts(logits, own_targets, parts, stream_);
    }
    void cross_entropy_of_parts(ConstView logits, const LossTargets& targets, const double* parts,
                                int ranks, float scale, View dlogits, double* loss_sum,
                                std::byte* scratch) override {
        cuda::cross_entropy_of_parts(logits, targets, parts, ranks, scale, dlogits, loss_sum,
                                     reinterpret_cast<double*>(scratch), stream_);
    }

    void round_gradient(const float* accumulator, int64_t count, DType wire_type, void* wire,
                        float* leaves) override {
        cuda::round_gradient(accumulator, count, wire_type, wire, leaves, stream_);
    }
    void sum_gradient(ConstView parts, void* wire, float* leaves) override {
        cuda::sum_gradient(parts, wire, leaves, stream_);
    }

    void add(float* a, const float* b, int64_t count) override { cuda::add(a, b, count, stream_); }
    void fill_zero(void* data, int64_t bytes) override {
        cudaMemsetAsync(data, 0, static_cast<size_t>(bytes), stream_);
        check_launch("fill zero");
    }
    void cast(ConstView from, View to) override { cuda::cast(from, to, stream_); }
    void copy_out(ConstView from, View to) override {
        FERRY_CHECK(from.type == to.type);
        const auto pitch = [](const auto& v) {
            return static_cast<size_t>(v.ld * size_of(v.type));
        };
        cudaMemcpy2DAsync(to.data, pitch(to), from.data, pitch(from),
                          static_cast<size_t>(to.cols * size_of(to.type)),
                          static_cast<size_t>(to.rows), cudaMemcpyDefault, stream_);
        check_launch("copy out");
    }
    void check_finite(ConstView x, uint32_t* nonfinite) override {
        cuda::check_finite(x, nonfinite, stream_);
    }

private:
    static constexpr int64_t kWorkspaceUnit = 256;
    static constexpr int64_t kCopyBytes = 32 * kMiB;

    // Libraries' workspaces begin at multiples of 256 bytes.
    static std::byte* workspace_in(std::byte* scratch) {
        const auto at = reinterpret_cast<uintptr_t>(scratch);
        return scratch + (kWorkspaceUnit - at % kWorkspaceUnit) % kWorkspaceUnit;
    }

    void product(const Gemm& g, std::byte* workspace) {
        if (!products_.run(g, workspace, stream_)) plain_gemm(g, stream_);
    }
    void rounded_once(const Gemm& g, std::byte* workspace, std::byte* room) {
        const bool in_place = g.addend.data == g.c.data && g.c.type != DType::f32;
        return in_place ? add_to_itself(g, workspace, room) : product(g, workspace);
    }

    // Columns of c (nt) or of a (its depth in nn, c's rows in tn) behind the last multiple of
    // kTensorUnit, of 16-bit products.
    static int64_t odd_columns(const Gemm& g) {
        const int64_t cols = g.form == Form::nt ? g.c.cols : g.a.cols;
        if (size_of(g.a.type) != 2 || g.bias.cols > 0 || cols < kTensorUnit) return 0;
        return cols % kTensorUnit;
    }
    // The same, where nothing else keeps the tensor cores from what is before: an odd vocabulary,
    // whose rows of logits begin at even places. By shapes and strides alone.
    static int64_t edge_of(const Gemm& g) {
        const int64_t others = g.form == Form::nt ? g.a.cols : g.c.cols;
        for (const int64_t even : {others, g.a.ld, g.b.ld, g.c.ld, g.addend.ld})
            if (even % kTensorUnit != 0) return 0;
        return odd_columns(g);
    }

    // The last `edge` columns of c, its last rows, or the last of the depth are a product apart.
    void by_parts(const Gemm& g, int64_t edge, std::byte* scratch) {
        if (g.form == Form::nn) return by_parts_of_depth(g, edge, scratch);
        const bool columns = g.form == Form::nt;
        const int64_t n = (columns ? g.c.cols : g.c.rows) - edge;
        const auto part = [&](int64_t first, int64_t count) {
            const auto along_c = [&](const auto& v) {
                return columns ? v.col_range(first, count) : v.row_range(first, count);
            };
            Gemm found = g;
            if (columns) {
                found.b = g.b.row_range(first, count);
            } else {
                found.a = g.a.col_range(first, count);
            }
            found.c = along_c(g.c);
            if (g.addend.cols > 0) found.addend = along_c(g.addend);
            return found;
        };
        gemm(part(0, n), scratch);
        if (columns) return columns_of_gemm(part(n, edge), stream_);
        rows_of_gemm(part(n, edge), stream_);
    }

    void by_parts_of_depth(const Gemm& g, int64_t edge, std::byte* scratch) {
        const int64_t n = g.a.cols - edge;
        std::byte* workspace = workspace_in(scratch);
        float* sum = floats(workspace + workspace_bytes_);
        Gemm last = g;
        last.a = g.a.col_range(n, edge);
        last.b = g.b.row_range(n, edge);
        product({.form = Form::nn,
                 .a = g.a.col_range(0, n),
                 .b = g.b.row_range(0, n),
                 .c = View::of(sum, DType::f32, g.c.rows, g.c.cols)},
                workspace);
        finish_depth(last, sum, stream_);
    }

    // b with kSpare more rows, or columns where the form is nt, in scratch.
    static View room_for_b(const Gemm& g) {
        return g.form == Form::nt
                   ? View{nullptr, g.b.type, g.b.rows, g.b.cols + kSpare, room_ld(g.b.cols)}
                   : View::of(nullptr, g.b.type, g.b.rows + kSpare, g.b.cols);
    }
    static int64_t room_ld(int64_t cols) { return round_up(cols + kSpare, 64); }
    static int64_t bytes_of(const View& v) {
        return round_up(v.rows * v.ld * size_of(v.type), kWorkspaceUnit);
    }

    // [a 1] [b; bias] = a b + bias, in the fp32 sum of the product: cuBLASLt's epilogue for a bias
    // rounds twice into 16 bits. A copy of b is small beside c.
    Gemm with_bias_in_depth(const Gemm& g, std::byte* room) {
        FERRY_CHECK(g.spare == kSpare && g.a.ld >= g.a.cols + kSpare);
        const bool nt = g.form == Form::nt;
        View b = room_for_b(g);
        b.data = room;
        copy_out(g.b, b.block(0, g.b.rows, 0, g.b.cols));
        const View a{const_cast<void*>(g.a.data), g.a.type, g.a.rows, g.a.cols + kSpare, g.a.ld};
        write_bias_edges(a.col_range(g.a.cols, kSpare), g.bias,
                         nt ? b.col_range(g.b.cols, kSpare) : b.row_range(g.b.rows, kSpare), g.form,
                         stream_);
        Gemm whole = g;
        whole.a = a;
        whole.b = b;
        whole.bias = {};
        whole.spare = 0;
        return whole;
    }

    // In place, cuBLASLt 13.1's kernels for Hopper round a 16-bit product before they add c, and
    // round again: so what is added is copied first, as many rows at a time as there is room for.
    void add_to_itself(const Gemm& g, std::byte* workspace, std::byte* room) {
        const auto row_bytes = static_cast<size_t>(g.c.cols * size_of(g.c.type));
        int64_t most = kCopyBytes / static_cast<int64_t>(row_bytes);
        FERRY_CHECK(most > 0, "a row of a product is wider than the room for a copy of it");
        if (most > 256) most = round_down(most, 256);
        for (int64_t first = 0; first < g.c.rows; first += most) {
            const int64_t rows = std::min(most, g.c.rows - first);
            Gemm part = g;
            part.a = g.form == Form::tn ? g.a.col_range(first, rows) : g.a.row_range(first, rows);
            part.c = g.c.row_range(first, rows);
            part.addend = ConstView::of(room, g.c.type, rows, g.c.cols);
            cudaMemcpy2DAsync(room, row_bytes, part.c.data,
                              static_cast<size_t>(g.c.ld * size_of(g.c.type)), row_bytes,
                              static_cast<size_t>(rows), cudaMemcpyDeviceToDevice, stream_);
            check_launch("copy of what a product is added to");
            product(part, workspace);
        }
    }

    std::string why_own(const Attention& shape, bool backward) const {
        return cudnn_ ? cudnn_->why_not(shape, backward)
                      : "cuDNN is not asked, or not in this build";
    }

    // Patterns, documents, and heads that are wider than the dense kernels' go by lists of blocks.
    static bool by_blocks(const Attention& shape) {
        return !shape.dense() || shape.head_dim > kMaxHeadDim;
    }
    // Their log-sum-exps are cuDNN's, so either may follow the other's forward pass.
    bool back_by_blocks(const Attention& shape) const {
        return by_blocks(shape) || (cudnn_ && blocks_.is_faster_backward(shape));
    }
    void check(const Attention& shape) const {
        if (!by_blocks(shape)) return;
        const std::string why = blocks_.why_not(shape);
        if (why.empty()) return;
        const bool wide = shape.dense();
        throw Error(
            Trouble::usage,
            {.what = wide ? "the GPU's attention does not do heads this wide"
                          : "the GPU's attention does not do this mask",
             .where = wide              ? "model.head_dim"
                      : shape.documents ? "data.isolate_documents"
                                        : "attention.pattern",
             .measured = wide ? std::to_string(shape.head_dim) + ": " + why : why,
             .limit = wide ? std::to_string(kMaxHeadDim) : "",
             .remedy = wide ? "set device to cpu" : "set device to cpu, or leave the key out"});
    }

    void check_parts(const Attention& shape) const {
        check(shape);
        const std::string why = blocks_.why_not(shape);
        if (why.empty()) return;
        throw Error(Trouble::usage,
                    {.what = "the GPU's attention has no parts of this sequence, which ranks in a "
                             "ring attend",
                     .where = "parallel.sequence_order",
                     .measured = why,
                     .remedy = "set it to \"heads\", or device to \"cpu\""});
    }

    cudaStream_t stream_;
    int64_t workspace_bytes_;
    std::string made_for_;  // of a table of products
    Products products_;
    std::unique_ptr<CudnnAttention> cudnn_;  // null: not wanted, or not in this build
    mutable SparseAttention blocks_;         // loads its kernels where they are first asked for
    mutable SlowPathNotes slow_{};
};

// Of the products on the device, which is the GPU that is current.
int64_t workspace_of(const Device& device) {
    FERRY_CHECK(device.kind() == DeviceKind::cuda);
    int gpu = 0, major = 0, minor = 0;
    check_launch("cudaGetDevice", cudaGetDevice(&gpu));
    for (const auto& [part, value] : {std::pair{cudaDevAttrComputeCapabilityMajor, &major},
                                      std::pair{cudaDevAttrComputeCapabilityMinor, &minor}})
        check_launch("cudaDeviceGetAttribute", cudaDeviceGetAttribute(value, part, gpu));
    return (major == 9 && minor == 0 ? 32 : 8) * kMiB;
}

}  // namespace

std::unique_ptr<Ops> ops_on_stream(Device& device, cudaStream_t stream) {
    return std::make_unique<CudaOps>(stream, workspace_of(device), AttentionKernels::ferry, 0,
                                     false, ProductTable(), "");
}

}  // namespace cuda

std::unique_ptr<Ops> make_cuda_ops(Device& device, AttentionKernels attention,
                                   int64_t most_slope_bytes, bool any_gpu,
                                   const ProductTable* products) {
    FERRY_CHECK(device.kind() == DeviceKind::cuda);
    const std::string architecture = device.architecture();
    if (!cuda::runs_here()) {
        throw Error(Trouble::usage,
                    {.what = "this ferry has no kernels for this GPU",
                     .where = "device",
                     .measured = architecture,
                     .remedy = "build it with -DFERRY_CUDA_ARCHITECTURES for this GPU, or set "
                               "device to cpu"});
    }
    const int64_t workspace = cuda::workspace_of(device);
    auto* stream = static_cast<cudaStream_t>(device.stream(StreamKind::compute).native());
    const std::string made_for = architecture + ", " + cuda::cublas_version();
    if (products != nullptr && products->made_for() != made_for) {
        throw Error(Trouble::usage, {.what = "the table of products is of another GPU or library",
                                     .where = "numerics.products",
                                     .measured = products->made_for(),
                                     .limit = made_for,
                                     .remedy = "write one here with ferry bench kernels --tune"});
    }
    return std::make_unique<cuda::CudaOps>(stream, workspace, attention, most_slope_bytes, any_gpu,
                                           products == nullptr ? ProductTable() : *products,
                                           made_for);
}

std::vector<SlowPath> slow_paths(const Ops& ops) {
    const auto* known = dynamic_cast<const cuda::CudaOps*>(&ops);
    return known == nullptr ? std::vector<SlowPath>{} : known->slow_paths();
}

std::string cuda_library_versions(AttentionKernels attention) {
    const std::string cublas = cuda::cublas_version();
    const std::string cudnn =
        attention == AttentionKernels::best ? cuda::cudnn_version() : std::string();
    const std::string triton = cuda::triton_version();
    return cublas + (cudnn.empty() ? "" : ", attention cuDNN " + cudnn) +
           (triton.empty() ? "" : ", Triton " + triton);
}

}  // namespace ferry::ops
