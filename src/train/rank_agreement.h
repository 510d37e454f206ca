// What the ranks of a run tell each other, and what must be the same on all of them.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "comm/comm.h"
#include "cost/kernel_times.h"
#include "data/tokens.h"
#include "ferry/config.h"
#include "ferry/error.h"
#include "swap/schedule.h"

namespace ferry::train {

// Gathers each rank's fact to all ranks. Blocking.
template <class Fact>
std::vector<Fact> gather(comm::Communicator& ranks, Executor& executor, const Fact& mine,
                         const char* of) {
    std::vector<Fact> all(static_cast<size_t>(ranks.size()));
    comm::agree(ranks, executor, std::as_bytes(std::span(&mine, 1)),
                std::as_writable_bytes(std::span(all)), {.of = of});
    return all;
}

// Compares the program and the keys of the configuration, before anything else is done with them.
// Throws usage on every rank, naming the rank and what differs.
void require_same_config(comm::Communicator& ranks, Executor& executor, const Config& config);
// Compares the rest of what fixes the numbers. `kernels` are OpenBLAS's, where it computes: it
// chooses different ones on different processors.
void require_same_run(comm::Communicator& ranks, Executor& executor, const std::string& kernels,
                      const std::string& numerics, const TokenFileInfo& tokens,
                      const std::string& first_weights);
// The same for a batch that a program feeds, of a step or with 0 of an evaluation.
void require_same_batch(comm::Communicator& ranks, Executor& executor, int64_t step, uint64_t sum);
// The same for what the ranks will say to each other, of all schedules; `in_kernels`: from within
// those of blocks as well. Ranks of one stage alike: runs of so many neighbours.
void require_same_exchanges(comm::Communicator& ranks, Executor& executor,
                            std::span<const swap::Schedule* const> schedules, bool in_kernels,
                            int of_a_stage);

// Of each kind of kernel the time of the first rank that has one: the stages of a pipeline have
// kernels of their own.
cost::KernelTimes kernels_of_any(comm::Communicator& ranks, Executor& executor,
                                 const cost::KernelTimes& mine);

// `find()`, which throws the same usage error on all ranks or on none. Those of other kinds are one
// rank's alone, and pass at once. No rank ends while others are in a collective: each says the
// same, and none is taken for lost. `ranks`: null where there is one.
template <class Find>
auto find_alike(comm::Communicator* ranks, Executor& executor, const Find& find) {
    try {
        return find();
    } catch (const Error& error) {
        if (ranks && error.trouble() == Trouble::usage) comm::await_all(*ranks, executor);
        throw;
    }
}

// The error of the first rank that has one, on all of them; none where none has.
std::optional<Error> error_of_any(comm::Communicator& ranks, Executor& executor,
                                  const std::optional<Error>& mine);

// Throws internal where the stages of a pipeline would wait for each other for ever in any of these
// schedules. All ranks have them in this order; `stage` is this rank's of so many.
void require_stages_end(comm::Communicator& ranks, Executor& executor,
                        std::span<const swap::Schedule* const> schedules, int stage, int stages);

}  // namespace ferry::train
