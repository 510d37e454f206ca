#include "rank_agreement.h"

#include <dlfcn.h>
#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <fstream>

#include "base/checksum.h"
#include "train/step/schedules.h"

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
    // By parts: the file has tens of megabytes, and every rank of a host reads it as it starts.
    std::vector<char> part(256 << 10);
    RunningChecksum sum;
    while (file) {
        file.read(part.data(), static_cast<std::streamsize>(part.size()));
        sum.add(std::as_bytes(std::span(part).first(static_cast<size_t>(file.gcount()))));
    }
    return hex(sum.value());
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
                            std::span<const swap::Schedule* const> schedules, bool in_kernels,
                            int of_a_stage) {
    std::vector<std::array<int64_t, 3>> all;
    for (const swap::Schedule* schedule : schedules) {
        const auto its = exchanges_of(*schedule, in_kernels);
        all.insert(all.end(), its.begin(), its.end());
    }
    const uint64_t mine = hash_of(all);
    comm::Fact order{"the plan: the order of the exchanges", hex(mine)};
    if (of_a_stage < ranks.size()) {
        const auto hashes = gather(ranks, executor, mine, "orders of exchanges");
        const int first = ranks.rank() / of_a_stage * of_a_stage;
        if (mine == hashes[static_cast<size_t>(first)]) order.value = "its stage's";
    }
    comm::require_same(ranks, executor, {&order, 1});
}

namespace {

// All ranks' values, of which each has a number of its own.
template <class Value, size_t kPart = 1024>
std::vector<std::vector<Value>> gather_all(comm::Communicator& ranks, Executor& executor,
                                           const std::vector<Value>& mine, const char* of) {
    struct Part {
        uint64_t count = 0;
        std::array<Value, kPart> values{};
    };
    static_assert(sizeof(Part) <= static_cast<size_t>(comm::Communicator::kAgreedBytes));
    std::vector<std::vector<Value>> all(static_cast<size_t>(ranks.size()));
    for (size_t at = 0;; at += kPart) {
        Part part{.count = mine.size()};
        const size_t first = std::min(at, mine.size()), end = std::min(at + kPart, mine.size());
        std::copy(mine.begin() + static_cast<std::ptrdiff_t>(first),
                  mine.begin() + static_cast<std::ptrdiff_t>(end), part.values.begin());
        const std::vector<Part> parts = gather(ranks, executor, part, of);
        bool more = false;
        for (size_t rank = 0; rank < all.size(); ++rank) {
            const size_t count = parts[rank].count;
            const size_t here = count > at ? std::min(kPart, count - at) : 0;
            all[rank].insert(all[rank].end(), parts[rank].values.begin(),
                             parts[rank].values.begin() + static_cast<std::ptrdiff_t>(here));
            more = more || count > at + kPart;
        }
        if (!more) return all;
    }
}

// An error's kind and its parts, each with a NUL behind it.
std::vector<char> bytes_of(const Error& error) {
    std::vector<char> bytes{static_cast<char>(error.trouble())};
    const Problem& problem = error.problem();
    for (const std::string* part :
         {&problem.what, &problem.where, &problem.measured, &problem.limit, &problem.remedy}) {
        bytes.insert(bytes.end(), part->c_str(), part->c_str() + std::strlen(part->c_str()) + 1);
    }
    return bytes;
}

Error error_in(const std::vector<char>& bytes) {
    const char* at = bytes.data() + 1;
    const auto next = [&at] {
        std::string part = at;
        at += part.size() + 1;
        return part;
    };
    Problem problem{.what = next()};
    problem.where = next();
    problem.measured = next();
    problem.limit = next();
    problem.remedy = next();
    return Error(static_cast<Trouble>(bytes[0]), std::move(problem));
}

}  // namespace

std::optional<Error> error_of_any(comm::Communicator& ranks, Executor& executor,
                                  const std::optional<Error>& mine) {
    const auto all =
        gather_all(ranks, executor, mine ? bytes_of(*mine) : std::vector<char>{}, "errors");
    for (const std::vector<char>& bytes : all)
        if (!bytes.empty()) return error_in(bytes);
    return std::nullopt;
}

cost::KernelTimes kernels_of_any(comm::Communicator& ranks, Executor& executor,
                                 const cost::KernelTimes& mine) {
    struct Kernel {
        cost::KernelTimes::Kind kind{};
        double seconds = 0;
    };
    constexpr size_t kPart = 64;  // a model has few kinds, and there may be many ranks
    std::vector<Kernel> kernels;
    kernels.reserve(mine.seconds.size());
    for (const auto& [kind, seconds] : mine.seconds) kernels.push_back({kind, seconds});
    cost::KernelTimes found;
    for (const auto& rank : gather_all<Kernel, kPart>(ranks, executor, kernels, "kernels' times"))
        for (const Kernel& kernel : rank) found.seconds.try_emplace(kernel.kind, kernel.seconds);
    for (const auto& saved : gather(ranks, executor, mine.saved_s, "kernels' times"))
        for (const model::Saved what : model::kAllSaved)
            if (found.saved_s[model::at(what)] == 0)
                found.saved_s[model::at(what)] = saved[model::at(what)];
    return found;
}

void require_stages_end(comm::Communicator& ranks, Executor& executor,
                        std::span<const swap::Schedule* const> schedules, int stage, int stages) {
    const auto of_a_stage = static_cast<size_t>(ranks.size() / stages);
    for (const swap::Schedule* schedule : schedules) {
        const auto all = gather_all(ranks, executor, passes_of(*schedule), "passes of stages");
        std::vector<std::vector<Passed>> first;
        first.reserve(static_cast<size_t>(stages));
        for (size_t s = 0; s < static_cast<size_t>(stages); ++s)
            first.push_back(all[s * of_a_stage]);
        const auto& mine = all[static_cast<size_t>(ranks.rank())];
        FERRY_CHECK(mine == first[static_cast<size_t>(stage)], "ranks of a stage pass the same");
        const std::string why = why_stages_stop(first);
        if (why.empty()) continue;
        throw Error(Trouble::internal, {.what = "the stages wait for each other",
                                        .where = "the schedule \"" + schedule->name + "\"",
                                        .measured = why});
    }
}

}  // namespace ferry::train
