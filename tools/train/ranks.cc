#include "ranks.h"

namespace ferry::tools {

std::unique_ptr<comm::Communicator> join_ranks(const Config& config, Executor& executor,
                                               const std::string& command,
                                               std::initializer_list<Option> options) {
    if (!comm::launched_as_rank()) return nullptr;
    auto ranks = comm::make_mpi(executor, {.timeout_seconds = config.zero.timeout_seconds});
    // The configuration is compared when the run has read its tokens; those on GPUs share them out
    // before.
    std::vector<comm::Fact> facts{{"the command", command},
                                  {"device", std::string(name_of(config.device))}};
    for (const Option& option : options)
        facts.push_back({option.name, option.given ? "given" : "not given"});
    comm::require_same(*ranks, executor, facts);
    return ranks;
}

}  // namespace ferry::tools
