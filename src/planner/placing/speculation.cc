#include "speculation.h"

#include <algorithm>
#include <map>

#include "step_seconds.h"

namespace ferry::planner {

using swap::Tier;

namespace {

// Bytes of all slots that lay_out() makes, without those of speculative updates and durable
// versions.
int64_t slot_bytes(const Workload& work, const std::vector<Chunk>& chunks,
                   const std::vector<AccumulatorSpill>& spills, const Placement& placement) {
    const auto slot = [&](Tier home, Class staging) {
        return home == Tier::nvme ? buffer_bytes(staging, work) : 0;
    };
    std::map<std::string, int64_t> fresh;  // a slot of each family that is written afresh
    int64_t bytes = 0;
    const auto count = [&](Tier home, Class staging, const Chunk& chunk) {
        if (home != Tier::nvme) return;
        const SlotFamily family = slots_of(chunk, staging, work);
        bytes += family.bytes;
        if (staging == Class::state_staging ||
            (staging == Class::weight_staging && work.state.split))
            fresh.emplace(family.name, placement.counts[at(staging)] * family.bytes);
    };
    for (size_t c = 0; c < chunks.size(); ++c) {
        const Placement::ChunkHomes& homes = placement.chunks[c];
        count(homes.weight, Class::weight_staging, chunks[c]);
        if (!chunks[c].trainable) continue;
        count(homes.state, Class::state_staging, chunks[c]);
        count(homes.gradient, Class::gradient_staging, chunks[c]);
        if (!work.partition.codecs.momentum.on() || chunks[c].owner != work.partition.rank)
            continue;
        bytes += homes.kept == Tier::nvme ? slots_of_kept(work).bytes : 0;
        count(homes.feedback, Class::feedback_staging, chunks[c]);
    }
    const bool tied = work.partition.ties(work.layers);
    for (size_t i = 0; placement.groups > 1 && i < spills.size(); ++i) {
        const int64_t copies = tied && spills[i].layer == 0 ? 2 : 1;
        bytes += copies * slot(placement.spills[i], Class::spill_staging);
    }
    for (const Tier input : placement.inputs) bytes += slot(input, Class::input_staging);
    for (const auto& homes : placement.second_shards)
        for (const Tier home : homes) bytes += slot(home, Class::second_staging);
    // A committed update writes a fresh slot before it frees the old one.
    for (const auto& [name, of_family] : fresh) bytes += of_family;
    return bytes;
}

// A slot lies on one path: what is left at the end of each of several may be too small for one.
int64_t unusable_bytes(const Workload& work, int64_t paths) {
    int64_t largest = 0;
    for (const Class staging : {Class::state_staging, Class::weight_staging,
                                Class::gradient_staging, Class::input_staging, Class::spill_staging,
                                Class::feedback_staging, Class::second_staging}) {
        if (staging == Class::feedback_staging && !work.partition.codecs.momentum.on()) continue;
        if (staging == Class::second_staging && !work.partition.keeps_second_shards()) continue;
        largest = std::max(largest, buffer_bytes(staging, work));
    }
    return (paths - 1) * largest;
}

int64_t left_on_paths(const PlanRequest& request, const Workload& work,
                      const std::vector<Chunk>& chunks, const std::vector<AccumulatorSpill>& spills,
                      const Placement& placement) {
    const int64_t paths = std::ssize(request.budgets.nvme);
    const int64_t limit = nvme_budget(request).limit();
    const int64_t taken = slot_bytes(work, chunks, spills, placement) +
                          unusable_bytes(work, paths) + paths * aio::kHeaderBytes;
    return std::max<int64_t>(limit - taken, 0);
}

// Bytes of the second slots that a chunk's update writes to.
int64_t second_slot_bytes(const Workload& work, const Chunk& chunk,
                          const Placement::ChunkHomes& homes) {
    const auto slot = [&](Class staging) { return slots_of(chunk, staging, work).bytes; };
    const int64_t state = homes.state == Tier::nvme ? slot(Class::state_staging) : 0;
    const bool two_weights = work.state.split && homes.weight == Tier::nvme;
    return state + (two_weights ? slot(Class::weight_staging) : 0);
}

int64_t durable_bytes(const Workload& work, const std::vector<Chunk>& chunks,
                      const Placement& placement) {
    int64_t bytes = 0;
    for (size_t c = 0; c < chunks.size(); ++c)
        bytes += chunks[c].trainable ? second_slot_bytes(work, chunks[c], placement.chunks[c]) : 0;
    return bytes;
}

}  // namespace

int64_t missing_on_paths(const PlanRequest& request, const Workload& work,
                         const std::vector<Chunk>& chunks,
                         const std::vector<AccumulatorSpill>& spills, const Placement& placement) {
    if (request.budgets.nvme.empty()) return 0;
    int64_t taken = slot_bytes(work, chunks, spills, placement) +
                    std::ssize(request.budgets.nvme) * aio::kHeaderBytes;
    if (request.durable) taken += durable_bytes(work, chunks, placement);
    return std::max<int64_t>(taken - nvme_budget(request).limit(), 0);
}

double speculative_fraction(double forward_s, double backward_s, double optimizer_s,
                            double out_of_place) {
    if (optimizer_s <= forward_s / 4) return 0;
    const double hidden_s = backward_s / out_of_place;
    return std::min(hidden_s / optimizer_s, hidden_s / (hidden_s + forward_s));
}

double expected_speculative_fraction(const PlanRequest& request, const Workload& work,
                                     const std::vector<Chunk>& chunks, const Placement& placement,
                                     const cost::Measurements& machine) {
    double trainable = 0, stored_bytes = 0, matrices_s = 0;
    for (size_t c = 0; c < chunks.size(); ++c) {
        const Tier home = placement.chunks[c].state;
        if (!chunks[c].trainable || home == Tier::device) continue;
        trainable += double(chunks[c].count);
        if (is_matrix(chunks[c]))  // its products: all else is little beside them
            matrices_s += update_seconds(work, chunks[c], machine);
        if (home == Tier::nvme) stored_bytes += double(state_bytes(chunks[c]));
    }
    if (trainable == 0) return 0;
    const cost::KernelSeconds kernels = kernel_seconds(request, work, placement.saved, machine);
    const double stored_s = 2 * stored_bytes / machine.nvme_bytes_per_s;  // read and written
    const double updates_s =
        trainable / double(work.chunk_elements) * update_seconds(work, machine) + matrices_s;
    // A drive is written afresh in any case; elsewhere than beside a GPU nothing else speculates.
    const bool in_memory = !machine.computes_on_host && updates_s >= stored_s;
    const double out_of_place = in_memory ? machine.out_of_place : 1;
    // Speculative updates begin with the last group's gradients; the first group's forward pass
    // waits for what is late.
    const auto groups = static_cast<double>(placement.groups);
    return speculative_fraction(kernels.forward / groups, kernels.backward / groups,
                                std::max(stored_s, updates_s), out_of_place);
}

SpeculationRoom::SpeculationRoom(const PlanRequest& request, const Workload& work,
                                 const std::vector<Chunk>& chunks,
                                 const std::vector<AccumulatorSpill>& spills,
                                 const Placement& placement)
    : work_(work),
      durable_(request.durable),
      left_(left_on_paths(request, work, chunks, spills, placement)) {}

int64_t SpeculationRoom::bytes_for(const Chunk& chunk, const Placement::ChunkHomes& homes) const {
    return durable_ ? 0 : second_slot_bytes(work_, chunk, homes);
}

}  // namespace ferry::planner
