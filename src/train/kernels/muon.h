// Muon's whole update of a matrix: momentum, orthogonalisation, step (ferry/optim.h). The device
// that computes the model orthogonalises. Whoever has the state does momentum and step. Where the
// processors have it, they send a GPU the momentum's move and get it back orthogonal.
#pragma once

#include <optional>
#include <span>

#include "ferry/config.h"
#include "ferry/device.h"
#include "ferry/optim.h"
#include "ferry/team.h"
#include "newton_schulz.h"

namespace ferry::train {

class Muon {
public:
    // On the processors. `workspace`: as planner::MatrixWorkspace. All of it outlives this.
    Muon(const OptimizerConfig& config, NodeTeams& teams, std::span<std::byte> workspace);
    // On a GPU, whose rooms begin with so many bytes of scratch.
    struct OnDevice {
        std::span<std::byte> host{};  // page-locked in a run: a matrix, in fp32
        std::span<std::byte> sent{};  // device memory: of those that come from there
        std::span<std::byte> own{};   // of those whose state lies there; empty: none
        int64_t scratch_bytes = 0;
    };
    Muon(const OptimizerConfig& config, NodeTeams& teams, Device& device, const OnDevice& rooms);

    // `span` is a matrix of rows x cols elements, then padding of zeros. It may be updated in place
    // or not, with any format of the master and of the moment. Called on the team's lane; it waits
    // for the GPU.
    void update(int64_t rows, int64_t cols, const optim::Span& span, const optim::Scalars& muon);
    // The same of device memory, enqueued on the device's compute stream. The same bits.
    void update_on_device(int64_t rows, int64_t cols, const optim::Span& span,
                          const optim::Scalars& muon);

private:
    const float* orthogonal(float* u, int64_t rows, int64_t cols, int64_t count);

    const optim::AdjustLr adjust_;
    NodeTeams& teams_;
    Device* const device_ = nullptr;  // null: the processors'
    float* const host_ = nullptr;
    NewtonSchulz iteration_;
    std::optional<NewtonSchulz> on_device_{};
};

}  // namespace ferry::train
