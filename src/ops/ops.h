// The operations of a decoder block, about twenty coarse ones. No other code knows what a device
// computes with. An Ops is bound to one compute stream when it is made. On the CPU an operation
// runs on the calling thread and its Team, on CUDA it enqueues. Operations never allocate and never
// wait for the device. What they need beside their arguments is `scratch` (64-byte aligned,
// contents undefined). Its `..._scratch_bytes` companion tells the size at plan time.
//
// Results depend on values, shapes and types alone. They do not depend on the thread count, on
// alignment or on where a tile begins. All arithmetic is fp32 or wider. An output is rounded once
// (nearest even).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "ferry/device.h"
#include "ferry/device_kind.h"
#include "ferry/dtype.h"
#include "ferry/team.h"
#include "ops/block_lists.h"
#include "ops/view.h"

namespace ferry::ops {

// nn: c[m, n] = a[m, k] b[k, n]; nt: b is [n, k]; tn: a is [k, m] (a weight's gradient).
enum class Form : uint8_t { nn, nt, tn };

// c = round(a b + bias + addend + (accumulate ? c : 0)).
struct Gemm {
    Form form = Form::nn;
    ConstView a{}, b{};  // both have one type
    View c{};
    bool accumulate = false;  // needs fp32 c
    // For a product that accumulates: nothing was added yet. c is not read, and counts as zeros.
    // The algorithm is the same, so that later sums have one order. A sum that underflows may be
    // -0; added to zeros it would be +0.
    bool fresh = false;
    ConstView bias{};    // [1, n], optional
    ConstView addend{};  // [m, n], optional; may be c itself
    // Unused columns right behind a's, within its ld: 0 or kSpare. What lies there is never read
    // and may be overwritten. A GPU uses them to take the bias of a product into its depth.
    int64_t spare = 0;
    constexpr bool reads_c() const { return accumulate && !fresh; }
};
constexpr int64_t kSpare = 8;

// fp32 sums of a gradient, which an operation adds to. Null: nobody asks for them. `fresh`: nothing
// was added yet. What lies there is not read, and counts as zeros to the bit: a sum of -0 is
// written as 0 + -0 = +0. Only a product's (Gemm::fresh) may stay -0.
struct Accumulator {
    // NOLINTNEXTLINE(google-explicit-constructor): most sums are added to.
    constexpr Accumulator(float* sums = nullptr, bool is_fresh = false)
        : at(sums), fresh(is_fresh) {}
    float* at = nullptr;
    bool fresh = false;
    constexpr bool asked() const { return at != nullptr; }
    constexpr float of(int64_t i) const { return fresh ? 0.0f : at[i]; }
};

// A query sees a key iff the key is not behind it, and within the window, and its block is in the
// pattern, and its document is the query's. A query that sees none has output 0, gradient 0 and
// log-sum-exp -infinity. Blocks that are not in the pattern are never touched.
struct Attention {
    int64_t sequences = 0, sequence = 0;  // tokens = sequences * sequence
    int64_t heads = 0, kv_heads = 0, head_dim = 0;
    double scale = 0;
    DType type = DType::f32;  // of queries, keys, values, outputs and their gradients
    int64_t window = 0;       // keys that a query sees, its own and those before it; 0: all of them
    // Null: every block. The lists lie in host memory, and exist at plan time as well. A kernel
    // reads `blocks`, which has the same in its device's memory.
    const BlockLists* pattern = nullptr;
    BlockListsView blocks{};
    // Whether a row holds documents that do not see each other; said at plan time, when there are
    // no pointers yet. [sequences, sequence] each, in the device's memory: where in its row the
    // document of a token begins, and one past its last token. Documents are runs of tokens, and
    // every token is in one: a block of queries sees no key before document_start of its first, a
    // block of keys is seen by no query from document_end of its last token on.
    bool documents = false;
    const int32_t* document_start = nullptr;
    const int32_t* document_end = nullptr;
    constexpr bool dense() const { return pattern == nullptr && !documents; }
    // Where the log-sum-exp of a row of the queries stands: [sequences, heads, sequence].
    constexpr int64_t lse_index(int64_t row, int64_t head) const {
        return (row / sequence * heads + head) * sequence + row % sequence;
    }
    // The first key, within the sequence, that the query at `position` sees.
    constexpr int64_t first_key(int64_t position) const {
        return window == 0 || position < window ? 0 : position - window + 1;
    }
    // One more than the last query that sees the key at `position`.
    constexpr int64_t end_query(int64_t position) const {
        return window == 0 || sequence - position < window ? sequence : position + window;
    }
};

// Rotation of pairs (i, i + head_dim / 2) by position * frequencies[i], times `amplitude`, as
// Hugging Face's rotate_half. Angles are computed in double.
struct Rope {
    int64_t sequence = 0;  // row r has position r % sequence, less document_start[r]
    int64_t heads = 0, head_dim = 0;
    const double* frequencies = nullptr;  // [head_dim / 2], host memory, read during the call
    double amplitude = 1;
    bool inverse = false;                     // the transpose: the backward pass
    const int32_t* document_start = nullptr;  // as Attention's; null: all 0
    int64_t positions = 0;  // that a row can have, from 0 on; 0: as many as a sequence
    constexpr int64_t all_positions() const { return positions > 0 ? positions : sequence; }
};

class ProductTable;

class Ops {
public:
    virtual ~Ops() = default;

    virtual int64_t gemm_scratch_bytes(const Gemm& shape) const = 0;  // `data` is not read
    virtual void gemm(const Gemm& gemm, std::byte* scratch) = 0;

    // RMSNorm of each run of n = weight.cols columns of a row, such as a head: y = x * rstd *
    // weight, rstd = 1 / sqrt(mean(x^2) + eps). x, y: [tokens, runs * n]; weight: [1, n]; rstd:
    // [tokens, runs].
    virtual void norm_forward(ConstView x, ConstView weight, double eps, View y, float* rstd) = 0;
    // dx = addend + d(x); addend optional (null data), of dx's type and may be dx itself.
    // dx optional; may be dy. weight_gradient (fp32 [n], optional): adds the sum over tokens and
    // runs. rows: tokens * runs.
    virtual int64_t norm_backward_scratch_bytes(int64_t rows, int64_t n) const = 0;
    virtual void norm_backward(ConstView dy, ConstView x, ConstView weight, const float* rstd,
                               ConstView addend, View dx, Accumulator weight_gradient,
                               std::byte* scratch) = 0;

    // LayerNorm: y = (x - mean(x)) * rstd * weight + bias, rstd = 1 / sqrt(variance(x) + eps).
    // x, y: [tokens, n]; weight, bias: [1, n]; stats: [2, tokens], means and then rstds.
    virtual void layer_norm_forward(ConstView x, ConstView weight, ConstView bias, double eps,
                                    View y, float* stats) = 0;
    // Like norm_backward. bias_gradient (fp32 [n], optional): adds the sum over tokens of dy.
    virtual int64_t layer_norm_backward_scratch_bytes(int64_t rows, int64_t n) const = 0;
    virtual void layer_norm_backward(ConstView dy, ConstView x, ConstView weight,
                                     const float* stats, ConstView addend, View dx,
                                     Accumulator weight_gradient, Accumulator bias_gradient,
                                     std::byte* scratch) = 0;

    // sums += the sum over rows of x. sums: fp32 [cols]. Scratch as norm_backward's.
    virtual void sum_rows(ConstView x, Accumulator sums, std::byte* scratch) = 0;

    // Works in place on x: [tokens, heads * head_dim].
    virtual void rope(View x, const Rope& rope) = 0;

    // norm_forward of every head of x, then rope of the result. A device that can makes both in one
    // pass, with the same bits. angles: from rope_angles of the same rope, whose direction and
    // documents may differ.
    virtual int64_t rope_angles_floats(const Rope&) const { return 0; }
    virtual void rope_angles(const Rope&, float* /*angles*/) {}
    virtual void norm_rope_forward(ConstView x, ConstView weight, double eps, View y, float* rstd,
                                   const Rope& rope, const float* /*angles*/) {
        norm_forward(x, weight, eps, y, rstd);
        this->rope(y, rope);
    }
    // rope of d, and then norm_backward of what it gave, to the bit. d: d(y), becomes d(x). Scratch
    // as norm_backward's.
    virtual void norm_rope_backward(View d, ConstView x, ConstView weight, const float* rstd,
                                    Accumulator weight_gradient, const Rope& rope,
                                    const float* /*angles*/, std::byte* scratch) {
        this->rope(d, rope);
        norm_backward(d, x, weight, rstd, {}, d, weight_gradient, scratch);
    }

    // Causal, grouped queries: head h reads key/value head h / (heads / kv_heads).
    // q, out: [tokens, heads * head_dim]; k, v: [tokens, kv_heads * head_dim]; lse: the log-sum-exp
    // of each row of scores, at lse_index, for the backward pass.
    virtual int64_t attention_forward_scratch_bytes(const Attention& shape) const = 0;
    virtual void attention_forward(const Attention& shape, ConstView q, ConstView k, ConstView v,
                                   View out, float* lse, std::byte* scratch) = 0;
    // dq, dk, dv may share their buffers' rows with q, k, v only if they do not overlap them.
    virtual int64_t attention_backward_scratch_bytes(const Attention& shape) const = 0;
    virtual void attention_backward(const Attention& shape, ConstView q, ConstView k, ConstView v,
                                    ConstView out, ConstView dout, const float* lse, View dq,
                                    View dk, View dv, std::byte* scratch) = 0;

    // y = silu(gate) * up; gate_up: [tokens, 2 n] = [gate | up]; y: [tokens, n].
    virtual void swiglu_forward(ConstView gate_up, View y) = 0;
    // gate_up becomes [d gate | d up], and dy the y that forward gave.
    virtual void swiglu_backward(View dy, View gate_up) = 0;

    // y = x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))). x, y: [tokens, n].
    virtual void gelu_forward(ConstView x, View y) = 0;
    // x becomes d(x), and dy the y that forward gave.
    virtual void gelu_backward(View dy, View x) = 0;

    // Of a table of which rows [first, first + rows) are here: own[t] = tokens[t] - first, or -1
    // where another rank has the token's row, and where there is no token.
    virtual void own_rows(const int32_t* tokens, int64_t count, int64_t first, int64_t rows,
                          int32_t* own) = 0;

    // x[t] = table[tokens[t]] + positions[t % positions.rows - document_start[t]], or zeros where
    // the token is -1; positions optional; document_start as Attention's, null: all 0. Of a part of
    // a sequence it may be below 0: then `positions` has more rows behind those that it says.
    virtual void embed(const int32_t* tokens, ConstView table, ConstView positions,
                       const int32_t* document_start, View x) = 0;
    // gradient[tokens[t]] += dx[t], in the order of t, but for tokens -1. gradient: fp32 [vocab,
    // hidden].
    virtual int64_t embed_backward_scratch_bytes(int64_t tokens) const = 0;
    virtual void embed_backward(const int32_t* tokens, ConstView dx, float* gradient,
                                std::byte* scratch) = 0;
    // gradient[t % sequence - document_start[t]] += dx[t], in the order of t; document_start null:
    // all 0. gradient: fp32 [sequence, hidden]. Scratch as embed_backward's.
    virtual void positions_backward(ConstView dx, int64_t sequence, const int32_t* document_start,
                                    float* gradient, std::byte* scratch) = 0;

    // Softmax cross-entropy of a tile of logits (fp32 [tokens, vocab]); targets -1 are ignored.
    // *loss_sum += the tile's losses, in double, in token order; on a GPU in an order that follows
    // from the number of tokens. dlogits (optional; may be `logits` when fp32) = scale * (softmax -
    // onehot), zero rows where ignored.
    virtual int64_t cross_entropy_scratch_bytes(int64_t tokens) const = 0;
    virtual void cross_entropy(ConstView logits, const int32_t* targets, float scale, View dlogits,
                               double* loss_sum, std::byte* scratch) = 0;

    // The same where several ranks have some columns of the logits each. What they tell each other
    // of a row is kLossParts numbers: the largest of their logits, the sum of exp(logit - largest),
    // and the target's logit, or 0 where another has it. own_targets: as own_rows gives them.
    // parts: [tokens, kLossParts].
    static constexpr int64_t kLossParts = 3;
    virtual void loss_parts(ConstView logits, const int32_t* own_targets, double* parts) = 0;
    // cross_entropy of this rank's columns, from what all ranks told, in rank order: parts is
    // [ranks, tokens, kLossParts]. targets: of the whole rows. Scratch as cross_entropy's.
    struct LossTargets {
        const int32_t *targets = nullptr, *own = nullptr;
    };
    virtual void cross_entropy_of_parts(ConstView logits, const LossTargets& targets,
                                        const double* parts, int ranks, float scale, View dlogits,
                                        double* loss_sum, std::byte* scratch) = 0;

    // An accumulated gradient becomes its one value: wire = round(accumulator), and one fp32 sum of
    // squares of the rounded values per 4,096 elements. The tree of a leaf, in fp32: lane j of 16
    // adds the squares of elements j, j + 16, ... in order from 0; then lanes are added pairwise,
    // j with j + 8, j + 4, j + 2, j + 1. A value below 2^-60 counts as zero. `wire` may be
    // `accumulator` when fp32. The last leaf may be shorter: as if padded by zeros. leaves:
    // ceil(count / 4096).
    virtual void round_gradient(const float* accumulator, int64_t count, DType wire_type,
                                void* wire, float* leaves) = 0;
    // The same of the sum, in fp32 and in the order of the rows, of the ranks' parts of a gradient
    // in its wire type: [ranks, count], at least one row. `wire` is none of the parts.
    virtual void sum_gradient(ConstView parts, void* wire, float* leaves) = 0;

    virtual void add(float* a, const float* b, int64_t count) = 0;  // a += b
    virtual void fill_zero(void* data, int64_t bytes) = 0;
    virtual void cast(ConstView from, View to) = 0;
    // Both are of one type. `to` may be host memory, which need not be page-locked; on CUDA too it
    // has the values once the stream has come this far.
    virtual void copy_out(ConstView from, View to) = 0;
    // *nonfinite |= 1 when an element is NaN or Inf.
    virtual void check_finite(ConstView x, uint32_t* nonfinite) = 0;
};

// Plain loops in double on the calling thread: the oracle.
std::unique_ptr<Ops> make_reference_ops();
// SIMD and serial BLAS under tiles run by the team, which must outlive it.
std::unique_ptr<Ops> make_cpu_ops(Team& team);
// The GPU's: cuBLASLt, cuDNN and ferry's own kernels, enqueued on the device's compute stream; the
// device must outlive it. Heads of at most 128 elements; of at most 256, patterns and documents
// where this build has Triton's kernels, in types of 16 bits. Throws Trouble::usage where this
// build has no kernels for the GPU.
//
// most_slope_bytes: what a call of cuDNN's deterministic backward attention may keep for its pairs
// of query and key. What needs more takes several calls. Long sequences' bits depend on it: a test
// makes it small, nothing else changes it. any_gpu: for tests too, the kernels over lists of blocks
// that every GPU runs, in place of its own. products: which algorithms do which products, where a
// table says so (ops/product_table.h); null: the library's first. Throws usage for one of another
// GPU or library.
constexpr int64_t kMostSlopeBytes = int64_t{1} << 30;
std::unique_ptr<Ops> make_cuda_ops(Device& device,
                                   AttentionKernels attention = AttentionKernels::best,
                                   int64_t most_slope_bytes = kMostSlopeBytes, bool any_gpu = false,
                                   const ProductTable* products = nullptr);

// The libraries that the operations' bits depend on. CPU: the BLAS with the processor type that it
// chose kernels for, and the SIMD target.
std::string library_versions();
std::string cuda_library_versions(AttentionKernels attention);

}  // namespace ferry::ops
