#include "durable.h"

#include <spdlog/fmt/fmt.h>
#include <spdlog/fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <sstream>
#include <type_traits>

#include "base/log.h"
#include "train/rank_agreement.h"

namespace ferry::train {
namespace {

constexpr uint64_t kFormat = 3;
struct Stored {
    uint64_t format;
    RunState state;
    uint64_t identity_bytes;  // which follow
};
static_assert(std::is_trivially_copyable_v<Stored>);

}  // namespace

std::string identity_of(const Config& config, const std::string& numerics,
                        const TokenFileInfo& tokens) {
    return describe_training(config) +
           fmt::format("numerics = {}\ndata.tokens = {} tokens with checksum {:016x}\n", numerics,
                       tokens.count, tokens.checksum);
}

void require_durable_alone(const planner::Plan& plan) {
    const std::string rank =
        fmt::format("rank {} of {}", plan.partition.rank, plan.partition.ranks);
    if (plan.durable) return;
    throw Error(Trouble::usage,
                {.what = "a rank has no state that could outlive it",
                 .where = "checkpoint.durable_steps",
                 .measured = rank,
                 .remedy = "start fewer ranks, or use checkpoints (checkpoint.dir)"});
}

Error nothing_to_resume() {
    return {Trouble::usage,
            {.what = "there is nothing to resume: this run keeps nothing on NVMe",
             .where = "budgets.nvme",
             .remedy = "start without --resume; with checkpoint.durable_steps a run survives "
                       "but for its last steps"}};
}

Error nothing_durable(const std::string& removed, int64_t step) {
    return {Trouble::io,
            {.what = "a file of the durable state was removed, replaced or overwritten under the "
                     "run: nothing of it will outlive the process",
             .where = removed,
             .measured = fmt::format("seen after step {}", step),
             .remedy = "the run goes on, and ends with exit code 4: write its weights "
                       "(--weights-out, --export), and give the next one a directory of its own"}};
}

bool is_of_storage(const std::exception& error) {
    const auto* known = dynamic_cast<const Error*>(&error);
    return known && known->trouble() == Trouble::io;
}

namespace {

// No word that a state is good where a byte of it is known to be wrong.
const char* what_resumes(swap::Store::Wrong wrong) {
    switch (wrong) {
        case swap::Store::Wrong::none:
            return "--resume goes on from the last durable step";
        case swap::Store::Wrong::elsewhere:
            return "the last durable step has none of these bytes: --resume reads the others "
                   "first, "
                   "and goes on from it if they are right";
        case swap::Store::Wrong::in_published:
            break;
    }
    return "the last durable step has these bytes too: --resume reads all of it first, and goes on "
           "only if they are right then, or the durable step before it is still whole";
}

}  // namespace

void throw_again_at(const Moment& moment) {
    const auto add = [](std::string& to, const char* between, const std::string& text) {
        to += (to.empty() ? "" : between) + text;
    };
    try {
        throw;
    } catch (const Error& error) {
        if (!is_of_storage(error)) throw;
        Problem problem = error.problem();
        const bool begun = moment.step > moment.last_good;
        add(problem.where, ", ",
            (begun ? "in step " : "after step ") + std::to_string(moment.step));
        add(problem.limit, "; ", "the last good step is " + std::to_string(moment.last_good));
        if (moment.durable)
            add(problem.remedy, "; ", what_resumes(moment.wrong));
        else if (moment.stores)
            add(problem.remedy, "; ",
                "its state is lost: start again (checkpoint.durable_steps keeps it)");
        throw Error(error.trouble(), std::move(problem));
    }
}

std::span<const std::byte> RunRecord::write(const RunState& state, int64_t room) {
    const Stored stored{kFormat, state, identity_.size()};
    bytes_.resize(sizeof stored + identity_.size());
    if (std::ssize(bytes_) > room)
        throw Error(Trouble::usage,
                    {.what = "the configuration is too long to be kept beside the durable state",
                     .where = "checkpoint.durable_steps",
                     .measured = std::to_string(bytes_.size()) + " bytes",
                     .limit = std::to_string(room) + " bytes",
                     .remedy = "use fewer or shorter patterns in \"freeze\""});
    std::memcpy(bytes_.data(), &stored, sizeof stored);
    std::memcpy(bytes_.data() + sizeof stored, identity_.data(), identity_.size());
    return bytes_;
}

RunState RunRecord::read(std::span<const std::byte> bytes) const {
    Stored stored{};
    if (bytes.size() >= sizeof stored) std::memcpy(&stored, bytes.data(), sizeof stored);
    if (stored.format != kFormat || stored.identity_bytes != bytes.size() - sizeof stored)
        throw Error(Trouble::usage,
                    {.what = "the run cannot be resumed: its state is of another format",
                     .measured = "format " + std::to_string(stored.format),
                     .limit = "format " + std::to_string(kFormat),
                     .remedy = "finish the run with the ferry that began it"});
    const auto* text = reinterpret_cast<const char*>(bytes.data() + sizeof stored);
    const std::string theirs(text, bytes.size() - sizeof stored);
    if (theirs != identity_) refuse_another(theirs);
    if (stored.state.step > steps_)
        throw Error(Trouble::usage,
                    {.what = "the run cannot be resumed: it has gone on beyond its last step",
                     .where = "steps",
                     .measured = fmt::format("steps = {}", steps_),
                     .limit = fmt::format("the run has come to step {}", stored.state.step),
                     .remedy = fmt::format("set steps to {} or more", stored.state.step)});
    return stored.state;
}

void RunRecord::refuse_another(const std::string& theirs) const {
    std::istringstream mine_lines(identity_), their_lines(theirs);
    std::string mine, their;
    // Where a key was added or removed, that line differs from its neighbour.
    while (std::getline(their_lines, their) && std::getline(mine_lines, mine) && mine == their) {
    }
    const std::string key = mine.substr(0, mine.find(" = "));
    throw Error(Trouble::usage,
                {.what = "the run cannot be resumed: the configuration is another one",
                 .where = key,
                 .measured = mine,
                 .limit = "the run has " + their,
                 .remedy = "resume with the configuration it was started with; steps, budgets.*, "
                           "swap.*, io.* and evaluate.* may differ as far as the plan stays the "
                           "same"});
}

namespace {

// State that could not be read may be whole, and a full disk leaves it whole: the remedy never says
// to give that up.
Error not_resumed(const std::optional<Problem>& failed, const std::optional<Problem>& wrong) {
    Problem problem = failed ? *failed : wrong.value_or(Problem{});
    if (failed) {
        problem.what = "the run cannot be resumed, its state cannot be restored: " + problem.what;
        problem.remedy +=
            "; the durable steps were left as they are: --resume goes on once that is mended";
    } else {
        problem.what = "the run cannot be resumed, its state is not consistent: " + problem.what;
        problem.remedy =
            "check the drive; start afresh, without --resume, after removing the ferry.* "
            "files there";
    }
    return {Trouble::io, std::move(problem)};
}

}  // namespace

namespace {

// Records that are tried one after the other, and what was wrong with them: the first of each kind.
class Attempts {
public:
    Attempts(swap::Store& store, const RunRecord& record, const Prove& prove)
        : store_(store), record_(record), prove_(prove) {}

    // Whether `work` ended with a record as it was written. What else is wrong it throws.
    template <class Work>
    bool succeeds(const Work& work) {
        try {
            work();
            return true;
        } catch (const swap::TransferFailed& error) {
            note(failed_, error);
        } catch (const Error& error) {
            if (error.trouble() != Trouble::io) throw;
            note(wrong_, error);
        }
        return false;
    }
    // None: there is no n-th record.
    std::optional<RunState> read(size_t n) const {
        const auto bytes = store_.restore(n);
        return bytes ? std::optional(record_.read(*bytes)) : std::nullopt;
    }
    // The state of the record that was read last.
    void prove(const RunState& state, const std::function<bool()>& may_write) const {
        const auto frozen = prove_(may_write);
        if (!frozen || *frozen == state.frozen) return;
        throw Error(Trouble::usage,
                    {.what = "the run cannot be resumed: its frozen weights are others",
                     .where = "model.path, freeze",
                     .remedy = "resume with the model directory it was started with"});
    }
    bool has_failed() const { return failed_ || wrong_; }
    Error error() const { return not_resumed(failed_, wrong_); }

private:
    static void note(std::optional<Problem>& kind, const Error& error) {
        log_warn(std::string("a record of the durable state cannot be used: ") + error.what());
        if (!kind) kind = error.problem();
    }

    swap::Store& store_;
    const RunRecord& record_;
    const Prove& prove_;
    std::optional<Problem> failed_{}, wrong_{};
};

constexpr size_t kRecords = 2;                      // of a volume
using StepsOfRank = std::array<int64_t, kRecords>;  // of its records; below 0: it cannot be used

// Those that all ranks have, the newest first.
std::vector<int64_t> in_common(std::span<const StepsOfRank> ranks) {
    std::vector<int64_t> steps;
    for (const int64_t step : ranks.front()) {
        const bool all = std::ranges::all_of(ranks, [&](const StepsOfRank& rank) {
            return std::ranges::find(rank, step) != rank.end();
        });
        if (step >= 0 && all) steps.push_back(step);
    }
    std::ranges::sort(steps, std::greater<>());
    steps.erase(std::unique(steps.begin(), steps.end()), steps.end());
    return steps;
}

}  // namespace

RunState resume(swap::Store& store, const RunRecord& record, const Prove& prove) {
    Attempts attempts(store, record, prove);
    for (size_t n = 0;; ++n) {
        std::optional<RunState> state;
        const bool whole = attempts.succeeds([&] {
            state = attempts.read(n);
            if (state) attempts.prove(*state, [] { return true; });
        });
        if (whole && state) return *state;
        if (whole) throw attempts.error();
    }
}

RunState resume(swap::Store& store, const RunRecord& record, const Prove& prove,
                comm::Communicator& ranks, Executor& executor) {
    Attempts attempts(store, record, prove);
    StepsOfRank mine{};
    mine.fill(-1);
    for (size_t n = 0; n < kRecords; ++n)
        attempts.succeeds([&] {
            if (const auto state = attempts.read(n)) mine[n] = state->step;
        });
    const std::vector<StepsOfRank> all = gather(ranks, executor, mine, "durable steps");
    const auto all_have = [&](bool whole) {
        const auto each = gather(ranks, executor, static_cast<uint8_t>(whole), "durable steps");
        return std::ranges::all_of(each, [](uint8_t rank) { return rank != 0; });
    };
    for (const int64_t step : in_common(all)) {
        const auto n = static_cast<size_t>(std::ranges::find(mine, step) - mine.begin());
        std::optional<RunState> state;
        std::optional<bool> proved;  // by all; none: not even here
        const bool whole = attempts.succeeds([&] {
            state = attempts.read(n);
            FERRY_CHECK(state.has_value(), "a record is gone");
            attempts.prove(*state, [&] { return *(proved = all_have(true)); });
        });
        if (!proved) proved = all_have(false);
        // What was written to the slots of frozen weights may have failed.
        if (*proved && all_have(whole)) return *state;
    }
    if (attempts.has_failed()) throw attempts.error();
    throw Error(Trouble::io,
                {.what = "the run cannot be resumed: there is no durable step that all ranks have "
                         "whole",
                 .where = "rank " + std::to_string(ranks.rank()),
                 .measured = fmt::format("steps {} here", fmt::join(mine, " and ")),
                 .remedy = "see what the other ranks say; or start afresh, without --resume, after "
                           "removing the ferry.* files in every rank's directory"});
}

bool has_ended(const aio::Volume& volume, const RunRecord& record, int64_t map_bytes,
               int64_t steps) {
    const std::span<const std::byte> found = volume.found_record(0);
    if (std::ssize(found) <= map_bytes) return false;
    const RunState last = record.read(found.subspan(static_cast<size_t>(map_bytes)));
    if (last.step != steps) return false;
    log_info(
        fmt::format("the durable steps of this run, which came to its end (step {}), are "
                    "removed: it begins again",
                    steps));
    return true;
}

std::string resumed_text(int64_t step, int64_t noted) {
    std::string text = fmt::format("resumed after step {}", step);
    if (noted <= step) return text;
    if (noted == step + 1)
        return text +
               fmt::format("; step {} was committed but not durable and is done again", noted);
    return text + fmt::format("; steps {} to {} were committed but not durable and are done again",
                              step + 1, noted);
}

}  // namespace ferry::train
