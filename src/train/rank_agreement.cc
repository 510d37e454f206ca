#include "rank_agreement.h"

#include <dlfcn.h>
#include <spdlog/fmt/fmt.h>

#include <array>
#include <fstream>
#include <iterator>

#include "base/checksum.h"
#include "schedules.h"

namespace ferry::train {
namespace {

std::string hex(uint64_t hash) { return fmt::format("{:016x}", hash); }
template <class Values>
uint64_t hash_of(const Values& values) {
    return checksum(std::as_bytes(std::span(values)));
}

// The hash of the file that this code was loaded from: another build may round otherwise, or know
// other keys.
std::string program_hash() {
    static const char kHere = 0;
    Dl_info loaded{};
    if (::dladdr(&kHere, &loaded) == 0) return "";
    // A program has the name that it was called by; where it lies the kernel knows.
    const bool is_program = std::string_view(loaded.dli_fname) == program_invocation_name;
    std::ifstream file(is_program ? "/proc/self/exe" : loaded.dli_fname, std::ios::binary);
    const std::string bytes(std::istreambuf_iterator<char>(file), {});
    return hex(hash_of(bytes));
}

}  // namespace

void require_same_config(comm::Communicator& ranks, Executor& executor, const Config& config) {
    static const std::string kProgram = program_hash();
    std::vector<comm::Fact> facts{{"the program", kProgram}};
    for (KeyValue& known : describe_values(config))
        facts.push_back({std::move(known.key), std::move(known.value)});
    comm::require_same(ranks, executor, facts);
}

void require_same_kernels(comm::Communicator& ranks, Executor& executor,
                          const std::string& kernels) {
    try {
        const comm::Fact fact{"OpenBLAS's kernels", kernels};
        comm::require_same(ranks, executor, {&fact, 1});
    } catch (const Error& error) {
        if (error.trouble() != Trouble::usage) throw;  // a rank was lost meanwhile
        Problem problem = error.problem();
        problem.remedy =
            "name the older processor's for every rank: mpirun -x OPENBLAS_CORETYPE=NAME, or set "
            "it for ferry launch";
        throw Error(Trouble::usage, std::move(problem));
    }
}

void require_same_run(comm::Communicator& ranks, Executor& executor, const std::string& kernels,
                      const std::string& numerics, const TokenFileInfo& tokens,
                      const std::string& first_weights) {
    require_same_kernels(ranks, executor, kernels);
    const std::array<comm::Fact, 3> facts{{{"the numerics record", numerics},
                                           {"the contents of data.tokens", hex(tokens.checksum)},
                                           {"the weights to start from", first_weights}}};
    comm::require_same(ranks, executor, facts);
}

void require_same_batch(comm::Communicator& ranks, Executor& executor, int64_t step, uint64_t sum) {
    const std::string name = step > 0 ? "the fed batch of step " + std::to_string(step)
                                      : std::string("the fed batch of the evaluation");
    const comm::Fact fact{name, hex(sum)};
    comm::require_same(ranks, executor, {&fact, 1});
}

void require_same_exchanges(comm::Communicator& ranks, Executor& executor,
                            std::span<const swap::Schedule* const> schedules, bool in_kernels) {
    std::vector<std::array<int64_t, 3>> all;
    for (const swap::Schedule* schedule : schedules) {
        const auto its = exchanges_of(*schedule, in_kernels);
        all.insert(all.end(), its.begin(), its.end());
    }
    const comm::Fact order{"the plan: the order of the exchanges", hex(hash_of(all))};
    comm::require_same(ranks, executor, {&order, 1});
}

}  // namespace ferry::train
