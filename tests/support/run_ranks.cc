#include "run_ranks.h"

#include <cstdlib>
#include <numeric>
#include <span>

#include "borrowed_ranks.h"
#include "ferry/device.h"
#include "simulated_ranks.h"

namespace ferry::comm {
namespace {

constexpr size_t kTextMost = 256;

}  // namespace

int ranks_launched() {
    static const int size = [] {
        if (!launched_as_rank()) return 0;
        const auto executor = make_thread_executor();
        return make_mpi(*executor, {})->size();
    }();
    return size;
}

DeviceKind device_of_ranks() {
    const char* device = std::getenv("FERRY_TEST_DEVICE");
    return ranks_launched() > 0 && device ? device_from(device) : DeviceKind::cpu;
}

std::string as_first_rank_says(const std::string& mine) {
    if (ranks_launched() == 0) return mine;
    const auto executor = make_thread_executor();
    const auto ranks = make_mpi(*executor, {});
    FERRY_CHECK(mine.size() < kTextMost, "a short text");
    std::string own = mine, all(kTextMost * static_cast<size_t>(ranks->size()), '\0');
    own.resize(kTextMost);
    agree(*ranks, *executor, std::as_bytes(std::span(own)), std::as_writable_bytes(std::span(all)),
          {.of = "test"});
    return all.c_str();
}

void await_all_ranks() { as_first_rank_says(""); }

std::vector<int> on_run_ranks(int size, const RunBody& body) {
    if (ranks_launched() > 0) {
        FERRY_CHECK(size == ranks_launched(), "a test for another number of ranks");
        const auto executor = make_thread_executor();
        auto ranks = make_mpi(*executor, {});
        const int rank = ranks->rank();
        body(std::move(ranks), *executor);
        return {rank};
    }
    run_ranks({.size = size, .threads = true},
              [&](Communicator& ranks, Executor& executor) { body(borrow(ranks), executor); });
    std::vector<int> all(static_cast<size_t>(size));
    std::iota(all.begin(), all.end(), 0);
    return all;
}

}  // namespace ferry::comm
