#include <span>
#include <string_view>

#include "planner/planner.h"

namespace ferry::planner {
namespace {

struct Reason {
    RowKind of{};
    std::string_view why{};
};

constexpr Reason kOnDevice[] = {
    {RowKind::process, "the driver takes it"},
    {RowKind::page_tables, "the device reads host memory through them"},
    {RowKind::weights_in_flight, "a layer is whole while it computes, the next is copied"},
    {RowKind::accumulators, "micro-batches are added up in fp32"},
    {RowKind::transfers, "copies overlap the kernels"},
    {RowKind::newton_schulz, "a matrix is updated whole"},
    {RowKind::block_inputs, "backward computes a block again from its input"},
    {RowKind::block_lists, "which blocks attention visits"},
    {RowKind::saved_attention, "backward computes so much less again"},
    {RowKind::saved_projections, "backward computes so much less again"},
    {RowKind::saved_mlp, "backward computes so much less again"},
    {RowKind::deferred, "they are computed where a stage would wait"},
    {RowKind::scratch, "the largest operation's"},
    {RowKind::resident_weights, "no copies of these"},
    {RowKind::state, "master and moments that the device updates"},
    {RowKind::gradients, "they wait for the norm of all of them"},
};
constexpr Reason kInHost[] = {
    {RowKind::report, "what the outcome follows from"},
    {RowKind::newton_schulz, "a matrix is updated whole"},
    {RowKind::tokens, "the next ones, ready to be copied"},
    {RowKind::staging, "reads, updates and writes overlap"},
    {RowKind::state, "master and moments; where updates are speculative, twice"},
    {RowKind::weights, "of layers that the device has no room for, in the compute type"},
    {RowKind::accumulators, "sums between groups of micro-batches"},
    {RowKind::gradients, "they wait for the norm of all of them"},
    {RowKind::block_inputs, "backward computes a block again from its input"},
    {RowKind::momentum, "what ranks keep between exchanges"},
    {RowKind::second_shards, "backward gathers them within its host"},
};
constexpr Reason kOnNvme[] = {
    {RowKind::state, "what memory has no room for"},
    {RowKind::weights, "what memory has no room for"},
    {RowKind::fresh_slots, "an update writes beside what it read"},
    {RowKind::gradients, "what memory has no room for, until the norm of all of them"},
    {RowKind::accumulators, "sums between groups of micro-batches"},
    {RowKind::block_inputs, "backward computes a block again from its input"},
    {RowKind::momentum, "what ranks keep between exchanges"},
    {RowKind::second_shards, "backward gathers them within its host"},
    {RowKind::maps, "which slot has which version"},
    {RowKind::headers, "whose files they are"},
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
    const bool of_version =
        row.kind == RowKind::state || (plan.state.split && row.kind == RowKind::weights);
    if (row.tier == swap::Tier::nvme && plan.durable && of_version)
        return "a run that was killed goes on from it";
    for (const auto& [of, why] : reasons_on(row.tier))
        if (of == row.kind) return why;
    return {};
}

}  // namespace ferry::planner
