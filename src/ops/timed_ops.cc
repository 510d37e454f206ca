#include "ops/timed_ops.h"

#include <chrono>

#include "ferry/units.h"
#include "ops/stopwatch.h"

namespace ferry::ops {
namespace {

class CpuStopwatch final : public Stopwatch {
public:
    void mark() override { marks_.push_back(std::chrono::steady_clock::now()); }
    std::vector<double> seconds() override {
        std::vector<double> found;
        for (size_t i = 1; i < marks_.size(); ++i)
            found.push_back(std::chrono::duration<double>(marks_[i] - marks_[i - 1]).count());
        marks_.clear();
        return found;
    }
    int64_t launches(const std::function<void()>& work) override {
        work();
        return -1;
    }

private:
    std::vector<std::chrono::steady_clock::time_point> marks_{};
};

std::string times(std::initializer_list<int64_t> sides) {
    std::string text;
    for (const int64_t side : sides) text += (text.empty() ? "" : " x ") + std::to_string(side);
    return text;
}
std::string shape_of(ConstView x) {
    return times({x.rows, x.cols}) + ", " + std::string(name_of(x.type));
}
double bytes_of(ConstView x) {
    return x.data == nullptr ? 0 : static_cast<double>(x.rows * x.cols * size_of(x.type));
}
double floats(int64_t count) { return 4 * static_cast<double>(count); }

constexpr const char* name_of_form(Form form) {
    return form == Form::nn ? "product nn" : form == Form::nt ? "product nt" : "product tn";
}

OpCall call_of(const Gemm& g) {
    const int64_t depth = g.form == Form::tn ? g.a.rows : g.a.cols;
    std::string name = name_of_form(g.form);
    if (g.reads_c()) name += ", added";
    if (g.bias.data != nullptr) name += ", bias";
    if (g.addend.data != nullptr) name += ", addend";
    return {.name = std::move(name),
            .shape = times({g.c.rows, g.c.cols, depth}) + ", " + std::string(name_of(g.a.type)),
            .flops = 2.0 * static_cast<double>(g.c.rows) * static_cast<double>(g.c.cols) *
                     static_cast<double>(depth),
            .bytes = bytes_of(g.a) + bytes_of(g.b) + bytes_of(g.addend) +
                     bytes_of(g.c) * (g.reads_c() ? 2 : 1)};
}

// Pairs of query and key that are seen in one sequence, of all query heads together, as if it were
// one document.
double visible_pairs(const Attention& s) {
    const auto heads = static_cast<double>(s.heads);
    if (s.pattern != nullptr)
        return s.pattern->visible_pairs(s.sequence, s.window) * heads / s.pattern->layouts;
    const auto sequence = static_cast<double>(s.sequence);
    const auto hidden = static_cast<double>(s.window == 0 ? 0 : s.sequence - s.window);
    const double beyond = hidden > 0 ? hidden * (hidden + 1) / 2 : 0;
    return heads * (sequence * (sequence + 1) / 2 - beyond);
}

// The same of a part's queries and a part's keys.
double visible_pairs(const Attention& s, const SequencePart& queries, const SequencePart& keys) {
    const auto heads = static_cast<double>(s.heads);
    if (s.pattern != nullptr)
        return s.pattern->visible_pairs(queries, keys, s.window) * heads / s.pattern->layouts;
    int64_t pairs = 0;
    for (int64_t query = queries.first; query < queries.end(); ++query) {
        const int64_t first = std::max(s.first_key(query), keys.first);
        pairs += std::max<int64_t>(0, std::min(query + 1, keys.end()) - first);
    }
    return heads * static_cast<double>(pairs);
}

// Scores and weighted values: two products over the pairs of query and key that are seen.
double attention_flops(const Attention& s) {
    return 4 * visible_pairs(s) * static_cast<double>(s.sequences * s.head_dim);
}
std::string shape_of(const Attention& s) {
    return times({s.sequences, s.sequence}) + ", heads " + std::to_string(s.heads) + "/" +
           std::to_string(s.kv_heads) + " x " + std::to_string(s.head_dim) +
           (s.window > 0 ? ", window " + std::to_string(s.window) : "") +
           (s.pattern != nullptr ? ", pattern" : "") + (s.documents ? ", documents" : "") + ", " +
           std::string(name_of(s.type));
}

}  // namespace

class TimedOps::Layer final : public Ops, public PartAttention {
public:
    Layer(Ops& ops, std::unique_ptr<Stopwatch> watch) : ops_(ops), watch_(std::move(watch)) {}

    void begin(Mode mode) {
        mode_ = mode;
        calls_.clear();
        if (mode == Mode::time) watch_->mark();
    }
    void note(OpCall what, const std::function<void()>& work) {
        if (mode_ == Mode::off) return work();
        if (mode_ == Mode::count) {
            what.launches = watch_->launches(work);
        } else {
            work();
            watch_->mark();
        }
        calls_.push_back(std::move(what));
    }
    std::vector<OpCall> take() {
        const std::vector<double> seconds = watch_->seconds();
        for (size_t i = 0; i < seconds.size(); ++i) calls_[i].seconds = seconds[i];
        mode_ = Mode::off;
        return std::move(calls_);
    }

    int64_t gemm_scratch_bytes(const Gemm& shape) const override {
        return ops_.gemm_scratch_bytes(shape);
    }
    void gemm(const Gemm& g, std::byte* scratch) override {
        note(call_of(g), [&] { ops_.gemm(g, scratch); });
    }

    void norm_forward(ConstView x, ConstView weight, double eps, View y, float* rstd) override {
        note({.name = "norm forward", .shape = shape_of(x), .bytes = bytes_of(x) + bytes_of(y)},
             [&] { ops_.norm_forward(x, weight, eps, y, rstd); });
    }
    int64_t norm_backward_scratch_bytes(int64_t rows, int64_t n) const override {
        return ops_.norm_backward_scratch_bytes(rows, n);
    }
    void norm_backward(ConstView dy, ConstView x, ConstView weight, const float* rstd,
                       ConstView addend, View dx, Accumulator weight_gradient,
                       std::byte* scratch) override {
        note(
            {.name = addend.data ? "norm backward, add" : "norm backward",
             .shape = shape_of(x),
             .bytes = bytes_of(dy) + bytes_of(x) + bytes_of(addend) + bytes_of(dx)},
            [&] { ops_.norm_backward(dy, x, weight, rstd, addend, dx, weight_gradient, scratch); });
    }

    void layer_norm_forward(ConstView x, ConstView weight, ConstView bias, double eps, View y,
                            float* stats) override {
        note({.name = "layer norm forward",
              .shape = shape_of(x),
              .bytes = bytes_of(x) + bytes_of(y)},
             [&] { ops_.layer_norm_forward(x, weight, bias, eps, y, stats); });
    }
    int64_t layer_norm_backward_scratch_bytes(int64_t rows, int64_t n) const override {
        return ops_.layer_norm_backward_scratch_bytes(rows, n);
    }
    void layer_norm_backward(ConstView dy, ConstView x, ConstView weight, const float* stats,
                             ConstView addend, View dx, Accumulator weight_gradient,
                             Accumulator bias_gradient, std::byte* scratch) override {
        note({.name = addend.data ? "layer norm backward, add" : "layer norm backward",
              .shape = shape_of(x),
              .bytes = bytes_of(dy) + bytes_of(x) + bytes_of(addend) + bytes_of(dx)},
             [&] {
                 ops_.layer_norm_backward(dy, x, weight, stats, addend, dx, weight_gradient,
                                          bias_gradient, scratch);
             });
    }
    void sum_rows(ConstView x, Accumulator sums, std::byte* scratch) override {
        note({.name = "sum of rows", .shape = shape_of(x), .bytes = bytes_of(x)},
             [&] { ops_.sum_rows(x, sums, scratch); });
    }
    void rope(View x, const Rope& rope) override {
        note({.name = "rope", .shape = shape_of(x), .bytes = 2 * bytes_of(x)},
             [&] { ops_.rope(x, rope); });
    }
    int64_t rope_angles_floats(const Rope& rope) const override {
        return ops_.rope_angles_floats(rope);
    }
    void rope_angles(const Rope& rope, float* angles) override {
        const int64_t count = ops_.rope_angles_floats(rope);
        if (count == 0) return;
        note({.name = "angles of rope", .shape = times({count}) + ", fp32", .bytes = floats(count)},
             [&] { ops_.rope_angles(rope, angles); });
    }
    void norm_rope_forward(ConstView x, ConstView weight, double eps, View y, float* rstd,
                           const Rope& rope, const float* angles) override {
        note({.name = "norm and rope forward",
              .shape = shape_of(x),
              .bytes = bytes_of(x) + bytes_of(y)},
             [&] { ops_.norm_rope_forward(x, weight, eps, y, rstd, rope, angles); });
    }
    void norm_rope_backward(View d, ConstView x, ConstView weight, const float* rstd,
                            Accumulator weight_gradient, const Rope& rope, const float* angles,
                            std::byte* scratch) override {
        note({.name = "norm and rope backward",
              .shape = shape_of(x),
              .bytes = 2 * bytes_of(d) + bytes_of(x)},
             [&] {
                 ops_.norm_rope_backward(d, x, weight, rstd, weight_gradient, rope, angles,
                                         scratch);
             });
    }

    int64_t attention_forward_scratch_bytes(const Attention& shape) const override {
        return ops_.attention_forward_scratch_bytes(shape);
    }
    void attention_forward(const Attention& shape, ConstView q, ConstView k, ConstView v, View out,
                           float* lse, std::byte* scratch) override {
        note({.name = "attention forward",
              .shape = shape_of(shape),
              .flops = attention_flops(shape),
              .bytes = bytes_of(q) + bytes_of(k) + bytes_of(v) + bytes_of(out)},
             [&] { ops_.attention_forward(shape, q, k, v, out, lse, scratch); });
    }
    int64_t attention_backward_scratch_bytes(const Attention& shape) const override {
        return ops_.attention_backward_scratch_bytes(shape);
    }
    void attention_backward(const Attention& shape, ConstView q, ConstView k, ConstView v,
                            ConstView out, ConstView dout, const float* lse, View dq, View dk,
                            View dv, std::byte* scratch) override {
        note({.name = "attention backward",
              .shape = shape_of(shape),
              .flops = 2.5 * attention_flops(shape),
              .bytes = 2 * (bytes_of(q) + bytes_of(k) + bytes_of(v) + bytes_of(out))},
             [&] { ops_.attention_backward(shape, q, k, v, out, dout, lse, dq, dk, dv, scratch); });
    }

    int64_t part_scratch_bytes(const Attention& shape, int64_t queries,
                               int64_t keys) const override {
        return parts().part_scratch_bytes(shape, queries, keys);
    }
    void part_forward(const Attention& shape, SequencePart queries, SequencePart keys, ConstView q,
                      ConstView k, ConstView v, View out, float* lse, std::byte* scratch) override {
        note(part_call("forward", shape, queries, keys, 1),
             [&] { parts().part_forward(shape, queries, keys, q, k, v, out, lse, scratch); });
    }
    void part_backward(const Attention& shape, SequencePart queries, SequencePart keys, ConstView q,
                       ConstView k, ConstView v, ConstView out, ConstView dout, const float* lse,
                       View dq, View dk, View dv, std::byte* scratch) override {
        note(part_call("backward", shape, queries, keys, 2.5), [&] {
            parts().part_backward(shape, queries, keys, q, k, v, out, dout, lse, dq, dk, dv,
                                  scratch);
        });
    }
    void merge_parts(int64_t heads, ConstView part, const float* part_lse, View sum,
                     float* sum_lse) override {
        note({.name = "attention parts merged",
              .shape = shape_of(sum),
              .bytes = bytes_of(part) + 2 * bytes_of(sum)},
             [&] { parts().merge_parts(heads, part, part_lse, sum, sum_lse); });
    }

    void swiglu_forward(ConstView gate_up, View y) override {
        note({.name = "swiglu forward",
              .shape = shape_of(y),
              .bytes = bytes_of(gate_up) + bytes_of(y)},
             [&] { ops_.swiglu_forward(gate_up, y); });
    }
    void swiglu_backward(View dy, View gate_up) override {
        note({.name = "swiglu backward",
              .shape = shape_of(dy),
              .bytes = 2 * (bytes_of(gate_up) + bytes_of(dy))},
             [&] { ops_.swiglu_backward(dy, gate_up); });
    }
    void gelu_forward(ConstView x, View y) override {
        note({.name = "gelu forward", .shape = shape_of(y), .bytes = bytes_of(x) + bytes_of(y)},
             [&] { ops_.gelu_forward(x, y); });
    }
    void gelu_backward(View dy, View x) override {
        note({.name = "gelu backward",
              .shape = shape_of(dy),
              .bytes = 2 * (bytes_of(x) + bytes_of(dy))},
             [&] { ops_.gelu_backward(dy, x); });
    }

    void own_rows(const int32_t* tokens, int64_t count, int64_t first, int64_t rows,
                  int32_t* own) override {
        note({.name = "own rows of tokens", .shape = times({count}), .bytes = 2 * floats(count)},
             [&] { ops_.own_rows(tokens, count, first, rows, own); });
    }

    void embed(const int32_t* tokens, ConstView table, ConstView positions,
               const int32_t* document_start, View x) override {
        note({.name = "embedding forward",
              .shape = shape_of(x),
              .bytes = 2 * bytes_of(x) + bytes_of(positions)},
             [&] { ops_.embed(tokens, table, positions, document_start, x); });
    }
    int64_t embed_backward_scratch_bytes(int64_t tokens) const override {
        return ops_.embed_backward_scratch_bytes(tokens);
    }
    void embed_backward(const int32_t* tokens, ConstView dx, float* gradient,
                        std::byte* scratch) override {
        note({.name = "embedding backward",
              .shape = shape_of(dx),
              .bytes = bytes_of(dx) + 2 * floats(dx.rows * dx.cols)},
             [&] { ops_.embed_backward(tokens, dx, gradient, scratch); });
    }
    void positions_backward(ConstView dx, int64_t sequence, const int32_t* document_start,
                            float* gradient, std::byte* scratch) override {
        note({.name = "positions backward",
              .shape = shape_of(dx),
              .bytes = bytes_of(dx) + 2 * floats(sequence * dx.cols)},
             [&] { ops_.positions_backward(dx, sequence, document_start, gradient, scratch); });
    }

    int64_t cross_entropy_scratch_bytes(int64_t tokens) const override {
        return ops_.cross_entropy_scratch_bytes(tokens);
    }
    void cross_entropy(ConstView logits, const int32_t* targets, float scale, View dlogits,
                       double* loss_sum, std::byte* scratch) override {
        note({.name = "cross entropy",
              .shape = shape_of(logits),
              .bytes = bytes_of(logits) + bytes_of(dlogits)},
             [&] { ops_.cross_entropy(logits, targets, scale, dlogits, loss_sum, scratch); });
    }
    void loss_parts(ConstView logits, const int32_t* own_targets, double* parts) override {
        note({.name = "parts of the loss", .shape = shape_of(logits), .bytes = bytes_of(logits)},
             [&] { ops_.loss_parts(logits, own_targets, parts); });
    }
    void cross_entropy_of_parts(ConstView logits, const LossTargets& targets, const double* parts,
                                int ranks, float scale, View dlogits, double* loss_sum,
                                std::byte* scratch) override {
        note({.name = "cross entropy of parts",
              .shape = shape_of(logits),
              .bytes = bytes_of(logits) + bytes_of(dlogits)},
             [&] {
                 ops_.cross_entropy_of_parts(logits, targets, parts, ranks, scale, dlogits,
                                             loss_sum, scratch);
             });
    }

    void round_gradient(const float* accumulator, int64_t count, DType wire_type, void* wire,
                        float* leaves) override {
        const auto wire_bytes = static_cast<double>(count * size_of(wire_type));
        note({.name = "rounding and norm leaves",
              .shape = times({count}) + ", " + std::string(name_of(wire_type)),
              .bytes = floats(count) + wire_bytes},
             [&] { ops_.round_gradient(accumulator, count, wire_type, wire, leaves); });
    }
    void sum_gradient(ConstView parts, void* wire, float* leaves) override {
        note({.name = "sum of ranks' gradients",
              .shape = shape_of(parts),
              .bytes = bytes_of(parts) + bytes_of(parts.row_range(0, 1))},
             [&] { ops_.sum_gradient(parts, wire, leaves); });
    }

    void add(float* a, const float* b, int64_t count) override {
        note({.name = "add", .shape = times({count}) + ", fp32", .bytes = 3 * floats(count)},
             [&] { ops_.add(a, b, count); });
    }
    void fill_zero(void* data, int64_t bytes) override {
        note({.name = "zeros", .shape = format_bytes(bytes), .bytes = static_cast<double>(bytes)},
             [&] { ops_.fill_zero(data, bytes); });
    }
    void cast(ConstView from, View to) override {
        note({.name = "cast",
              .shape = shape_of(from) + " to " + std::string(name_of(to.type)),
              .bytes = bytes_of(from) + bytes_of(to)},
             [&] { ops_.cast(from, to); });
    }
    void copy_out(ConstView from, View to) override {
        note({.name = "copy", .shape = shape_of(from), .bytes = bytes_of(from) + bytes_of(to)},
             [&] { ops_.copy_out(from, to); });
    }
    void check_finite(ConstView x, uint32_t* nonfinite) override {
        note({.name = "check of finite", .shape = shape_of(x), .bytes = bytes_of(x)},
             [&] { ops_.check_finite(x, nonfinite); });
    }

private:
    PartAttention& parts() const {
        PartAttention* const parts = part_attention_of(ops_);
        FERRY_CHECK(parts, "these operations have no attention of parts");
        return *parts;
    }
    static OpCall part_call(const char* pass, const Attention& shape, SequencePart queries,
                            SequencePart keys, double passes) {
        const auto tokens = static_cast<double>(queries.count);
        const auto width = static_cast<double>(shape.heads * shape.head_dim);
        return {.name = std::string("attention of a part, ") + pass,
                .shape = shape_of(shape) + ", " + times({queries.count, keys.count}),
                .flops = passes * 4 * visible_pairs(shape, queries, keys) *
                         static_cast<double>(shape.head_dim),
                .bytes = passes * 2 * static_cast<double>(size_of(shape.type)) *
                         (tokens * width +
                          static_cast<double>(keys.count * shape.kv_heads * shape.head_dim))};
    }

    Ops& ops_;
    std::unique_ptr<Stopwatch> watch_;
    Mode mode_ = Mode::off;
    std::vector<OpCall> calls_{};
};

TimedOps::TimedOps(Ops& ops, Device& device)
    : layer_(std::make_unique<Layer>(ops, device.kind() == DeviceKind::cpu
                                              ? std::make_unique<CpuStopwatch>()
                                              : make_cuda_stopwatch(device))) {}

TimedOps::~TimedOps() = default;

Ops& TimedOps::ops() { return *layer_; }
void TimedOps::begin(Mode mode) { layer_->begin(mode); }
void TimedOps::note(OpCall what, const std::function<void()>& work) {
    layer_->note(std::move(what), work);
}
std::vector<OpCall> TimedOps::take() { return layer_->take(); }

}  // namespace ferry::ops
