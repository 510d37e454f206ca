#include "slow_shapes.h"

#include <spdlog/fmt/fmt.h>

#include <string>
#include <utility>

namespace ferry::train {
namespace {

// B/s of rows and FLOP/s of products, as src/ops/cuda/shared/slow_notes.cc has them.
constexpr double kRows = 2.5e12, kProduct = 6e14;
// The most elements of a row that a norm's threads hold (src/ops/cuda/norms/norm_plan.h), and the
// heads whose norm and RoPE are one kernel (rotation.h).
constexpr int64_t kMostHeld = 8192, kRotatedHead = 128;

class Notes {
public:
    Notes(int64_t tokens, int64_t times) : tokens_(tokens), times_(times) {}

    // A matrix of `columns` and so many bytes an element and pass.
    void add(const std::string& operation, int64_t columns, const std::string& why, double bytes,
             double fast_bytes, int64_t times) {
        const double elements = static_cast<double>(tokens_) * static_cast<double>(columns);
        all_.push_back({.operation = operation,
                        .shape = std::to_string(tokens_) + " x " + std::to_string(columns),
                        .why = why,
                        .times = times * times_,
                        .seconds = elements * bytes / kRows,
                        .fast_seconds = elements * fast_bytes / kRows});
    }
    // Products of `columns` by `others`, forward and for both gradients.
    void add_products(int64_t columns, int64_t others, double factor, const std::string& why,
                      int64_t times) {
        const double fast = 6 * static_cast<double>(tokens_) * static_cast<double>(columns) *
                            static_cast<double>(others) / kProduct;
        all_.push_back({.operation = "products",
                        .shape = std::to_string(tokens_) + " x " + std::to_string(columns) + " x " +
                                 std::to_string(others),
                        .why = why,
                        .times = times * times_,
                        .seconds = fast * factor,
                        .fast_seconds = fast});
    }
    std::vector<ops::SlowPath> take() { return std::move(all_); }

private:
    int64_t tokens_, times_;
    std::vector<ops::SlowPath> all_{};
};

void add_wide_norms(Notes& notes, const model::Shape& shape, double residual, double compute) {
    if (shape.hidden <= kMostHeld) return;
    const std::string why = "threads hold " + std::to_string(kMostHeld) +
                            " columns of a row at most: it is read once more";
    const int64_t times = 2 * shape.layers + 1;
    const double forward = residual + compute, backward = 3 * residual + compute;
    notes.add("norm forward", shape.hidden, why, forward + residual, forward, times);
    notes.add("norm backward", shape.hidden, why, backward + residual + compute, backward, times);
}

void add_turned_heads(Notes& notes, const model::Shape& shape, double compute) {
    if (!shape.head_norms || shape.head_dim == kRotatedHead) return;
    const std::string why =
        "one kernel has heads of " + std::to_string(kRotatedHead) + " alone: RoPE is a pass apart";
    const int64_t columns = (shape.heads + shape.kv_heads) * shape.head_dim;
    notes.add("norm and rope forward", columns, why, 4 * compute, 2 * compute, shape.layers);
    notes.add("norm and rope backward", columns, why, 5 * compute, 3 * compute, shape.layers);
}

// The product that gives the head's input its gradient: the odd words are the end of its depth.
void add_odd_vocabulary(Notes& notes, const model::Shape& shape, double compute) {
    if (shape.vocab % kWidthUnit == 0 || shape.hidden % kWidthUnit != 0) return;
    notes.add("product with " + std::to_string(shape.vocab) + " words", shape.hidden,
              "the vocabulary is no multiple of " + std::to_string(kWidthUnit) +
                  ": a sum in fp32 and a pass over it",
              8 + compute, compute, 1);
}

// ---------------------------------------------------------------- odd widths

// Operations whose rows, or whose operands', are no multiple of kWidthUnit long.
class OddWidths {
public:
    OddWidths(Notes& notes, std::span<const WidthCost> costs, const model::Shape& shape,
              const model::Numerics& numerics)
        : notes_(notes),
          costs_(costs),
          shape_(shape),
          residual_(static_cast<double>(size_of(numerics.residual))) {}

    void add_all() {
        add_hidden();
        add_intermediate();
        add_queries_and_keys();
    }

private:
    static constexpr double kCompute = 2;  // bytes
    bool odd_hidden() const { return shape_.hidden % kWidthUnit != 0; }
    int64_t query_columns() const { return shape_.heads * shape_.head_dim; }
    int64_t columns_of_qkv() const {
        return query_columns() + 2 * shape_.kv_heads * shape_.head_dim;
    }
    int64_t norms() const { return 2 * shape_.layers + 1; }
    int64_t gates() const { return shape_.gated ? 2 : 1; }

    static std::string named(const char* width, int64_t columns) {
        return std::string(width) + " " + std::to_string(columns);
    }
    static std::string why(const std::string& width, double factor) {
        return fmt::format("{} is no multiple of {}: {:.3g} times as long, as measured on an H100",
                           width, kWidthUnit, factor);
    }

    // So many bytes an element of a row.
    void rows(Width of, WideOp op, const std::string& operation, const std::string& width,
              int64_t columns, double bytes, int64_t times) {
        const auto factor = factor_of(costs_, of, op, columns);
        if (factor)
            notes_.add(operation, columns, why(width, *factor), bytes * *factor, bytes, times);
    }
    // So many columns on the other side of them all, of a block or of the head.
    void products(Width of, const std::string& width, int64_t columns, int64_t others,
                  int64_t times) {
        if (const auto factor = factor_of(costs_, of, WideOp::products, columns))
            notes_.add_products(columns, others, *factor, why(width, *factor), times);
    }

    void add_hidden() {
        const int64_t hidden = shape_.hidden;
        const std::string width = named("hidden", hidden);
        const int64_t of_block =
            columns_of_qkv() + query_columns() + (gates() + 1) * shape_.intermediate;
        products(Width::hidden, width, hidden, of_block, shape_.layers);
        products(Width::hidden, width, hidden, shape_.vocab, 1);
        rows(Width::hidden, WideOp::norm_forward, "norm forward", width, hidden,
             residual_ + kCompute, norms());
        rows(Width::hidden, WideOp::norm_backward, "norm backward", width, hidden,
             3 * residual_ + kCompute, norms());
        rows(Width::hidden, WideOp::embedding_forward, "embedding forward", width, hidden,
             residual_ + kCompute, 1);
        rows(Width::hidden, WideOp::embedding_backward, "embedding backward", width, hidden,
             residual_ + 8, 1);
    }
    void add_intermediate() {
        const int64_t columns = shape_.intermediate;
        const std::string width = named("intermediate", columns);
        const std::string activation = shape_.gated ? "swiglu" : "gelu";
        const auto matrices = static_cast<double>(gates() + 1);
        if (!odd_hidden())  // else they are among its own
            products(Width::intermediate, width, columns, (gates() + 1) * shape_.hidden,
                     shape_.layers);
        rows(Width::intermediate, WideOp::activation_forward, activation + " forward", width,
             columns, matrices * kCompute, shape_.layers);
        rows(Width::intermediate, WideOp::activation_backward, activation + " backward", width,
             columns, 2 * matrices * kCompute, shape_.layers);
    }
    // Into and out of attention a product is as one into and out of the MLP.
    void add_queries_and_keys() {
        if (odd_hidden()) return;
        const auto add = [&](const char* name, int64_t columns) {
            products(Width::intermediate, named(name, columns), columns, shape_.hidden,
                     shape_.layers);
        };
        add("queries, keys and values", columns_of_qkv());
        add("attention's output", query_columns());
    }

    Notes& notes_;
    std::span<const WidthCost> costs_;
    const model::Shape& shape_;
    double residual_;
};

}  // namespace

std::vector<ops::SlowPath> slow_shapes(const model::Shape& shape, const model::Numerics& numerics,
                                       int64_t micro_batches, std::span<const WidthCost> costs) {
    Notes notes(numerics.sequence * numerics.micro_batch, micro_batches);
    const auto compute = static_cast<double>(size_of(numerics.compute));
    add_wide_norms(notes, shape, static_cast<double>(size_of(numerics.residual)), compute);
    add_turned_heads(notes, shape, compute);
    if (numerics.compute == DType::f32) return notes.take();
    add_odd_vocabulary(notes, shape, compute);
    OddWidths(notes, costs, shape, numerics).add_all();
    return notes.take();
}

}  // namespace ferry::train
