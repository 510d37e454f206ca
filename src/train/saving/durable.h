// A run's state besides its chunks. With both, it goes on as if nothing had happened.
#pragma once

#include <exception>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "comm/comm.h"
#include "data/tokens.h"
#include "ferry/aio.h"
#include "ferry/config.h"
#include "ferry/train.h"
#include "planner/planner.h"
#include "swap/store.h"
#include "train/loss_scale.h"

namespace ferry::train {

// The state after a step was committed. The data position follows from the step.
struct RunState {
    int64_t step = 0;
    // Of the weights, and those that their moments took in: fewer where moments began later.
    int64_t updates = 0, moment_updates = 0;
    LossScale::State loss_scale{};
    int64_t skipped_in_a_row = 0, unclipped_in_a_row = 0;
    uint64_t frozen = 0;  // hash of the frozen weights
    StepReport report{};  // that step's
};

// All that decides the run's numbers, a line each: two runs with the same text are the same run.
std::string identity_of(const Config& config, const std::string& numerics,
                        const TokenFileInfo& tokens);

// Throws usage where this rank has no state to go on from.
void require_durable_alone(const planner::Plan& plan);
Error nothing_to_resume();                                        // the run stores nothing on NVMe
Error nothing_durable(const std::string& removed, int64_t step);  // seen after it

// Where a run is when something fails: `step` is the last that was begun, `last_good` the last that
// was committed.
struct Moment {
    int64_t step = 0, last_good = 0;
    bool stores = false, durable = false;  // something on NVMe; steps that outlive the process
    swap::Store::Wrong wrong = swap::Store::Wrong::none;
};
bool is_of_storage(const std::exception& error);
// In a handler: throws the exception again. An error of storage only knows the place. It gets the
// step, the last good step, and what has become of the state.
[[noreturn]] void throw_again_at(const Moment& moment);

// States of one run as bytes, and back.
class RunRecord {
public:
    // A run of so many steps.
    RunRecord(std::string identity, int64_t steps)
        : identity_(std::move(identity)), steps_(steps) {}

    // Valid until the next call. `room` is the most it may be; throws usage.
    std::span<const std::byte> write(const RunState& state, int64_t room);
    // Throws usage, naming what differs, where the bytes are of another run, or of a step that this
    // one does not come to.
    RunState read(std::span<const std::byte> bytes) const;

private:
    void refuse_another(const std::string& theirs) const;

    std::string identity_;
    int64_t steps_;
    std::vector<std::byte> bytes_{};
};

// Whether the newest record of a volume is of this run's last step; `map_bytes` come before it.
// Throws usage where it is of another run.
bool has_ended(const aio::Volume& volume, const RunRecord& record, int64_t map_bytes,
               int64_t steps);

// Reads all slots of a record, and returns the hash of the frozen weights. Before it writes any
// weight it calls may_write(). Where that is false it writes none and returns nothing.
using Prove = std::function<std::optional<uint64_t>(const std::function<bool()>& may_write)>;

// Resumes from the newest record whose every slot is as it was written. Throws usage where the run
// is another one, io where no record can be used: it says whether a transfer failed, or all of them
// are wrong.
RunState resume(swap::Store& store, const RunRecord& record, const Prove& prove);
// The same for several ranks: from the newest step of which all of them have such a record. No rank
// writes anything before that is known.
RunState resume(swap::Store& store, const RunRecord& record, const Prove& prove,
                comm::Communicator& ranks, Executor& executor);

// Says after which step a run goes on, and which steps it does again. Those are the steps up to
// `noted`, the last one that its files have as committed (-1: none).
std::string resumed_text(int64_t step, int64_t noted);

}  // namespace ferry::train
