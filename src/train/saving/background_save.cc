#include "background_save.h"

#include <algorithm>
#include <system_error>
#include <utility>

#include "base/process_limits.h"

namespace ferry::train {
namespace {

// The training thread failed, and says why itself.
struct Abandoned {};

int64_t bytes_of(std::span<const std::span<const std::byte>> arrays) {
    int64_t bytes = 0;
    for (const std::span<const std::byte> array : arrays) bytes += std::ssize(array);
    return bytes;
}

}  // namespace

BackgroundSave::BackgroundSave(const planner::Plan& plan, Unwritten unwritten, Saving saving,
                               std::span<std::byte> room, Team& team, CheckpointRows& rows,
                               std::shared_ptr<PassingState> passing)
    : plan_(plan),
      unwritten_(std::move(unwritten)),
      saving_(std::move(saving)),
      threads_(team.threads()),
      queue_(room, team),
      rows_(rows),
      passing_(std::move(passing)) {
    try {
        thread_ = std::thread([this] { write(); });
    } catch (const std::system_error& error) {
        refuse_thread("writing a checkpoint", error.what());
    }
}

BackgroundSave::~BackgroundSave() {
    if (reader_.joinable()) reader_.join();
    if (thread_.joinable()) thread_.join();
}

void BackgroundSave::write() {
    constexpr int kFiles = 4;  // that are written side by side
    const int64_t step = unwritten_.manifest.step;
    try {
        // Its own: a loop of training's would wait for a place in the team.
        Team team(std::min(kFiles, threads_));
        rows_.begin(CheckpointRows::Row::write);
        write_checkpoint(plan_, unwritten_, saving_, team,
                         [&](int64_t layer, const model::Tensor&, Kept, const ArraySink& sink) {
                             const bool whole = queue_.take_tensor(
                                 [&](std::span<const std::span<const std::byte>> arrays) {
                                     rows_.begin(CheckpointRows::Row::write);
                                     sink(arrays);
                                     rows_.note(CheckpointRows::Row::write, "write",
                                                bytes_of(arrays), step, layer);
                                 });
                             if (!whole) throw Abandoned();
                         });
        rows_.note(CheckpointRows::Row::write, "flush", 0, step);
    } catch (const Abandoned&) {
        // Nothing was published.
    } catch (const Error& error) {
        failed_ = error;
    } catch (const std::exception& error) {
        failed_ = Error(Trouble::internal, {.what = "a checkpoint could not be written",
                                            .where = saving_.directory->directory(),
                                            .measured = error.what()});
    }
    stop();
    ended_.store(true, std::memory_order_release);
}

void BackgroundSave::stop() noexcept {
    queue_.close();
    if (passing_) passing_->close();
}

void BackgroundSave::read(const ReadArrays& read, bool together) {
    const int64_t step = unwritten_.manifest.step;
    int64_t layer = -1;
    const ReadArrays noted = [&](int64_t of, const model::Tensor& tensor, Kept what,
                                 const ArraySink& sink) {
        layer = of;
        read(of, tensor, what, sink);
    };
    try {
        rows_.begin(CheckpointRows::Row::read);
        read_checkpoint(
            plan_, saving_.errors, noted,
            [&](std::span<const std::span<const std::byte>> arrays) {
                rows_.note(CheckpointRows::Row::read, "read", bytes_of(arrays), step, layer);
                queue_.put(arrays);
                rows_.note(CheckpointRows::Row::read, "copy", bytes_of(arrays), step, layer);
            },
            [&] {
                queue_.end_tensor();
                return together || !queue_.closed();
            });
        if (passing_) passing_->close();
    } catch (const PassingState::Closed&) {
        queue_.close();
    } catch (...) {
        stop();
        throw;
    }
}

bool BackgroundSave::begin_reading(ReadArrays read) {
    try {
        reader_ = std::thread([this, all = std::move(read)] {
            try {
                this->read(all, false);
            } catch (...) {
                not_read_ = std::current_exception();
            }
        });
        return true;
    } catch (const std::system_error&) {
        return false;
    }
}

void BackgroundSave::end_reading() {
    if (reader_.joinable()) reader_.join();
    if (not_read_) std::rethrow_exception(std::exchange(not_read_, nullptr));
}

std::optional<Error> BackgroundSave::end() {
    end_reading();
    if (thread_.joinable()) thread_.join();
    return std::exchange(failed_, std::nullopt);
}

}  // namespace ferry::train
