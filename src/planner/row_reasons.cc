#include <span>
#include <string_view>

#include "planner/planner.h"

namespace ferry::planner {
namespace {

struct Reason {
    std::string_view row, why;
};

// Of each tier, the first that a row begins with.
constexpr Reason kOnDevice[] = {
    {"the process on the device", "the driver takes it"},
    {"page tables of the host tier", "the device reads host memory through them"},
    {"weights in flight", "a layer is whole while it computes, the next is copied"},
    {"gradient accumulators", "micro-batches are added up in fp32"},
    {"tokens, gradients, report on their way", "copies overlap the kernels"},
    {"Newton-Schulz", "a matrix is updated whole"},
    {"block inputs", "backward computes a block again from its input"},
    {"attention's lists of blocks", "which blocks attention visits"},
    {"attention saved for backward", "backward computes so much less again"},
    {"attention's products saved for backward", "backward computes so much less again"},
    {"MLPs' products saved for backward", "backward computes so much less again"},
    {"kept for weights' gradients", "they are computed where a stage would wait"},
    {"scratch of the kernels", "the largest operation's"},
    {"resident weights", "no copies of these"},
    {"optimizer state", "master and moments that the device updates"},
    {"gradients", "they wait for the norm of all of them"},
};
constexpr Reason kInHost[] = {
    {"norm leaves and report", "what the outcome follows from"},
    {"workspace of Newton-Schulz", "a matrix is updated whole"},
    {"token batches", "the next ones, ready to be copied"},
    {"staging buffers", "reads, updates and writes overlap"},
    {"optimizer state", "master and moments; where updates are speculative, twice"},
    {"weights", "of layers that the device has no room for, in the compute type"},
    {"gradient accumulators", "sums between groups of micro-batches"},
    {"gradients", "they wait for the norm of all of them"},
    {"block inputs", "backward computes a block again from its input"},
    {"momentum and its errors", "what ranks keep between exchanges"},
    {"second shards of weights", "backward gathers them within its host"},
};
constexpr Reason kOnNvme[] = {
    {"state", "what memory has no room for"},
    {"weights", "what memory has no room for"},
    {"gradients", "what memory has no room for, until the norm of all of them"},
    {"accumulators", "sums between groups of micro-batches"},
    {"block inputs", "backward computes a block again from its input"},
    {"momentum and its errors", "what ranks keep between exchanges"},
    {"second shards of weights", "backward gathers them within its host"},
    {"maps of the durable state", "which slot has which version"},
    {"headers of the files", "whose files they are"},
};

std::span<const Reason> reasons_on(swap::Tier tier) {
    switch (tier) {
        case swap::Tier::device:
            return kOnDevice;
        case swap::Tier::host:
            return kInHost;
        case swap::Tier::nvme:
            break;
    }
    return kOnNvme;
}

}  // namespace

std::string_view reason_of(const TierRow& row, const Plan& plan) {
    const std::string_view what = row.what;
    if (row.tier == swap::Tier::nvme) {
        if (what.ends_with(", fresh slots")) return "an update writes beside what it read";
        const bool of_version =
            what.starts_with("state") || (plan.state.split && what.starts_with("weights"));
        if (plan.durable && of_version) return "a run that was killed goes on from it";
    }
    for (const auto& [begins, why] : reasons_on(row.tier))
        if (what.starts_with(begins)) return why;
    return {};
}

}  // namespace ferry::planner
