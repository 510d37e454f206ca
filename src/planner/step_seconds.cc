#include "step_seconds.h"

#include <algorithm>
#include <ranges>

namespace ferry::planner {
namespace {

using swap::Tier;

// Bytes of memory, read and written.
double moved_by_update(const Workload& work, int64_t elements) {
    return static_cast<double>(elements *
                               update_bytes(work.state, work.numerics.compute, work.numerics.wire));
}

// Bytes that a step moves over each link.
class Traffic {
public:
    Traffic(const Workload& work, const Placement& placement)
        : work_(work),
          placement_(placement),
          groups_(static_cast<double>(placement.groups)),
          tied_(work.layers.back().find(model::Role::head_table) == nullptr) {}

    void count_weights(const std::vector<Chunk>& chunks) {
        bool trains = false;  // from here down
        for (size_t l = 0, c = 0; l < work_.layers.size(); ++l) {
            const model::Layer& layer = work_.layers[l];
            trains = trains || layer.trainable_elements > 0;
            const bool block = layer.kind == model::LayerKind::block;
            const bool twice = block ? trains : l == 0 && tied_;
            const double visits = groups_ * (twice ? 2 : 1);
            for (; c < chunks.size() && chunks[c].layer == static_cast<int64_t>(l); ++c) {
                const Tier home = placement_.chunks[c].weight;
                if (home == Tier::device) continue;
                const double bytes = visits * weight_bytes(chunks[c]);
                up_ += bytes;
                stored_ += home == Tier::nvme ? bytes : 0;
            }
        }
    }

    void count_update(const Chunk& chunk, const Placement::ChunkHomes& homes,
                      const MachineFigures& machine) {
        const auto count = static_cast<double>(chunk.count);
        if (homes.state == Tier::device) {
            device_s_ += moved_by_update(work_, chunk.count) / machine.device_bytes_per_s;
            return;
        }
        updates_s_ += update_seconds(work_, chunk.count, machine);
        const double gradient = count * static_cast<double>(size_of(work_.numerics.wire));
        const double state = count * static_cast<double>(work_.state.element_bytes());
        const double weight = weight_bytes(chunk), read = work_.state.split ? weight : 0;
        down_ += gradient;
        if (homes.gradient == Tier::nvme) stored_ += 2 * gradient;
        if (homes.state == Tier::nvme) stored_ += 2 * state;
        if (homes.weight == Tier::nvme) stored_ += weight + read;
        if (homes.weight != Tier::device) return;
        up_ += weight;
        down_ += read;
    }

    // What leaves for a while and comes back.
    void count_spilled(Tier home, double bytes) {
        up_ += bytes;
        down_ += bytes;
        stored_ += home == Tier::nvme ? 2 * bytes : 0;
    }
    void count_activations(const std::vector<AccumulatorSpill>& spills) {
        for (size_t i = 0; i < spills.size(); ++i) {
            const double copies = tied_ && spills[i].layer == 0 ? 2 : 1;
            count_spilled(placement_.spills[i],
                          (groups_ - 1) * copies * double(spills[i].count) * 4);
        }
        for (const Tier home : placement_.inputs) {
            if (home != Tier::device)
                count_spilled(home, groups_ * static_cast<double>(work_.needs.activation));
        }
    }

    // Where the processors compute, updates and copies take their cores and their memory.
    StepSeconds seconds(const KernelSeconds& kernels, const StepSeconds& waits,
                        const MachineFigures& machine) const {
        const double compute_s = kernels.forward + kernels.backward + device_s_;
        const double copies = (machine.device_beside ? 1 : 2) * (up_ + down_);
        const double host_s = updates_s_ + (copies + stored_) / machine.dram_bytes_per_s;
        const double links_s = std::max(std::max(up_, down_) / machine.copy_bytes_per_s,
                                        stored_ / machine.nvme_bytes_per_s);
        if (!machine.device_beside) {
            const double all_s = std::max(links_s, compute_s + host_s);
            return {all_s, all_s};
        }
        const auto beside = [&](double wait_s) {
            return std::max({links_s, host_s, compute_s + wait_s});
        };
        return {beside(waits.committed), beside(waits.rest)};
    }

private:
    double weight_bytes(const Chunk& chunk) const {
        return static_cast<double>(chunk.count * size_of(work_.numerics.compute));
    }

    const Workload& work_;
    const Placement& placement_;
    const double groups_;
    const bool tied_;
    double up_ = 0, down_ = 0, stored_ = 0;  // bytes
    double updates_s_ = 0, device_s_ = 0;    // of the host's updates, and of the device's
};

// What the next step's first forward pass waits for the host's updates, layer by layer. Those that
// speculative begin as backward gives their gradients, the first layers' last; the others, and all
// of a step without speculative updates, begin when it has ended, in forward's order.
StepSeconds waits_for_updates(const Workload& work, const std::vector<Chunk>& chunks,
                              const Placement& placement, const KernelSeconds& kernels,
                              const MachineFigures& machine) {
    struct Seconds {
        double speculative = 0, after_outcome = 0,
               in_order = 0;               // of the host's updates; all of them, in order
        double forward = 0, backward = 0;  // of the kernels
    };
    std::vector<Seconds> layers(work.layers.size());
    for (size_t c = 0; c < chunks.size(); ++c) {
        if (!chunks[c].trainable) continue;
        const Placement::ChunkHomes& homes = placement.chunks[c];
        if (homes.state == Tier::device) continue;
        Seconds& layer = layers[static_cast<size_t>(chunks[c].layer)];
        // A drive reads and writes all state that lies there, however soon it is updated.
        const double stored_s =
            homes.state == Tier::nvme
                ? 2 * static_cast<double>(chunks[c].count * work.state.element_bytes()) /
                      machine.nvme_bytes_per_s
                : 0;
        const double in_place_s =
            std::max(update_seconds(work, chunks[c].count, machine), stored_s);
        layer.in_order += in_place_s;
        if (homes.speculative)
            layer.speculative +=
                in_place_s * (homes.state == Tier::host ? machine.out_of_place : 1);
        else
            layer.after_outcome += in_place_s;
    }
    const auto visits = static_cast<double>(placement.groups * (std::ssize(layers) - 2));
    for (size_t l = 0; l < layers.size(); ++l) {
        if (work.layers[l].kind != model::LayerKind::block) continue;
        layers[l].forward = kernels.forward / visits;
        layers[l].backward = kernels.backward / visits;
    }

    double to_come_s = kernels.backward / static_cast<double>(placement.groups);
    double speculative_s = -to_come_s;  // the end of backward is 0
    for (const Seconds& layer : std::views::reverse(layers)) {
        to_come_s -= layer.backward;
        if (layer.speculative > 0)
            speculative_s = std::max(speculative_s, -to_come_s) + layer.speculative;
    }
    const auto wait_after = [&](double updated_s, double Seconds::*due) {
        double now_s = 0, kernels_s = 0;
        for (const Seconds& layer : layers) {
            updated_s += layer.*due;
            if (layer.in_order > 0) now_s = std::max(now_s, updated_s);
            now_s += layer.forward;
            kernels_s += layer.forward;
        }
        return now_s - kernels_s;
    };
    return {wait_after(std::max(0.0, speculative_s), &Seconds::after_outcome),
            wait_after(0, &Seconds::in_order)};
}

}  // namespace

double seconds_of(const KeptResult& result, const Workload& work, const MachineFigures& machine) {
    const std::vector<double>& flops = work.needs.saved_flops[at(result.what)];
    const double most = std::ranges::max(flops), longest_s = machine.saved_s[at(result.what)];
    const double rate = longest_s > 0 && most > 0 ? most / longest_s : machine.flops_per_s;
    return flops.at(static_cast<size_t>(work.layers[result.layer].index)) / rate;
}

KernelSeconds kernel_seconds(const PlanRequest& request, const Workload& work,
                             const model::OfSaved<std::vector<bool>>& kept,
                             const MachineFigures& machine) {
    double elements = 0, attention_s = 0, saved_s = 0;  // of a micro-batch
    for (size_t l = 0; l < work.layers.size(); ++l) {
        elements += static_cast<double>(work.layers[l].elements);
        for (const model::Saved what : model::kAllKept) {
            if (work.needs.saved_flops[at(what)].empty() ||
                work.layers[l].kind != model::LayerKind::block)
                continue;
            const double seconds = seconds_of({l, what}, work, machine);
            if (what == model::Saved::attention) attention_s += seconds;
            if (kept[at(what)][l]) saved_s += seconds;
        }
    }
    const auto micro_batches = static_cast<double>(request.micro_batches);
    const auto tokens = static_cast<double>(work.numerics.tokens());
    const double once = micro_batches * (2 * elements * tokens / machine.flops_per_s + attention_s);
    const double backward = machine.backward_s > 0 ? machine.backward_s : 3 * once;
    return {.forward = machine.forward_s > 0 ? machine.forward_s : once,
            .backward = std::max(0.0, backward - micro_batches * saved_s)};
}

double update_seconds(const Workload& work, int64_t elements, const MachineFigures& machine) {
    return machine.update_overhead_s + moved_by_update(work, elements) / machine.dram_bytes_per_s;
}
double update_seconds(const Workload& work, const MachineFigures& machine) {
    return update_seconds(work, work.chunk_elements, machine);
}

std::optional<double> expected_clipped(const PlanRequest& request) {
    if (!request.clips) return 0;
    if (request.swap.expect_clipped) return request.swap.expect_clipped;
    return request.swap.speculate == Speculate::all ? std::optional(0.0) : std::nullopt;
}

double StepSeconds::expected(const PlanRequest& request) const {
    if (request.swap.speculate == Speculate::off) return rest;
    const double clipped = expected_clipped(request).value_or(0.5);
    return (1 - clipped) * committed + clipped * rest;
}

StepSeconds step_seconds(const PlanRequest& request, const Workload& work,
                         const std::vector<Chunk>& chunks,
                         const std::vector<AccumulatorSpill>& spills, const Placement& placement,
                         const MachineFigures& machine) {
    Traffic traffic(work, placement);
    traffic.count_weights(chunks);
    for (size_t c = 0; c < chunks.size(); ++c) {
        if (chunks[c].trainable) traffic.count_update(chunks[c], placement.chunks[c], machine);
    }
    traffic.count_activations(spills);
    const KernelSeconds kernels = kernel_seconds(request, work, placement.kept, machine);
    return traffic.seconds(kernels, waits_for_updates(work, chunks, placement, kernels, machine),
                           machine);
}

}  // namespace ferry::planner
