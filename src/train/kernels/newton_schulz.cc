#include "newton_schulz.h"

#include <algorithm>
#include <array>
#include <string>
#include <utility>

#include "ferry/error.h"

namespace ferry::train {
namespace {

using ops::ConstView;
using ops::Form;
using ops::Gemm;
using ops::View;

constexpr float kLeastNorm = 1e-7f;  // torch.optim.Muon's eps

// The three products of an iteration: x as `rows` by `cols`, s and its polynomial square.
struct Factors {
    ConstView x{}, s{}, polynomial{};
};
Gemm gram_of(const Factors& f, View c) {
    return {.form = f.x.rows <= f.x.cols ? Form::nt : Form::tn, .a = f.x, .b = f.x, .c = c};
}
Gemm square_of(const Factors& f, View c) { return {.a = f.s, .b = f.s, .c = c}; }
Gemm next_of(const Factors& f, View c) {
    const bool wide = f.x.rows <= f.x.cols;
    return {.a = wide ? f.polynomial : f.x, .b = wide ? f.x : f.polynomial, .c = c};
}

View matrix(float* at, int64_t rows, int64_t cols) { return View::of(at, DType::f32, rows, cols); }

}  // namespace

NewtonSchulz::NewtonSchulz(const OptimizerConfig& config,
                           std::unique_ptr<ops::MatrixKernels> kernels, std::span<std::byte> room,
                           int64_t scratch_bytes)
    : steps_(config.ns_steps),
      coefficients_(config.ns_coefficients),
      products_(config.ns_products),
      kernels_(std::move(kernels)),
      scratch_(room.data()),
      workspace_(room.subspan(static_cast<size_t>(scratch_bytes))) {}

struct NewtonSchulz::Iteration {
    const planner::MatrixWorkspace& at;
    int64_t rows = 0, cols = 0;
    float *x = nullptr, *next = nullptr;
};

float* NewtonSchulz::orthogonalise(int64_t rows, int64_t cols, int64_t count) {
    const planner::MatrixWorkspace at = planner::workspace_of(rows, cols, count, products_);
    FERRY_CHECK(at.bytes() <= std::ssize(workspace_), std::to_string(count));
    float *x = workspace(), *next = x + at.next(), *leaves = x + at.leaves();
    ops::Ops& ops = kernels_->ops();
    ops.round_gradient(x, count, DType::f32, x, leaves);  // for its leaves: x stays as it is
    kernels_->divide_by_norm(x, count, leaves, kLeastNorm);
    const int64_t used = rows * cols;
    if (used < count) ops.fill_zero(next + used, (count - used) * 4);
    for (int64_t step = 0; step < steps_; ++step) {
        iterate({at, rows, cols, x, next});
        std::swap(x, next);
    }
    return x;
}

ConstView NewtonSchulz::factor(const float* x, int64_t rows, int64_t cols, float* narrow) {
    const ConstView exact = ConstView::of(x, DType::f32, rows, cols);
    if (products_ == DType::f32) return exact;
    const View rounded = View::of(narrow, products_, rows, cols);
    kernels_->ops().cast(exact, rounded);
    return rounded;
}

void NewtonSchulz::iterate(const Iteration& one) {
    const planner::MatrixWorkspace& at = one.at;
    float* gram = workspace() + at.gram();
    float* square = workspace() + at.square();
    float* narrow = workspace() + at.narrow();  // both of these are used by narrow products alone
    float* narrow_square = workspace() + at.narrow_square();
    const View s = matrix(gram, at.side, at.side), p = matrix(square, at.side, at.side);
    ops::Ops& ops = kernels_->ops();
    Factors factors{.x = factor(one.x, one.rows, one.cols, narrow)};
    ops.gemm(gram_of(factors, s), scratch_);
    factors.s = factor(gram, at.side, at.side, narrow_square);
    ops.gemm(square_of(factors, p), scratch_);
    kernels_->polynomial(static_cast<float>(coefficients_.a), static_cast<float>(coefficients_.b),
                         static_cast<float>(coefficients_.c), gram, square, at.side);
    factors.polynomial = factor(square, at.side, at.side, narrow_square);
    ops.gemm(next_of(factors, matrix(one.next, one.rows, one.cols)), scratch_);
}

int64_t matrix_scratch_bytes(const ops::Ops& ops, const std::vector<model::Layer>& layers) {
    int64_t most = 0;
    const auto take = [&](const model::MatrixShape& shape, DType type) {
        const int64_t side = std::min(shape.rows, shape.cols);
        const auto view = [&](int64_t rows, int64_t cols, DType of) {
            return View::of(nullptr, of, rows, cols);
        };
        const Factors factors{.x = view(shape.rows, shape.cols, type),
                              .s = view(side, side, type),
                              .polynomial = view(side, side, type)};
        const View p = view(side, side, DType::f32);
        for (const Gemm& product : {gram_of(factors, p), square_of(factors, p),
                                    next_of(factors, view(shape.rows, shape.cols, DType::f32))})
            most = std::max(most, ops.gemm_scratch_bytes(product));
    };
    for (const model::Layer& layer : layers) {
        for (const model::Segment& segment : layer.segments) {
            for (const model::MatrixShape& shape : segment.matrices) {
                for (const DType type : {DType::f32, DType::bf16}) take(shape, type);
            }
        }
    }
    return round_up(most, planner::kPage);
}

}  // namespace ferry::train
