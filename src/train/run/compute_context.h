// The device that a run computes on, and the ranks that it talks to.
#pragma once

#include <memory>

#include "comm/comm.h"
#include "ferry/config.h"
#include "ferry/device.h"
#include "ferry/train.h"
#include "train/rank_share.h"

namespace ferry::train {

// Communication ends before the device goes.
struct ComputeContext {
    std::unique_ptr<Device> device{};
    std::unique_ptr<comm::Communicator> ranks{};
    std::unique_ptr<comm::StreamExchange> sequence{};  // null: no other rank has parts of sequences

    // Takes the ranks out of `runtime`.
    void open(const Config& config, Runtime& runtime);
    World world(const Config& config) const;
    // This rank goes no further: the others learn it at once.
    void abandon(const char* why) const noexcept;

private:
    void open_device(const Config& config, Runtime& runtime);
};

}  // namespace ferry::train
