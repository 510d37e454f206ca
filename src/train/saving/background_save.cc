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

BackgroundSave::BackgroundSave(const planner::Plan& plan, const std::vector<model::Layer>& layers,
                               Unwritten unwritten, Saving saving, std::span<std::byte> room,
                               Team& team, CheckpointRows& rows,
                               std::shared_ptr<PassingState> passing, JoinParts join)
    : plan_(plan),
      layers_(layers),
      unwritten_(std::move(unwritten)),
      saving_(std::move(saving)),
      threads_(team.threads()),
      queue_(room, team),
      rows_(rows),
      passing_(std::move(passing)),
      join_(std::move(join)) {
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
    try {
        write_or_send();
    } catch (const Abandoned&) {
        // Nothing was published.
    } catch (const Error& error) {
        failed_ = error;
    } catch (const std::exception& error) {
        failed_ = Error(Trouble::internal,
                        {.what = "a checkpoint could not be written",
                         .where = saving_.directory ? saving_.directory->directory() : "",
                         .measured = error.what()});
    }
    if (failed_ && join_) take_rest();
    stop();
    ended_.store(true, std::memory_order_release);
}

void BackgroundSave::write_or_send() {
    constexpr int kFiles = 4;  // that are written side by side
    if (!saving_.directory) {
        const auto nowhere = [](std::span<const std::span<const std::byte>>) {};
        return read_checkpoint(
            plan_, layers_, false,
            [this](int64_t layer, const model::Tensor& tensor, Kept, const ArraySink& sink) {
                take(layer, tensor, sink);
            },
            nowhere, [] { return true; });
    }
    const int64_t step = unwritten_.manifest.step;
    // Its own: a loop of training's would wait for a place in the team.
    Team team(std::min(kFiles, threads_));
    rows_.begin(CheckpointRows::Row::write);
    write_checkpoint(
        plan_, layers_, unwritten_, saving_, team,
        [&](int64_t layer, const model::Tensor& tensor, Kept, const ArraySink& sink) {
            take(layer, tensor, [&](std::span<const std::span<const std::byte>> arrays) {
                rows_.begin(CheckpointRows::Row::write);
                sink(arrays);
                rows_.note(CheckpointRows::Row::write, "write", bytes_of(arrays), step, layer);
            });
        });
    rows_.note(CheckpointRows::Row::write, "flush", 0, step);
}

// Of one tensor, in their order. What the sink throws comes when all ranks have given their parts.
void BackgroundSave::take(int64_t layer, const model::Tensor& tensor, const ArraySink& sink) {
    const auto take_own = [&](const ArraySink& to) {
        if (!queue_.take_tensor(to)) throw Abandoned();
    };
    if (!join_) return take_own(sink);
    bool has_part = false;
    std::exception_ptr failed;
    join_(
        layer, tensor,
        [&](const zero::Run&, const ArraySink& to) {
            has_part = true;
            take_own(to);
        },
        [&](std::span<const std::span<const std::byte>> arrays) {
            if (failed) return;
            try {
                sink(arrays);
            } catch (...) {
                failed = std::current_exception();
            }
        });
    if (!has_part) take_own([](std::span<const std::span<const std::byte>>) {});  // its end
    ++taken_;
    if (failed) std::rethrow_exception(failed);
}

// Of a checkpoint that cannot be written: the other ranks give all of theirs. Where one of them is
// lost, all that wait hear of it in their steps.
void BackgroundSave::take_rest() noexcept {
    const int64_t done = taken_;
    int64_t tensors = 0;
    const auto nowhere = [](std::span<const std::span<const std::byte>>) {};
    try {
        read_checkpoint(
            plan_, layers_, false,
            [&](int64_t layer, const model::Tensor& tensor, Kept, const ArraySink& sink) {
                if (tensors++ >= done) take(layer, tensor, sink);
            },
            nowhere, [] { return true; });
    } catch (...) {
        // Why it cannot be written is known.
    }
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
            plan_, layers_, saving_.errors, noted,
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
    } catch (const std::system_error& error) {
        if (join_) refuse_thread("reading a checkpoint", error.what());
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
