// What a run is, before anything is taken for it: its ranks, its part of the work, its model and
// its text.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "compute_context.h"
#include "cost/measurements.h"
#include "ferry/config.h"
#include "ferry/device.h"
#include "ferry/executor.h"
#include "ferry/learning_rate.h"
#include "ferry/optim.h"
#include "ferry/train.h"
#include "model/huggingface.h"
#include "model/model.h"
#include "trace/trace.h"
#include "train/kernels/kernel_exchange.h"
#include "train/setup/loader_of.h"
#include "train/setup/model_of.h"
#include "train/setup/rank_share.h"
#include "train/step/momentum_schedule.h"

namespace ferry::train {

// All of it follows from the configuration, the runtime and the ranks, and stays as it is.
struct RunSetup {
    Config config{};  // as it was given: what ferry chooses of it is in Cut (run_plans.h)
    Executor& executor;
    // Of the program, which may have none.
    trace::Recording* recording = nullptr;
    const cost::Measurements* measurements = nullptr;
    bool measures_bound = false;
    bool trains = true;
    Progress progress{};

    std::shared_ptr<ComputeContext> context;
    Device& device;
    comm::Communicator* ranks = nullptr;    // null: there is only this one
    comm::Communicator* sharers = nullptr;  // of state, weights and gradients; null: there are none
    World world{};
    RankShare share{};
    // Null: this rank has whole sequences, or whole tensors.
    std::unique_ptr<KernelExchange> of_sequences{}, of_tensors{};

    optim::Hyper hyper{};
    optim::LrSchedule schedule{};
    MomentumSchedule momentum;

    model::Description described{};
    model::Numerics numerics{};
    std::vector<model::Layer> layers{};  // of the whole model
    std::unique_ptr<Batches> loader{};
    std::string checkpoint_identity{};
    // The model's config.json, where checkpoints are written: the model's directory may be gone
    // by then.
    std::string description{};

    const model::Shape& shape() const { return described.shape; }
    KernelExchanges kernel_exchanges() const { return {of_sequences.get(), of_tensors.get()}; }
    bool scales_loss() const { return numerics.compute == DType::f16; }
    bool is_first_rank() const { return world.rank == 0; }
};

// Opens the token file, and reads the model's configuration. All ranks at once. Throws usage and
// io.
RunSetup set_up(const Config& config, const Runtime& runtime,
                std::shared_ptr<ComputeContext> context);

}  // namespace ferry::train
