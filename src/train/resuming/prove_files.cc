#include "prove_files.h"

#include <atomic>
#include <mutex>
#include <optional>
#include <vector>

#include "checkpoint/saved.h"
#include "ferry/error.h"

namespace ferry::train {

void prove_files(const std::string& checkpoint, std::span<const checkpoint::Shard> files,
                 Team& team, int part, int parts, StartUp& start_up) {
    constexpr const char* kStage = "checksums of the checkpoint";
    std::vector<const checkpoint::Shard*> mine;
    int64_t all = 0;
    for (size_t i = static_cast<size_t>(part); i < files.size(); i += static_cast<size_t>(parts)) {
        mine.push_back(&files[i]);
        all += files[i].bytes;
    }
    std::atomic<int64_t> bytes = 0;
    std::mutex mutex;
    std::optional<Error> failed;
    team.parallel(std::ssize(mine), [&](int64_t i) {
        try {
            checkpoint::check_shard(checkpoint, *mine[static_cast<size_t>(i)], [&](int64_t read) {
                const int64_t by_now = bytes += read;
                const std::lock_guard lock(mutex);
                start_up.at(kStage, by_now, all);
            });
        } catch (const Error& error) {
            const std::lock_guard lock(mutex);
            if (!failed) failed = error;
        }
    });
    if (failed) throw Error(*failed);
    start_up.done(kStage, bytes);
}

}  // namespace ferry::train
