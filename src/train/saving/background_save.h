// A checkpoint that is written while training goes on.
#pragma once

#include <atomic>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <thread>
#include <vector>

#include "ferry/error.h"
#include "ferry/team.h"
#include "save.h"
#include "save_queue.h"
#include "train/kernels/trace_rows.h"
#include "train/state/passing_state.h"
#include "train/state/saving.h"
#include "train/state/shared_values.h"

namespace ferry::train {

// Gives the sink a tensor's arrays, of which `mine` has this rank's part. All ranks make this call,
// and it blocks until they have.
using JoinParts = std::function<void(int64_t layer, const model::Tensor& tensor,
                                     const ArraySource& mine, const ArraySink& sink)>;

class BackgroundSave {
public:
    // Starts the thread that writes. `room` holds what waits for it, and the team's threads copy it
    // there. Plan, layers, room, team and rows must outlive this. `layers` are the whole model's.
    // `passing`: where the state is read from, if it passes by. `join`: each of several ranks reads
    // its part, and those without a directory send theirs. Where it is empty, all is read here.
    // Throws does_not_fit where no thread can be made.
    BackgroundSave(const planner::Plan& plan, const std::vector<model::Layer>& layers,
                   Unwritten unwritten, Saving saving, std::span<std::byte> room, Team& team,
                   CheckpointRows& rows, std::shared_ptr<PassingState> passing = nullptr,
                   JoinParts join = {});
    ~BackgroundSave();  // waits until all is written
    BackgroundSave(const BackgroundSave&) = delete;
    BackgroundSave& operator=(const BackgroundSave&) = delete;

    // Reads all of the state. When it returns, the state lies in the room or is written.
    // `together`: other ranks take part, so all is read even where it cannot be written. Throws
    // what `read` throws. Then there is no checkpoint.
    void read(const ReadArrays& read, bool together);
    // The same by a thread of its own. The state must not change until end_reading(). False: no
    // thread could be made, and nothing is read. Where parts are joined it throws does_not_fit
    // instead, as the other ranks count on this one's part.
    bool begin_reading(ReadArrays read);
    bool reads() const { return reader_.joinable(); }
    // Makes both threads stop waiting. A checkpoint that is not whole by now is removed.
    void stop() noexcept;
    void end_reading();  // throws what `read` threw
    // Whether it was written, or could not be.
    bool ended() const { return ended_.load(std::memory_order_acquire); }
    // Waits until ended(). Returns why it could not be written. Then the files before are as they
    // were.
    [[nodiscard]] std::optional<Error> end();

private:
    void write();
    void write_or_send();
    void take(int64_t layer, const model::Tensor& tensor, const ArraySink& sink);
    void take_rest() noexcept;

    const planner::Plan& plan_;
    const std::vector<model::Layer>& layers_;
    const Unwritten unwritten_;
    const Saving saving_;
    const int threads_;
    SaveQueue queue_;
    CheckpointRows& rows_;
    const std::shared_ptr<PassingState> passing_;
    const JoinParts join_;
    int64_t taken_ = 0;              // tensors, by the thread that writes
    std::optional<Error> failed_{};  // why the thread failed; read once it has ended
    std::exception_ptr not_read_{};  // why the state could not be read; read once that has ended
    std::atomic<bool> ended_ = false;
    std::thread thread_{}, reader_{};
};

}  // namespace ferry::train
