#include "run_setup.h"

#include <utility>

#include "train/inside.h"
#include "train/rank_agreement.h"
#include "train/saving/save.h"
#include "train/setup/from_config.h"

namespace ferry::train {
namespace {

std::unique_ptr<KernelExchange> exchange_of(comm::StreamExchange* ranks, const char* of) {
    return ranks ? std::make_unique<KernelExchange>(*ranks, of) : nullptr;
}

}  // namespace

RunSetup set_up(const Config& config, const Runtime& runtime,
                std::shared_ptr<ComputeContext> context) {
    const InsideOptions none;
    const InsideOptions& given = runtime.given ? *runtime.given : none;
    comm::Communicator* const ranks = context->ranks.get();
    const World world = context->world(config);
    auto of_sequences = exchange_of(context->sequence.get(), "heads");
    auto of_tensors = exchange_of(context->tensors.get(), "sums");
    RankShare share = find_alike(ranks, *runtime.executor, [&] { return share_of(config, world); });
    const optim::LrSchedule schedule = schedule_of(config);

    model::Description described = model_of(config);
    const model::Numerics numerics = numerics_of(config, described.shape, world);
    std::unique_ptr<Batches> loader = batches_of(config, described.shape, runtime, world);
    std::vector<model::Layer> layers =
        layers_of(config, described.shape, world.ranks, world.slicing().rank);
    std::string identity = checkpoint_identity_of(config, described.shape, loader->info());
    std::string description =
        config.checkpoint.dir.empty() ? "" : description_of(config, numerics.compute);

    Device& device = *context->device;
    comm::Communicator* const sharers = context->sharers(config);
    return {.config = config,
            .executor = *runtime.executor,
            .recording = given.recording,
            .measurements = given.measurements,
            .measures_bound = given.measures_bound,
            .trains = !runtime.only_evaluates,
            .progress = runtime.progress,
            .context = std::move(context),
            .device = device,
            .ranks = ranks,
            .sharers = sharers,
            .world = world,
            .share = std::move(share),
            .of_sequences = std::move(of_sequences),
            .of_tensors = std::move(of_tensors),
            .hyper = hyper_of(config),
            .schedule = schedule,
            .momentum = MomentumSchedule(config.optimizer),
            .described = std::move(described),
            .numerics = numerics,
            .layers = std::move(layers),
            .loader = std::move(loader),
            .checkpoint_identity = std::move(identity),
            .description = std::move(description)};
}

}  // namespace ferry::train
