#include "slow_shapes.h"

#include <string>
#include <utility>

namespace ferry::train {
namespace {

// B/s of rows, as src/ops/cuda/slow_notes.cc has them.
constexpr double kRows = 2.5e12;
// The most elements of a row that a norm's threads hold (src/ops/cuda/norm_plan.h), the heads whose
// norm and RoPE are one kernel (rotation.h), and the columns that tensor cores take together.
constexpr int64_t kMostHeld = 8192, kRotatedHead = 128, kTensorUnit = 8;

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
    if (compute != 2 || shape.vocab % kTensorUnit == 0 || shape.hidden % kTensorUnit != 0) return;
    notes.add("product with " + std::to_string(shape.vocab) + " words", shape.hidden,
              "the vocabulary is no multiple of " + std::to_string(kTensorUnit) +
                  ": a sum in fp32 and a pass over it",
              8 + compute, compute, 1);
}

}  // namespace

std::vector<ops::SlowPath> slow_shapes(const model::Shape& shape, const model::Numerics& numerics,
                                       int64_t micro_batches) {
    Notes notes(numerics.sequence * numerics.micro_batch, micro_batches);
    const auto compute = static_cast<double>(size_of(numerics.compute));
    add_wide_norms(notes, shape, static_cast<double>(size_of(numerics.residual)), compute);
    add_turned_heads(notes, shape, compute);
    add_odd_vocabulary(notes, shape, compute);
    return notes.take();
}

}  // namespace ferry::train
