// The device that a run computes on, and the ranks that it talks to.
#pragma once

#include <array>
#include <memory>

#include "comm/comm.h"
#include "cost/operations.h"
#include "ferry/config.h"
#include "ferry/device.h"
#include "ferry/executor.h"
#include "ferry/train.h"
#include "train/setup/rank_share.h"

namespace ferry::train {

// Communication ends before the device goes.
struct ComputeContext {
    std::unique_ptr<Device> device{};
    std::unique_ptr<comm::Communicator> ranks{};
    std::unique_ptr<comm::Communicator> with_slice{};  // null: of these ranks, all or this one
    // The same of all stages, whose ranks have that slice of any layer; null: all ranks have.
    std::unique_ptr<comm::Communicator> of_all_stages{};
    // Of those, this host's and the ones that stand alike in the other hosts; null: no such groups.
    std::unique_ptr<comm::Communicator> in_host{}, across_hosts{};
    std::unique_ptr<comm::StreamExchange> sequence{};  // null: no other rank has parts of sequences
    std::unique_ptr<comm::StreamExchange> tensors{};   // null: none has other slices of tensors
    // Pairs with ranks of other stages; who has no partner is one alone.
    std::array<std::unique_ptr<comm::Communicator>, cost::kStageLinks> pairs{};
    // The ranks once more, for the threads by which they send a checkpoint to the first of them;
    // null: training's gather it.
    std::unique_ptr<Executor> saving_executor{};
    std::unique_ptr<comm::Communicator> saving{};

    // Takes the ranks out of `runtime`.
    void open(const Config& config, Runtime& runtime);
    World world(const Config& config) const;  // throws usage: world_of
    // The ranks that share state, weights and gradients with this one; null: none.
    comm::Communicator* sharers(const Config& config) const;
    // To the ranks of other stages, by cost::StageLink; null: there is none.
    std::array<comm::Communicator*, cost::kStageLinks> links(const Config& config) const;
    // This rank goes no further: the others learn it at once.
    void abandon(const char* why) const noexcept;

private:
    void open_device(const Config& config, Runtime& runtime);
    void make_groups(const Config& config, Executor& executor);
    void make_host_groups(const World& own, Executor& executor);
    void make_pairs(const World& own);
};

}  // namespace ferry::train
