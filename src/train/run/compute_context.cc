#include "compute_context.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>

#include "base/log.h"
#include "train/inside.h"
#include "train/rank_agreement.h"
#include "train/state/saving.h"

namespace ferry::train {
namespace {

void check_nccl(const NcclRanks& ranks, bool has_gpu, DeviceKind kind, bool others) {
    const auto refuse = [](const char* measured, const char* remedy) {
        throw Error(Trouble::usage, {.what = "ranks by an NCCL unique id cannot be used here",
                                     .where = "Runtime::nccl",
                                     .measured = measured,
                                     .remedy = remedy});
    };
    if (others) refuse("InsideOptions::ranks is given as well", "give one of the two");
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

// Where runs of so many neighbours are not all on one host each. `who`: what they do; `so`: what
// follows.
void warn_of_hosts(const World& world, int neighbours, const char* who, const char* so,
                   comm::Communicator& ranks, Executor& executor) {
    const std::vector<int> hosts = gather(ranks, executor, ranks.host(), "hosts");
    if (world.rank != 0) return;
    for (int first = 0; first < world.ranks; first += neighbours) {
        for (int rank = first + 1; rank < first + neighbours; ++rank) {
            if (hosts[static_cast<size_t>(rank)] == hosts[static_cast<size_t>(first)]) continue;
            return log_warn(fmt::format("ranks {} to {} {} and are not on one host: {}", first,
                                        first + neighbours - 1, who, so));
        }
    }
}

}  // namespace

// All ranks make the same groups in the same order.
void ComputeContext::make_groups(const Config& config, Executor& executor) {
    const World own = find_alike(ranks.get(), executor, [&] { return world(config); });
    if (own.tensor > 1)
        warn_of_hosts(own, own.tensor, "share tensors",
                      "every block's sums cross the network, five times a micro-batch; start ranks "
                      "so that parallel.tensor divides those of a host",
                      *ranks, executor);
    if (own.host_ranks > 1) make_host_groups(own, executor);
    if (own.sequence > 1)
        sequence =
            comm::make_stream_exchange(*device, executor, ranks->group(own.with_sequences()));
    if (own.tensor > 1)
        tensors = comm::make_stream_exchange(*device, executor, ranks->group(own.with_tensors()));
    if (own.tensor * own.pipeline > 1 && own.sharers() > 1)
        with_slice = ranks->group(own.with_slice());
    if (own.tensor > 1 && own.pipeline > 1)
        of_all_stages = ranks->group(comm::across_runs(own.rank, own.tensor, own.ranks));
    if (own.pipeline > 1) make_pairs(own);
    if (!saves_on_the_way(config) || own.sharers() < own.ranks || executor.simulated()) return;
    saving_executor = make_thread_executor();
    saving = ranks->beside(*saving_executor);
}

void ComputeContext::make_host_groups(const World& own, Executor& executor) {
    warn_of_hosts(own, own.host_ranks, "are to share one by zero.ranks_per_host",
                  "what they exchange among themselves first crosses the network; set it to the "
                  "ranks that each host really has",
                  *ranks, executor);
    in_host = ranks->group(comm::run_of(own.rank, own.host_ranks));
    across_hosts = ranks->group(comm::across_runs(own.rank, own.host_ranks, own.ranks));
}

// Of stages 0 and 1, 2 and 3, ..., then of 1 and 2, 3 and 4, ..., then of the first and the last.
void ComputeContext::make_pairs(const World& own) {
    const int last = own.pipeline - 1;
    const auto pair_with = [&](int stage) {
        std::vector<int> members{own.rank};
        if (stage >= 0 && stage <= last && stage != own.stage())
            members.push_back(own.at_stage(stage));
        std::ranges::sort(members);
        return ranks->group(members);
    };
    const int stage = own.stage();
    pairs[0] = pair_with(stage % 2 == 0 ? stage + 1 : stage - 1);
    pairs[1] = pair_with(stage % 2 == 0 ? stage - 1 : stage + 1);
    if (last > 1) pairs[2] = pair_with(stage == 0 ? last : stage == last ? 0 : stage);
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
    const bool all = config.parallel.tensor == 1 && config.parallel.pipeline == 1;
    return all ? ranks.get() : with_slice.get();
}

std::array<comm::Communicator*, cost::kStageLinks> ComputeContext::links(
    const Config& config) const {
    std::array<comm::Communicator*, cost::kStageLinks> found{};
    if (config.parallel.pipeline == 1) return found;
    const auto of = [this](size_t pair) {
        comm::Communicator* made = pairs[pair].get();
        return made && made->size() == 2 ? made : nullptr;
    };
    const bool even = world(config).stage() % 2 == 0;
    const auto at = [&found](cost::StageLink link) -> comm::Communicator*& {
        return found[static_cast<size_t>(link)];
    };
    at(cost::StageLink::next) = of(even ? 0 : 1);
    at(cost::StageLink::previous) = of(even ? 1 : 0);
    // Of two stages the first and the last are neighbours.
    comm::Communicator* const ends = config.parallel.pipeline == 2 ? of(0) : of(2);
    at(cost::StageLink::table) = ends;
    // From the last stage to the first one's next virtual stage.
    if (config.parallel.virtual_stages == 1) return found;
    for (const cost::StageLink link : {cost::StageLink::next, cost::StageLink::previous})
        if (at(link) == nullptr) at(link) = ends;
    return found;
}

void ComputeContext::abandon(const char* why) const noexcept {
    if (ranks) ranks->abandon(why);
}

}  // namespace ferry::train
