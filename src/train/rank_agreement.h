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
// The same for the exchanges of all schedules. `in_kernels`: those from within the kernels of
// blocks as well. Ranks of one stage must have the same; `of_a_stage` neighbours are of one stage.
void require_same_exchanges(comm::Communicator& ranks, Executor& executor,
                            std::span<const swap::Schedule* const> schedules, bool in_kernels,
                            int of_a_stage);

// The time of each kind of kernel, from the first rank that has one. The stages of a pipeline have
// different kernels.
cost::KernelTimes kernels_of_any(comm::Communicator& ranks, Executor& executor,
                                 const cost::KernelTimes& mine);

// Calls `find()`, which must throw the same usage error on all ranks or on none. With such an error
// no rank ends while others are in a collective. So each reports the same, and none is taken for
// lost. Other errors are one rank's alone, and pass at once. `ranks`: null where there is one.
template <class Find>
auto find_alike(comm::Communicator* ranks, Executor& executor, const Find& find) {
    try {
        return find();
    } catch (const Error& error) {
        if (ranks && error.trouble() == Trouble::usage) comm::await_all(*ranks, executor);
        throw;
    }
}

// All ranks get the error of the first rank that has one. None: no rank has.
std::optional<Error> error_of_any(comm::Communicator& ranks, Executor& executor,
                                  const std::optional<Error>& mine);

// Throws internal where the stages of a pipeline would wait for each other for ever in any of these
// schedules. All ranks have them in this order; `stage` is this rank's of so many.
void require_stages_end(comm::Communicator& ranks, Executor& executor,
                        std::span<const swap::Schedule* const> schedules, int stage, int stages);

}  // namespace ferry::train
