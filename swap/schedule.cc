#include "swap/schedule.h"
#include "ferry/error.h"

namespace ferry::swap {

std::string_view name_of(Lane lane) {
    static constexpr std::string_view kNames[] = {"compute", "h2d",       "d2h",        "team",
                                                  "check",   "nvme read", "nvme write", "comm"};
    return kNames[static_cast<size_t>(lane)];
}

const char* name_of(Verb verb) {
    static constexpr const char* kNames[] = {"kernel", "copy",   "read",   "write",
                                             "seal",   "verify", "commit", "rollback"};
    return kNames[static_cast<size_t>(verb)];
}

void prove_acyclic(const Schedule& schedule) {
    std::array<uint32_t, kLanes> recorded{};
    for (const Task& task : schedule.tasks) {
        for (uint32_t w = task.first_wait; w < task.first_wait + task.waits; ++w) {
            const Wait& wait = schedule.waits[w];
            FERRY_CHECK(wait.index < recorded[static_cast<size_t>(wait.lane)], schedule.name);
        }
        FERRY_CHECK(task.index == recorded[static_cast<size_t>(task.lane)]++, schedule.name);
    }
}

}  // namespace ferry::swap
