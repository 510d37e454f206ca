#include "slow_notes.h"

#include <algorithm>

namespace ferry::ops::cuda {
namespace {

// FLOP/s and B/s of an H100: of cuDNN's attention forward and, deterministic, backward; of ferry's
// own; of a product; of rows. Orders of magnitude to choose by, not predictions.
constexpr double kForward = 5e14, kBackward = 3e14, kOwn = 4e13, kProduct = 6e14, kRows = 2.5e12;

std::string text(int64_t number) { return std::to_string(number); }

}  // namespace

void SlowPathNotes::note(const Attention& s, bool backward, const std::string& why) {
    const int64_t seen = s.window > 0 ? std::min(s.window, s.sequence / 2) : s.sequence / 2;
    const double flops = (backward ? 10.0 : 4.0) * static_cast<double>(seen) *
                         static_cast<double>(s.sequence) * static_cast<double>(s.sequences) *
                         static_cast<double>(s.heads * s.head_dim);
    add({.operation = backward ? "attention backward" : "attention forward",
         .shape = text(s.sequences) + " x " + text(s.sequence) + ", heads " + text(s.heads) + "/" +
                  text(s.kv_heads) + " x " + text(s.head_dim) +
                  (s.window > 0 ? ", window " + text(s.window) : ""),
         .why = "ferry's own kernel: " + why,
         .times = 1,
         .seconds = flops / kOwn,
         .fast_seconds = flops / (backward ? kBackward : kForward)});
}

void SlowPathNotes::note(const Gemm& g) {
    const int64_t depth = g.form == Form::tn ? g.a.rows : g.a.cols;
    const double elements = static_cast<double>(g.c.rows) * static_cast<double>(g.c.cols);
    const double fast = 2 * elements * static_cast<double>(depth) / kProduct;
    add({.operation = g.bias.cols > 0 ? "product with a bias" : "product",
         .shape = text(g.c.rows) + " x " + text(g.c.cols) + " x " + text(depth),
         .why = "cuBLASLt does not round it once: a sum in fp32 and a pass over it",
         .times = 1,
         .seconds = fast + 8 * elements / kRows,
         .fast_seconds = fast});
}

void SlowPathNotes::add(SlowPath path) {
    const auto known = std::ranges::find_if(all_, [&](const SlowPath& one) {
        return one.operation == path.operation && one.shape == path.shape;
    });
    if (known == all_.end()) {
        all_.push_back(std::move(path));
    } else {
        ++known->times;
    }
}

}  // namespace ferry::ops::cuda
