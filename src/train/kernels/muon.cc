#include "muon.h"

#include <algorithm>
#include <string>

#include "ferry/error.h"

namespace ferry::train {
namespace {

constexpr int64_t kPart = 16 * optim::kLeaf;  // elements, a thread's at a time

// Of p = 0, which becomes the momentum's move.
optim::Span momentum_of(const optim::Span& span, float* u) {
    optim::Span momentum = span;
    momentum.p_in = momentum.p = u;
    momentum.low_in = momentum.weight_in = nullptr;
    momentum.low = nullptr;
    momentum.weight = nullptr;
    return momentum;
}

// By the orthogonal one, which keeps no moment.
optim::Span step_of(const optim::Span& span, const float* o) {
    optim::Span step = span;
    step.gradient = o;
    step.gradient_type = DType::f32;
    step.moment_type = MomentType::f32;
    step.m_in = step.v_in = step.m = step.v = nullptr;
    step.m_scale_in = step.v_scale_in = nullptr;
    step.m_scale = step.v_scale = nullptr;
    return step;
}

void fill_zero(Team& team, float* at, int64_t count) {
    team.parallel(ceil_div(count, kPart), [&](int64_t part) {
        std::fill(at + part * kPart, at + std::min(count, (part + 1) * kPart), 0.0f);
    });
}

}  // namespace

Muon::Muon(const OptimizerConfig& config, NodeTeams& teams, std::span<std::byte> workspace)
    : adjust_(config.adjust_lr),
      teams_(teams),
      host_(reinterpret_cast<float*>(workspace.data())),
      iteration_(config, ops::make_cpu_matrix_kernels(teams.all()), workspace, 0) {}

Muon::Muon(const OptimizerConfig& config, NodeTeams& teams, Device& device, const OnDevice& rooms)
    : adjust_(config.adjust_lr),
      teams_(teams),
      device_(&device),
      host_(reinterpret_cast<float*>(rooms.host.data())),
      iteration_(config, ops::make_cuda_matrix_kernels(device, true), rooms.sent,
                 rooms.scratch_bytes) {
    if (!rooms.own.empty())
        on_device_.emplace(config, ops::make_cuda_matrix_kernels(device, false), rooms.own,
                           rooms.scratch_bytes);
}

void Muon::update(int64_t rows, int64_t cols, const optim::Span& span, const optim::Scalars& muon) {
    fill_zero(teams_.all(), host_, span.count);
    optim::update(teams_, momentum_of(span, host_), optim::muon_momentum(muon));
    const float* o = orthogonal(host_, rows, cols, span.count);
    optim::update(teams_, step_of(span, o),
                  optim::muon_step(muon, optim::adjust_lr_factor(adjust_, rows, cols)));
}

const float* Muon::orthogonal(float* u, int64_t rows, int64_t cols, int64_t count) {
    if (device_ == nullptr) return iteration_.orthogonalise(rows, cols, count);
    ops::MatrixKernels& kernels = iteration_.kernels();
    kernels.send(iteration_.workspace(), u, count);
    kernels.fetch(u, iteration_.orthogonalise(rows, cols, count), count);
    return u;
}

void Muon::update_on_device(int64_t rows, int64_t cols, const optim::Span& span,
                            const optim::Scalars& muon) {
    FERRY_CHECK(on_device_.has_value(), "no room for matrices of the device");
    void* stream = device_->stream(StreamKind::compute).native();
    float* u = on_device_->workspace();
    on_device_->kernels().ops().fill_zero(u, span.count * 4);
    optim::cuda::update(momentum_of(span, u), optim::muon_momentum(muon), stream);
    const float* o = on_device_->orthogonalise(rows, cols, span.count);
    optim::cuda::update(step_of(span, o),
                        optim::muon_step(muon, optim::adjust_lr_factor(adjust_, rows, cols)),
                        stream);
}

}  // namespace ferry::train
