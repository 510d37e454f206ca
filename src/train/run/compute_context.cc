#include "compute_context.h"

#include "train/inside.h"
#include "train/rank_agreement.h"

namespace ferry::train {
namespace {

void check_nccl(const NcclRanks& ranks, int gpu, DeviceKind kind, bool others) {
    const auto refuse = [](const char* measured, const char* remedy) {
        throw Error(Trouble::usage, {.what = "ranks by an NCCL unique id cannot be used here",
                                     .where = "Runtime::nccl",
                                     .measured = measured,
                                     .remedy = remedy});
    };
    if (others) refuse("Given::ranks is given as well", "give one of the two");
    if (kind != DeviceKind::cuda)
        refuse("device is \"cpu\"",
               "set device to \"cuda\", or start the ranks with `ferry launch`");
    if (gpu < 0) refuse("Runtime::gpu is not given", "say which GPU is this rank's");
    if (ranks.rank < 0 || ranks.rank >= ranks.size)
        refuse("numbers that contradict each other", "see train::NcclRanks");
}

}  // namespace

int gpu_of_rank(const Config& config, comm::Communicator* ranks, Executor& executor) {
    if (!ranks || config.device != DeviceKind::cuda) return 0;
    return comm::gpu_of_rank(*ranks, executor);
}

namespace {

// This rank's GPU. What keeps one rank's from opening often keeps all of them. So every rank tries
// before any gives up, and each ends with its own error instead of the news of another's.
std::unique_ptr<Device> open_gpu(int gpu, comm::Communicator* ranks, Executor& executor) {
    const auto wait_for_all = [&] {
        if (ranks) gather(*ranks, executor, char{}, "the GPUs that open");
    };
    std::unique_ptr<Device> device;
    try {
        device = Device::open(DeviceKind::cuda, executor, gpu);
    } catch (...) {
        try {
            wait_for_all();
        } catch (const Error&) {
            // This rank's own error says more.
        }
        throw;
    }
    wait_for_all();
    return device;
}

}  // namespace

void ComputeContext::open(const Config& config, Runtime& runtime) {
    open_device(config, runtime);
    if (!ranks || config.parallel.sequence == 1) return;
    require_groups(ranks->size(), config.parallel.sequence);
    Executor& executor = *runtime.executor;
    auto group = ranks->group(comm::run_of(ranks->rank(), config.parallel.sequence));
    sequence = comm::make_stream_exchange(*device, executor, std::move(group));
}

void ComputeContext::open_device(const Config& config, Runtime& runtime) {
    Executor& executor = *runtime.executor;
    if (runtime.given && runtime.given->ranks && runtime.given->ranks->size() > 1)
        ranks = std::move(runtime.given->ranks);
    if (ranks) require_same_config(*ranks, executor, config);
    const DeviceKind kind = config.device;
    if (runtime.nccl) check_nccl(*runtime.nccl, runtime.gpu, kind, ranks != nullptr);
    int gpu = runtime.gpu;
    if (gpu < 0) gpu = gpu_of_rank(config, ranks.get(), executor);
    if (kind != DeviceKind::cuda) {
        device = Device::open(kind, executor);
        return;
    }
    device = open_gpu(gpu, ranks.get(), executor);
    const comm::CommOptions options{.timeout_seconds = config.zero.timeout_seconds};
    if (ranks)
        ranks = comm::make_nccl(*device, executor, std::move(ranks), options);
    else if (runtime.nccl && runtime.nccl->size > 1) {
        const NcclRanks& given = *runtime.nccl;
        ranks =
            comm::make_nccl(*device, executor, {given.unique_id, given.rank, given.size}, options);
        require_same_config(*ranks, executor, config);
    }
}

World ComputeContext::world(const Config& config) const {
    if (!ranks) return {.sequence = config.parallel.sequence};
    return {ranks->rank(), ranks->size(), ranks->local_size(), config.parallel.sequence};
}

void ComputeContext::abandon(const char* why) const noexcept {
    if (ranks) ranks->abandon(why);
}

}  // namespace ferry::train
