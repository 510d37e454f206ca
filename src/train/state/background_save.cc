#include "background_save.h"

#include <system_error>
#include <utility>

#include "base/process_limits.h"

namespace ferry::train {
namespace {

// The training thread failed, and says why itself.
struct Abandoned {};

}  // namespace

BackgroundSave::BackgroundSave(const planner::Plan& plan, Unwritten unwritten, Saving saving,
                               std::span<std::byte> room, Team& team)
    : plan_(plan),
      unwritten_(std::move(unwritten)),
      saving_(std::move(saving)),
      queue_(room, team) {
    try {
        thread_ = std::thread([this] { write(); });
    } catch (const std::system_error& error) {
        refuse_thread("writing a checkpoint", error.what());
    }
}

BackgroundSave::~BackgroundSave() {
    if (thread_.joinable()) thread_.join();
}

void BackgroundSave::write() {
    try {
        write_checkpoint(plan_, unwritten_, saving_,
                         [&](int64_t, const model::Tensor&, const ArraySink& sink) {
                             if (!queue_.take_tensor(sink)) throw Abandoned();
                         });
    } catch (const Abandoned&) {
        // Nothing was published.
    } catch (const Error& error) {
        failed_ = error;
    } catch (const std::exception& error) {
        failed_ = Error(Trouble::internal, {.what = "a checkpoint could not be written",
                                            .where = saving_.directory->directory(),
                                            .measured = error.what()});
    }
    queue_.close();
    ended_.store(true, std::memory_order_release);
}

void BackgroundSave::read(const ReadArrays& read, bool together) {
    try {
        read_checkpoint(
            plan_, read,
            [&](std::span<const std::span<const std::byte>> arrays) { queue_.put(arrays); },
            [&] {
                queue_.end_tensor();
                return together || !queue_.closed();
            });
    } catch (...) {
        queue_.close();
        throw;
    }
}

std::optional<Error> BackgroundSave::end() {
    if (thread_.joinable()) thread_.join();
    return std::exchange(failed_, std::nullopt);
}

}  // namespace ferry::train
