#include "comm_fixture.h"

#ifdef FERRY_NCCL
#include <nccl.h>
#endif

namespace ferry::comm {
namespace {

constexpr int64_t kArena = 24 * kMiB;

void run_on(Communicator& communicator, Executor& executor, Device& device, const RankTest& test) {
    device.reserve(kArena);
    Rank rank(communicator, executor, device);
    test(rank);
}
void run_on_cpu(Communicator& communicator, Executor& executor, const RankTest& test) {
    const auto device = Device::open(DeviceKind::cpu, executor);
    run_on(communicator, executor, *device, test);
}

#ifdef FERRY_NCCL
// As a runtime that has ranks of its own would: it brings the identity.
std::unique_ptr<Communicator> by_identity(Device& device, Executor& executor,
                                          Communicator& bootstrap, const CommOptions& options) {
    ncclUniqueId id{};
    if (bootstrap.rank() == 0) ncclGetUniqueId(&id);
    std::vector<ncclUniqueId> all(static_cast<size_t>(bootstrap.size()));
    agree(bootstrap, executor, std::as_bytes(std::span(&id, 1)),
          std::as_writable_bytes(std::span(all)), {.of = "identities"});
    NcclRanks ranks{.rank = bootstrap.rank(),
                    .size = bootstrap.size(),
                    .local_rank = bootstrap.local_rank(),
                    .local_size = bootstrap.local_size(),
                    .host = bootstrap.host()};
    std::memcpy(ranks.unique_id.data(), &all[0], sizeof(id));
    return make_nccl(device, executor, ranks, options);
}

void run_on_gpus(bool identity, Executor& executor, const CommOptions& options,
                 const RankTest& test) {
    auto bootstrap = make_mpi(executor, options);
    const int gpu = gpu_of_rank(*bootstrap, executor);
    const auto device = Device::open(DeviceKind::cuda, executor, gpu);
    const auto communicator = identity
                                  ? by_identity(*device, executor, *bootstrap, options)
                                  : make_nccl(*device, executor, std::move(bootstrap), options);
    run_on(*communicator, executor, *device, test);
}
#endif

}  // namespace

void on_ranks(const RanksKind& kind, const CommOptions& options, const RankTest& test) {
    const std::string name = kind.name;
    if (name == "Sim" || name == "Threads") {
        return run_ranks({.size = kind.size, .threads = name == "Threads", .options = options},
                         [&](Communicator& communicator, Executor& executor) {
                             run_on_cpu(communicator, executor, test);
                         });
    }
    const auto executor = make_thread_executor();
#ifdef FERRY_NCCL
    if (name.starts_with("Nccl")) return run_on_gpus(name == "NcclById", *executor, options, test);
#endif
    const auto communicator = name == "Solo" ? make_solo(*executor) : make_mpi(*executor, options);
    run_on_cpu(*communicator, *executor, test);
}

}  // namespace ferry::comm
