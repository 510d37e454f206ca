// The GPU's operations on operands in host memory, for tests that know nothing of devices: each
// call copies its operands to the GPU, runs there with scratch of exactly the size it asked for,
// waits, and copies them back. Allocations are exact, so that compute-sanitizer sees the first byte
// too many.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "ferry/units.h"
#include "ops/ops.h"
#include "ops/part_attention.h"
#include "ops/product_table.h"

#ifdef FERRY_CUDA
#include <cuda_runtime.h>

namespace ferry::ops {

class MirroredOps final : public Ops, public TunesProducts, public PartAttention {
public:
    MirroredOps(AttentionKernels attention, int64_t most_slope_bytes, bool any_gpu,
                const ProductTable* products)
        : device_(Device::open(DeviceKind::cuda, *executor_)),
          ops_(make_cuda_ops(*device_, attention, most_slope_bytes, any_gpu, products)) {}

    const ProductTable& given_products() const override {
        return tuner_of(*ops_)->given_products();
    }
    void tune_products() override { tuner_of(*ops_)->tune_products(); }
    const ProductTable& tuned_products() const override {
        return tuner_of(*ops_)->tuned_products();
    }

    int64_t gemm_scratch_bytes(const Gemm& g) const override { return ops_->gemm_scratch_bytes(g); }
    void gemm(const Gemm& g, std::byte*) override {
        Mirror m({of(g.a, g.spare), of(g.b), of(g.c), of(g.bias), of(g.addend)},
                 ops_->gemm_scratch_bytes(g));
        Gemm there = g;
        there.a = m(g.a);
        there.b = m(g.b);
        there.c = m(g.c);
        there.bias = m(g.bias);
        there.addend = m(g.addend);
        ops_->gemm(there, m.scratch());
        m.finish();
    }

    void norm_forward(ConstView x, ConstView weight, double eps, View y, float* rstd) override {
        Mirror m({of(x), of(weight), of(y), {rstd, runs_of(x, weight) * 4}});
        ops_->norm_forward(m(x), m(weight), eps, m(y), m(rstd));
        m.finish();
    }
    int64_t norm_backward_scratch_bytes(int64_t rows, int64_t n) const override {
        return ops_->norm_backward_scratch_bytes(rows, n);
    }
    void norm_backward(ConstView dy, ConstView x, ConstView weight, const float* rstd,
                       ConstView addend, View dx, Accumulator gradient, std::byte*) override {
        Mirror m({of(dy),
                  of(x),
                  of(weight),
                  {rstd, runs_of(x, weight) * 4},
                  of(addend),
                  of(dx),
                  {gradient.at, weight.cols * 4}},
                 gradient.asked()
                     ? ops_->norm_backward_scratch_bytes(runs_of(x, weight), weight.cols)
                     : 0);
        ops_->norm_backward(m(dy), m(x), m(weight), m(rstd), m(addend), m(dx), m(gradient),
                            m.scratch());
        m.finish();
    }
    void layer_norm_forward(ConstView x, ConstView weight, ConstView bias, double eps, View y,
                            float* stats) override {
        Mirror m({of(x), of(weight), of(bias), of(y), {stats, x.rows * 8}});
        ops_->layer_norm_forward(m(x), m(weight), m(bias), eps, m(y), m(stats));
        m.finish();
    }
    int64_t layer_norm_backward_scratch_bytes(int64_t rows, int64_t n) const override {
        return ops_->layer_norm_backward_scratch_bytes(rows, n);
    }
    void layer_norm_backward(ConstView dy, ConstView x, ConstView weight, const float* stats,
                             ConstView addend, View dx, Accumulator gradient,
                             Accumulator bias_gradient, std::byte*) override {
        const bool sums = gradient.asked() || bias_gradient.asked();
        Mirror m({of(dy),
                  of(x),
                  of(weight),
                  {stats, x.rows * 8},
                  of(addend),
                  of(dx),
                  {gradient.at, x.cols * 4},
                  {bias_gradient.at, x.cols * 4}},
                 sums ? ops_->layer_norm_backward_scratch_bytes(x.rows, x.cols) : 0);
        ops_->layer_norm_backward(m(dy), m(x), m(weight), m(stats), m(addend), m(dx), m(gradient),
                                  m(bias_gradient), m.scratch());
        m.finish();
    }
    void sum_rows(ConstView x, Accumulator sums, std::byte*) override {
        Mirror m({of(x), {sums.at, x.cols * 4}}, ops_->norm_backward_scratch_bytes(x.rows, x.cols));
        ops_->sum_rows(m(x), m(sums), m.scratch());
        m.finish();
    }

    void rope(View x, const Rope& rope) override {
        Mirror m({of(x), {rope.document_start, x.rows * 4}});
        Rope there = rope;
        there.document_start = m(rope.document_start);
        ops_->rope(m(x), there);
        m.finish();
    }
    int64_t rope_angles_floats(const Rope& rope) const override {
        return ops_->rope_angles_floats(rope);
    }
    void rope_angles(const Rope& rope, float* angles) override {
        Mirror m({{angles, ops_->rope_angles_floats(rope) * 4}});
        ops_->rope_angles(rope, m(angles));
        m.finish();
    }
    void norm_rope_forward(ConstView x, ConstView weight, double eps, View y, float* rstd,
                           const Rope& rope, const float* angles) override {
        Mirror m({of(x),
                  of(weight),
                  of(y),
                  {rstd, runs_of(x, weight) * 4},
                  {rope.document_start, x.rows * 4},
                  {angles, ops_->rope_angles_floats(rope) * 4}});
        Rope there = rope;
        there.document_start = m(rope.document_start);
        ops_->norm_rope_forward(m(x), m(weight), eps, m(y), m(rstd), there, m(angles));
        m.finish();
    }
    void norm_rope_backward(View d, ConstView x, ConstView weight, const float* rstd,
                            Accumulator gradient, const Rope& rope, const float* angles,
                            std::byte*) override {
        Mirror m({of(d),
                  of(x),
                  of(weight),
                  {rstd, runs_of(x, weight) * 4},
                  {gradient.at, weight.cols * 4},
                  {rope.document_start, x.rows * 4},
                  {angles, ops_->rope_angles_floats(rope) * 4}},
                 gradient.asked()
                     ? ops_->norm_backward_scratch_bytes(runs_of(x, weight), weight.cols)
                     : 0);
        Rope there = rope;
        there.document_start = m(rope.document_start);
        ops_->norm_rope_backward(m(d), m(x), m(weight), m(rstd), m(gradient), there, m(angles),
                                 m.scratch());
        m.finish();
    }

    int64_t attention_forward_scratch_bytes(const Attention& shape) const override {
        return ops_->attention_forward_scratch_bytes(shape);
    }
    void attention_forward(const Attention& shape, ConstView q, ConstView k, ConstView v, View out,
                           float* lse, std::byte*) override {
        std::vector<Range> ranges{of(q), of(k), of(v), of(out), {lse, shape.heads * q.rows * 4}};
        add_mask(shape, ranges);
        Mirror m(std::move(ranges), ops_->attention_forward_scratch_bytes(shape));
        ops_->attention_forward(with_mask(shape, m), m(q), m(k), m(v), m(out), m(lse), m.scratch());
        m.finish();
    }
    int64_t attention_backward_scratch_bytes(const Attention& shape) const override {
        return ops_->attention_backward_scratch_bytes(shape);
    }
    void attention_backward(const Attention& shape, ConstView q, ConstView k, ConstView v,
                            ConstView out, ConstView dout, const float* lse, View dq, View dk,
                            View dv, std::byte*) override {
        std::vector<Range> ranges{of(q),   of(k),    of(v),
                                  of(out), of(dout), {lse, shape.heads * q.rows * 4},
                                  of(dq),  of(dk),   of(dv)};
        add_mask(shape, ranges);
        Mirror m(std::move(ranges), ops_->attention_backward_scratch_bytes(shape));
        ops_->attention_backward(with_mask(shape, m), m(q), m(k), m(v), m(out), m(dout), m(lse),
                                 m(dq), m(dk), m(dv), m.scratch());
        m.finish();
    }

    int64_t part_scratch_bytes(const Attention& shape, int64_t queries,
                               int64_t keys) const override {
        return part_attention_of(*ops_)->part_scratch_bytes(shape, queries, keys);
    }
    void part_forward(const Attention& shape, SequencePart queries, SequencePart keys, ConstView q,
                      ConstView k, ConstView v, View out, float* lse, std::byte*) override {
        std::vector<Range> ranges{of(q), of(k), of(v), of(out), {lse, shape.heads * q.rows * 4}};
        add_mask(shape, ranges);
        Mirror m(std::move(ranges), part_scratch_bytes(shape, queries.count, keys.count));
        part_attention_of(*ops_)->part_forward(with_mask(shape, m), queries, keys, m(q), m(k), m(v),
                                               m(out), m(lse), m.scratch());
        m.finish();
    }
    void part_backward(const Attention& shape, SequencePart queries, SequencePart keys, ConstView q,
                       ConstView k, ConstView v, ConstView out, ConstView dout, const float* lse,
                       View dq, View dk, View dv, std::byte*) override {
        std::vector<Range> ranges{of(q),   of(k),    of(v),
                                  of(out), of(dout), {lse, shape.heads * q.rows * 4},
                                  of(dq),  of(dk),   of(dv)};
        add_mask(shape, ranges);
        Mirror m(std::move(ranges), part_scratch_bytes(shape, queries.count, keys.count));
        part_attention_of(*ops_)->part_backward(with_mask(shape, m), queries, keys, m(q), m(k),
                                                m(v), m(out), m(dout), m(lse), m(dq), m(dk), m(dv),
                                                m.scratch());
        m.finish();
    }
    void merge_parts(int64_t heads, ConstView part, const float* part_lse, View sum,
                     float* sum_lse) override {
        const int64_t floats = heads * sum.rows * 4;
        Mirror m({of(part), {part_lse, floats}, of(sum), {sum_lse, floats}});
        part_attention_of(*ops_)->merge_parts(heads, m(part), m(part_lse), m(sum), m(sum_lse));
        m.finish();
    }

    void swiglu_forward(ConstView gate_up, View y) override {
        Mirror m({of(gate_up), of(y)});
        ops_->swiglu_forward(m(gate_up), m(y));
        m.finish();
    }
    void swiglu_backward(View dy, View gate_up) override {
        Mirror m({of(dy), of(gate_up)});
        ops_->swiglu_backward(m(dy), m(gate_up));
        m.finish();
    }

    void gelu_forward(ConstView x, View y) override {
        Mirror m({of(x), of(y)});
        ops_->gelu_forward(m(x), m(y));
        m.finish();
    }
    void gelu_backward(View dy, View x) override {
        Mirror m({of(dy), of(x)});
        ops_->gelu_backward(m(dy), m(x));
        m.finish();
    }

    void own_rows(const int32_t* tokens, int64_t count, int64_t first, int64_t rows,
                  int32_t* own) override {
        Mirror m({{tokens, count * 4}, {own, count * 4}});
        ops_->own_rows(m(tokens), count, first, rows, m(own));
        m.finish();
    }

    void embed(const int32_t* tokens, ConstView table, ConstView positions,
               const int32_t* document_start, View x) override {
        Mirror m(
            {{tokens, x.rows * 4}, of(table), of(positions), {document_start, x.rows * 4}, of(x)});
        ops_->embed(m(tokens), m(table), m(positions), m(document_start), m(x));
        m.finish();
    }
    int64_t embed_backward_scratch_bytes(int64_t tokens) const override {
        return ops_->embed_backward_scratch_bytes(tokens);
    }
    void positions_backward(ConstView dx, int64_t sequence, const int32_t* document_start,
                            float* gradient, std::byte*) override {
        Mirror m({of(dx),
                  {document_start, dx.rows * 4},
                  {gradient, std::min(sequence, dx.rows) * dx.cols * 4}},
                 ops_->embed_backward_scratch_bytes(dx.rows));
        ops_->positions_backward(m(dx), sequence, m(document_start), m(gradient), m.scratch());
        m.finish();
    }
    void embed_backward(const int32_t* tokens, ConstView dx, float* gradient, std::byte*) override {
        const int32_t last = *std::max_element(tokens, tokens + dx.rows);
        Mirror m({{tokens, dx.rows * 4}, of(dx), {gradient, (last + 1) * dx.cols * 4}},
                 ops_->embed_backward_scratch_bytes(dx.rows));
        ops_->embed_backward(m(tokens), m(dx), m(gradient), m.scratch());
        m.finish();
    }

    int64_t cross_entropy_scratch_bytes(int64_t tokens) const override {
        return ops_->cross_entropy_scratch_bytes(tokens);
    }
    void cross_entropy(ConstView logits, const int32_t* targets, float scale, View dlogits,
                       double* loss_sum, std::byte*) override {
        Mirror m({of(logits), {targets, logits.rows * 4}, of(dlogits), {loss_sum, 8}},
                 ops_->cross_entropy_scratch_bytes(logits.rows));
        ops_->cross_entropy(m(logits), m(targets), scale, m(dlogits), m(loss_sum), m.scratch());
        m.finish();
    }
    void loss_parts(ConstView logits, const int32_t* own_targets, double* parts) override {
        Mirror m(
            {of(logits), {own_targets, logits.rows * 4}, {parts, logits.rows * kLossParts * 8}});
        ops_->loss_parts(m(logits), m(own_targets), m(parts));
        m.finish();
    }
    void cross_entropy_of_parts(ConstView logits, const LossTargets& targets, const double* parts,
                                int ranks, float scale, View dlogits, double* loss_sum,
                                std::byte*) override {
        Mirror m({of(logits),
                  {targets.targets, logits.rows * 4},
                  {targets.own, logits.rows * 4},
                  {parts, ranks * logits.rows * kLossParts * 8},
                  of(dlogits),
                  {loss_sum, 8}},
                 ops_->cross_entropy_scratch_bytes(logits.rows));
        ops_->cross_entropy_of_parts(m(logits), {m(targets.targets), m(targets.own)}, m(parts),
                                     ranks, scale, m(dlogits), m(loss_sum), m.scratch());
        m.finish();
    }

    void round_gradient(const float* accumulator, int64_t count, DType type, void* wire,
                        float* leaves) override {
        Mirror m({{accumulator, count * 4},
                  {wire, count * size_of(type)},
                  {leaves, ceil_div(count, 4096) * 4}});
        ops_->round_gradient(m(accumulator), count, type, m(wire), m(leaves));
        m.finish();
    }

    void sum_gradient(ConstView pieces, void* wire, float* leaves) override {
        Mirror m({of(pieces),
                  {wire, pieces.cols * size_of(pieces.type)},
                  {leaves, ceil_div(pieces.cols, 4096) * 4}});
        ops_->sum_gradient(m(pieces), m(wire), m(leaves));
        m.finish();
    }

    void add(float* a, const float* b, int64_t count) override {
        Mirror m({{a, count * 4}, {b, count * 4}});
        ops_->add(m(a), m(b), count);
        m.finish();
    }
    void fill_zero(void* data, int64_t bytes) override {
        Mirror m({{data, bytes}});
        ops_->fill_zero(m(data), bytes);
        m.finish();
    }
    void cast(ConstView from, View to) override {
        Mirror m({of(from), of(to)});
        ops_->cast(m(from), m(to));
        m.finish();
    }
    void copy_out(ConstView from, View to) override {  // straight into host memory
        Mirror m({of(from)});
        ops_->copy_out(m(from), to);
        m.finish();
    }
    void check_finite(ConstView x, uint32_t* nonfinite) override {
        Mirror m({of(x), {nonfinite, 4}});
        ops_->check_finite(m(x), m(nonfinite));
        m.finish();
    }

private:
    static int64_t runs_of(const ConstView& x, const ConstView& weight) {
        return x.rows * (x.cols / weight.cols);
    }
    struct Range {
        const void* data;
        int64_t bytes;
    };
    // `spare`: columns behind the last row's that belong to it.
    static Range of(const ConstView& v, int64_t spare = 0) {
        const bool none = v.data == nullptr || v.rows == 0 || v.cols == 0;
        return {v.data, none ? 0 : ((v.rows - 1) * v.ld + v.cols + spare) * size_of(v.type)};
    }

    // Operands on the GPU during one call; those that overlap lie together.
    class Mirror {
    public:
        Mirror(std::vector<Range> ranges, int64_t scratch_bytes = 0) {
            std::erase_if(ranges, [](const Range& r) { return r.data == nullptr || r.bytes == 0; });
            std::ranges::sort(ranges, {}, [](const Range& r) { return address(r.data); });
            for (const Range& r : ranges) {
                const uintptr_t first = address(r.data), end = first + static_cast<size_t>(r.bytes);
                if (!pieces_.empty() && first < pieces_.back().end) {
                    pieces_.back().end = std::max(pieces_.back().end, end);
                } else {
                    pieces_.push_back({first, end});
                }
            }
            for (Piece& p : pieces_) {
                // At the same distance from a boundary of 64 bytes as on the host.
                const size_t offset = p.first % 64;
                demand(cudaMalloc(&p.memory, offset + p.end - p.first));
                p.device = reinterpret_cast<uintptr_t>(p.memory) + offset;
                demand(
                    cudaMemcpy(at(p.device), at(p.first), p.end - p.first, cudaMemcpyHostToDevice));
            }
            if (scratch_bytes > 0) {
                demand(cudaMalloc(&scratch_, static_cast<size_t>(scratch_bytes)));
            }
            // A copy from pageable memory returns before its bytes are there, and the operations'
            // stream does not wait for the default one.
            demand(cudaDeviceSynchronize());
        }
        ~Mirror() {
            for (const Piece& p : pieces_) cudaFree(p.memory);
            cudaFree(scratch_);
        }
        Mirror(const Mirror&) = delete;
        Mirror& operator=(const Mirror&) = delete;

        // Where a host address lies on the GPU.
        template <class T>
        T* operator()(T* host) const {
            const uintptr_t wanted = address(host);
            for (const Piece& p : pieces_) {
                if (wanted >= p.first && wanted < p.end)
                    return reinterpret_cast<T*>(p.device + wanted - p.first);
            }
            return nullptr;
        }
        ConstView operator()(ConstView v) const {
            v.data = (*this)(v.data);
            return v;
        }
        View operator()(View v) const {
            v.data = (*this)(v.data);
            return v;
        }
        Accumulator operator()(const Accumulator& sums) const {
            return {(*this)(sums.at), sums.fresh};
        }
        std::byte* scratch() const { return static_cast<std::byte*>(scratch_); }

        void finish() const {
            demand(cudaDeviceSynchronize());
            for (const Piece& p : pieces_) {
                demand(
                    cudaMemcpy(at(p.first), at(p.device), p.end - p.first, cudaMemcpyDeviceToHost));
            }
        }

    private:
        struct Piece {
            uintptr_t first = 0, end = 0;  // on the host
            void* memory = nullptr;
            uintptr_t device = 0;
        };
        static uintptr_t address(const void* data) { return reinterpret_cast<uintptr_t>(data); }
        static void* at(uintptr_t address) { return reinterpret_cast<void*>(address); }
        static void demand(cudaError_t status) {
            if (status != cudaSuccess) throw std::runtime_error(cudaGetErrorString(status));
        }
        std::vector<Piece> pieces_;
        void* scratch_ = nullptr;
    };

    // The documents and the lists of an attention's mask.
    static void add_mask(const Attention& shape, std::vector<Range>& to) {
        const int64_t tokens = shape.sequences * shape.sequence;
        to.push_back({shape.document_start, tokens * 4});
        to.push_back({shape.document_end, tokens * 4});
        if (shape.pattern == nullptr) return;
        for (const auto* list : {&shape.pattern->row_starts, &shape.pattern->columns,
                                 &shape.pattern->column_starts, &shape.pattern->rows})
            to.push_back({list->data(), static_cast<int64_t>(list->size()) * 4});
    }
    static Attention with_mask(Attention shape, const Mirror& m) {
        shape.document_start = m(shape.document_start);
        shape.document_end = m(shape.document_end);
        if (shape.pattern == nullptr) return shape;
        shape.blocks = shape.pattern->view();
        shape.blocks.row_starts = m(shape.blocks.row_starts);
        shape.blocks.columns = m(shape.blocks.columns);
        shape.blocks.column_starts = m(shape.blocks.column_starts);
        shape.blocks.rows = m(shape.blocks.rows);
        return shape;
    }

    std::unique_ptr<Executor> executor_ = make_thread_executor();
    std::unique_ptr<Device> device_;
    std::unique_ptr<Ops> ops_;
};

// Null where there is no GPU; then `why` says so. Ferry's own attention unless a test is about the
// other: the contract is that of one rounding.
inline std::unique_ptr<Ops> make_mirrored_ops(std::string& why,
                                              AttentionKernels attention = AttentionKernels::ferry,
                                              int64_t most_slope_bytes = kMostSlopeBytes,
                                              bool any_gpu = false,
                                              const ProductTable* products = nullptr) {
    try {
        return std::make_unique<MirroredOps>(attention, most_slope_bytes, any_gpu, products);
    } catch (const Error& error) {
        why = error.what();
        return nullptr;
    }
}

}  // namespace ferry::ops

#else

namespace ferry::ops {

inline std::unique_ptr<Ops> make_mirrored_ops(std::string& why,
                                              AttentionKernels = AttentionKernels::ferry,
                                              int64_t = kMostSlopeBytes, bool = false,
                                              const ProductTable* = nullptr) {
    why = "built without CUDA";
    return nullptr;
}

}  // namespace ferry::ops

#endif
