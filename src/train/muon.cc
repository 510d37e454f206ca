#include "muon.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "ferry/error.h"

namespace ferry::train {
namespace {

using ops::ConstView;
using ops::Form;
using ops::View;

constexpr double kLeastNorm = 1e-7;           // torch.optim.Muon's eps
constexpr int64_t kPart = 16 * optim::kLeaf;  // elements, a thread's at a time

View matrix(float* at, int64_t rows, int64_t cols) { return View::of(at, DType::f32, rows, cols); }

// body(first, end) for runs of so many elements.
template <class Body>
void in_parts(Team& team, int64_t count, const Body& body) {
    team.parallel(ceil_div(count, kPart),
                  [&](int64_t part) { body(part * kPart, std::min(count, (part + 1) * kPart)); });
}

}  // namespace

Muon::Muon(const OptimizerConfig& config, NodeTeams& teams, std::span<std::byte> workspace)
    : steps_(config.ns_steps),
      coefficients_(config.ns_coefficients),
      adjust_(config.adjust_lr),
      teams_(teams),
      ops_(ops::make_cpu_ops(teams.all())),
      workspace_(workspace) {}

void Muon::update(int64_t rows, int64_t cols, const optim::Span& span, const optim::Scalars& muon) {
    const planner::MatrixWorkspace at = planner::workspace_of(rows, cols, span.count);
    FERRY_CHECK(at.bytes() <= std::ssize(workspace_), std::to_string(span.count));
    float* u = room();
    in_parts(teams_.all(), span.count,
             [&](int64_t first, int64_t end) { std::fill(u + first, u + end, 0.0f); });
    optim::Span momentum = span;
    momentum.p_in = momentum.p = u;
    momentum.low_in = momentum.weight_in = nullptr;
    momentum.low = nullptr;
    momentum.weight = nullptr;
    optim::update(teams_, momentum, optim::muon_momentum(muon));

    const float* o = orthogonalise(rows, cols, span.count);

    optim::Span step = span;
    step.gradient = o;
    step.gradient_type = DType::f32;
    step.moment_type = MomentType::f32;
    step.m_in = step.v_in = step.m = step.v = nullptr;
    step.m_scale_in = step.v_scale_in = nullptr;
    step.m_scale = step.v_scale = nullptr;
    optim::update(teams_, step,
                  optim::muon_step(muon, optim::adjust_lr_factor(adjust_, rows, cols)));
}

float* Muon::orthogonalise(int64_t rows, int64_t cols, int64_t count) {
    const planner::MatrixWorkspace at = planner::workspace_of(rows, cols, count);
    const int64_t leaves = optim::leaves_of(count);
    float *x = room(), *next = x + at.next(), *norms = x + at.leaves();
    float *gram = x + at.gram(), *square = x + at.square();
    optim::leaf_norms(teams_.all(), x, DType::f32, count, norms);
    const double norm = std::sqrt(optim::sum_leaves({norms, static_cast<size_t>(leaves)}));
    const auto divisor = static_cast<float>(std::max(norm, kLeastNorm));
    in_parts(teams_.all(), count, [&](int64_t first, int64_t end) {
        for (int64_t i = first; i < end; ++i) x[i] /= divisor;
        std::fill(next + first, next + end, 0.0f);  // the padding
    });
    const bool wide = rows <= cols;
    const View s = matrix(gram, at.side, at.side), p = matrix(square, at.side, at.side);
    for (int64_t step = 0; step < steps_; ++step) {
        const View now = matrix(x, rows, cols);
        ops_->gemm({.form = wide ? Form::nt : Form::tn, .a = now, .b = now, .c = s}, nullptr);
        ops_->gemm({.a = s, .b = s, .c = p}, nullptr);
        polynomial(at);
        ops_->gemm({.a = wide ? ConstView(p) : ConstView(now),
                    .b = wide ? ConstView(now) : ConstView(p),
                    .c = matrix(next, rows, cols)},
                   nullptr);
        std::swap(x, next);
    }
    return x;
}

void Muon::polynomial(const planner::MatrixWorkspace& at) {
    const auto a = static_cast<float>(coefficients_.a), b = static_cast<float>(coefficients_.b),
               c = static_cast<float>(coefficients_.c);
    const float* gram = room() + at.gram();
    float* square = room() + at.square();
    teams_.all().parallel(at.side, [&](int64_t row) {
        const int64_t first = row * at.side;
        for (int64_t i = first; i < first + at.side; ++i) square[i] = b * gram[i] + c * square[i];
        square[first + row] += a;
    });
}

}  // namespace ferry::train
