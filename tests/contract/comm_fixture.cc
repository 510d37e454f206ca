#include "comm_fixture.h"

#include <cstdlib>

namespace ferry::comm {
namespace {

constexpr int64_t kArena = 24 * kMiB;

void run_on(DeviceKind kind, Communicator& communicator, Executor& executor, const RankTest& test) {
    const auto device = Device::open(kind, executor);
    device->reserve(kArena);
    Rank rank(communicator, executor, *device);
    test(rank);
}

}  // namespace

void on_ranks(const RanksKind& kind, const CommOptions& options, const RankTest& test) {
    const std::string name = kind.name;
    if (name == "Sim" || name == "Threads") {
        return run_ranks({.size = kind.size, .threads = name == "Threads", .options = options},
                         [&](Communicator& communicator, Executor& executor) {
                             run_on(DeviceKind::cpu, communicator, executor, test);
                         });
    }
    const auto executor = make_thread_executor();
    if (name == "Solo") {
        const auto communicator = make_solo(*executor);
        return run_on(DeviceKind::cpu, *communicator, *executor, test);
    }
    const auto communicator = make_mpi(*executor, options);
    run_on(DeviceKind::cpu, *communicator, *executor, test);
}

}  // namespace ferry::comm
