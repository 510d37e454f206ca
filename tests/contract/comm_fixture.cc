#include "comm_fixture.h"

#include "base/threads.h"
#include "tests/support/nccl_unique_id.h"

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
void run_on_gpus(bool by_unique_id, Executor& executor, const CommOptions& options,
                 const RankTest& test) {
    auto bootstrap = make_mpi(executor, options);
    const int gpu = gpu_of_rank(*bootstrap, executor);
    const auto device = Device::open(DeviceKind::cuda, executor, gpu);
    const auto communicator =
        by_unique_id ? make_nccl(*device, executor, with_unique_id(*bootstrap, executor), options)
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
