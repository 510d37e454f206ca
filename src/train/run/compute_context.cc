#include "compute_context.h"

#include <spdlog/fmt/fmt.h>

#include "base/log.h"
#include "train/inside.h"
#include "train/rank_agreement.h"

namespace ferry::train {
namespace {

void check_nccl(const NcclRanks& ranks, bool has_gpu, DeviceKind kind, bool others) {
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
    if (!has_gpu) refuse("Runtime::gpu is not given", "say which GPU is this rank's");
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
    if (ranks) make_groups(config, *runtime.executor);
}

namespace {

// Every block's sums cross whatever lies between the ranks that share its tensors.
void warn_of_hosts(const World& world, comm::Communicator& ranks, Executor& executor) {
    const std::vector<int> hosts = gather(ranks, executor, ranks.host(), "hosts");
    if (world.rank != 0) return;
    for (int first = 0; first < world.ranks; first += world.tensor) {
        for (int rank = first + 1; rank < first + world.tensor; ++rank) {
            if (hosts[static_cast<size_t>(rank)] == hosts[static_cast<size_t>(first)]) continue;
            return log_warn(fmt::format(
                "ranks {} to {} share tensors and are not on one host: every block's sums cross "
                "the network, five times a micro-batch; start ranks so that parallel.tensor "
                "divides those of a host",
                first, first + world.tensor - 1));
        }
    }
}

}  // namespace

// All ranks make the same groups in the same order.
void ComputeContext::make_groups(const Config& config, Executor& executor) {
    const World own = world(config);
    if (own.tensor > 1) warn_of_hosts(own, *ranks, executor);
    if (own.sequence > 1)
        sequence =
            comm::make_stream_exchange(*device, executor, ranks->group(own.with_sequences()));
    if (own.tensor == 1) return;
    tensors = comm::make_stream_exchange(*device, executor, ranks->group(own.with_tensors()));
    if (own.sharers() > 1) with_slice = ranks->group(own.with_slice());
}

void ComputeContext::open_device(const Config& config, Runtime& runtime) {
    Executor& executor = *runtime.executor;
    if (runtime.given && runtime.given->ranks && runtime.given->ranks->size() > 1)
        ranks = std::move(runtime.given->ranks);
    if (ranks) require_same_config(*ranks, executor, config);
    const DeviceKind kind = config.device;
    if (runtime.nccl) check_nccl(*runtime.nccl, runtime.gpu.has_value(), kind, ranks != nullptr);
    const int gpu = runtime.gpu ? *runtime.gpu : gpu_of_rank(config, ranks.get(), executor);
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
    if (!ranks) return world_of(config, 0, 1, 1);
    return world_of(config, ranks->rank(), ranks->size(), ranks->local_size());
}

comm::Communicator* ComputeContext::sharers(const Config& config) const {
    return config.parallel.tensor > 1 ? with_slice.get() : ranks.get();
}

void ComputeContext::abandon(const char* why) const noexcept {
    if (ranks) ranks->abandon(why);
}

}  // namespace ferry::train
