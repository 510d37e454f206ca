#include "step_seconds.h"

#include <algorithm>

namespace ferry::planner {
namespace {

using swap::Tier;

cost::ElementBytes element_of(const Workload& work, const StateFormat& format) {
    return cost::element_bytes(format, work.numerics.compute, work.numerics.wire);
}

// Counts what a step of a placement moves over each link.
class Traffic {
public:
    Traffic(const Workload& work, const Placement& placement)
        : work_(work),
          placement_(placement),
          groups_(static_cast<double>(placement.groups)),
          tied_(work.partition.ties(work.layers)) {}

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
                all_.up_bytes += bytes;
                all_.stored_bytes += home == Tier::nvme ? bytes : 0;
            }
        }
    }

    void count_update(const Chunk& chunk, const Placement::ChunkHomes& homes,
                      const cost::Measurements& machine) {
        const cost::ElementBytes element = element_of(work_, chunk.format);
        if (homes.state == Tier::device) {
            all_.device_updates_s += cost::update_bytes(static_cast<double>(chunk.count), element) /
                                     machine.device_bytes_per_s;
            return;
        }
        all_.host_updates_s += update_seconds(work_, chunk, machine);
        const auto bytes = [&](auto each) {
            return static_cast<double>(chunk.count) * static_cast<double>(each);
        };
        const cost::MovedBytes moved =
            cost::moved_by({.state = static_cast<double>(state_bytes(chunk)),
                            .gradient = bytes(element.wire),
                            .weight = bytes(element.weight),
                            .reads_weight = element.split,
                            .state_stored = homes.state == Tier::nvme,
                            .gradient_stored = homes.gradient == Tier::nvme,
                            .weight_stored = homes.weight == Tier::nvme,
                            .weight_on_device = homes.weight == Tier::device});
        all_.up_bytes += moved.up;
        all_.down_bytes += moved.down;
        all_.stored_bytes += moved.stored;
    }

    // Counts bytes that leave for a while and come back.
    void count_spilled(Tier home, double bytes) {
        all_.up_bytes += bytes;
        all_.down_bytes += bytes;
        all_.stored_bytes += home == Tier::nvme ? 2 * bytes : 0;
    }
    void count_activations(const std::vector<AccumulatorSpill>& spills) {
        for (size_t i = 0; i < spills.size(); ++i) {
            const double copies = tied_ && spills[i].layer == 0 ? 2 : 1;
            count_spilled(
                placement_.spills[i],
                (groups_ - 1) * copies * cost::accumulator_bytes(double(spills[i].count)));
        }
        for (const Tier home : placement_.inputs) {
            if (home != Tier::device)
                count_spilled(home, groups_ * static_cast<double>(work_.needs.activation));
        }
    }

    const cost::PlacedTraffic& all() const { return all_; }

private:
    double weight_bytes(const Chunk& chunk) const {
        return static_cast<double>(chunk.count * size_of(work_.numerics.compute));
    }

    const Workload& work_;
    const Placement& placement_;
    const double groups_;
    const bool tied_;
    cost::PlacedTraffic all_{};
};

std::vector<cost::LayerUpdates> updates_of(const Workload& work, const std::vector<Chunk>& chunks,
                                           const Placement& placement,
                                           const cost::Measurements& machine) {
    std::vector<cost::LayerUpdates> layers(work.layers.size());
    for (size_t l = 0; l < layers.size(); ++l)
        layers[l].block = work.layers[l].kind == model::LayerKind::block;
    for (size_t c = 0; c < chunks.size(); ++c) {
        if (!chunks[c].trainable) continue;
        const Placement::ChunkHomes& homes = placement.chunks[c];
        if (homes.state == Tier::device) continue;
        cost::LayerUpdates& layer = layers[static_cast<size_t>(chunks[c].layer)];
        // A drive reads and writes all state that lies there, however soon it is updated.
        const double stored_s =
            homes.state == Tier::nvme
                ? 2 * static_cast<double>(state_bytes(chunks[c])) / machine.nvme_bytes_per_s
                : 0;
        const double in_place_s = std::max(update_seconds(work, chunks[c], machine), stored_s);
        layer.in_order_s += in_place_s;
        if (homes.speculative)
            layer.speculative_s +=
                in_place_s * (homes.state == Tier::host ? machine.out_of_place : 1);
        else
            layer.after_outcome_s += in_place_s;
    }
    return layers;
}

// Another stage's has nothing here.
bool is_own_block(const model::Layer& layer) {
    return layer.kind == model::LayerKind::block && layer.elements > 0;
}

}  // namespace

double seconds_of(const SavedActivation& activation, const Workload& work,
                  const cost::Measurements& machine) {
    const std::vector<double>& flops = work.needs.saved_flops[at(activation.what)];
    const double most = std::ranges::max(flops),
                 longest_s = machine.kernels.saved_s[at(activation.what)];
    const double rate = longest_s > 0 && most > 0 ? most / longest_s : machine.assumed_flops_per_s;
    return flops.at(static_cast<size_t>(work.layers[activation.layer].index)) / rate;
}

cost::KernelSeconds kernel_seconds(const PlanRequest& request, const Workload& work,
                                   const model::OfSaved<std::vector<bool>>& saved,
                                   const cost::Measurements& machine) {
    const auto micro_batches = static_cast<double>(request.micro_batches);
    const auto tokens = static_cast<double>(work.numerics.tokens());
    const model::Layer* table = work.partition.ties(work.layers) ? &work.layers.front() : nullptr;
    cost::KernelSeconds counted{};  // as cost::timed_kernels
    double saved_s = 0;
    bool trains_below = work.partition.stage.trains_below;
    for (size_t l = 0; l < work.layers.size(); ++l) {
        const model::Layer& layer = work.layers[l];
        trains_below = trains_below || work.partition.stage.trains_before(static_cast<int64_t>(l));
        const cost::LayerFlops flops = cost::layer_flops(layer, table, trains_below);
        const auto seconds = [&](double of_a_token) {
            return micro_batches * tokens * of_a_token / machine.assumed_flops_per_s;
        };
        const bool block = is_own_block(layer);
        (block ? counted.forward : counted.backward) += seconds(flops.forward);
        counted.backward += seconds(flops.again + flops.gradients);
        trains_below = trains_below || layer.trainable_elements > 0;
        for (const model::Saved what : model::kAllSaved) {
            if (!block || work.needs.saved_flops[at(what)].empty()) continue;
            const double once_s = micro_batches * seconds_of({l, what}, work, machine);
            if (saved[at(what)][l]) saved_s += once_s;
            if (what != model::Saved::attention) continue;
            counted.forward += once_s;
            if (trains_below) counted.backward += (1 + flops.attention_passes()) * once_s;
        }
    }
    const cost::KernelSeconds timed = cost::timed_kernels(
        machine.kernels, request.micro_batches, std::ranges::count_if(work.layers, is_own_block));
    const double backward = timed.backward > 0 ? timed.backward : counted.backward;
    return {.forward = timed.forward > 0 ? timed.forward : counted.forward,
            .backward = std::max(0.0, backward - saved_s)};
}

double update_seconds(const Workload& work, const Chunk& chunk, const cost::Measurements& machine) {
    const double seconds =
        cost::update_seconds(chunk.count, element_of(work, chunk.format), machine);
    if (!is_matrix(chunk)) return seconds;
    return seconds + cost::products_s(products_of(chunk, work.ns_steps, work.ns_products,
                                                  work.numerics.compute, true),
                                      machine);
}
double update_seconds(const Workload& work, const cost::Measurements& machine) {
    return cost::update_seconds(work.chunk_elements, element_of(work, work.state), machine);
}

std::optional<double> expected_clipped(const PlanRequest& request) {
    if (!request.clips) return 0;
    if (request.swap.expect_clipped) return request.swap.expect_clipped;
    return request.swap.speculate == Speculate::all ? std::optional(0.0) : std::nullopt;
}

double StepSeconds::expected(const PlanRequest& request) const {
    if (request.swap.speculate == Speculate::off) return not_speculative;
    const double clipped = expected_clipped(request).value_or(0.5);
    return (1 - clipped) * committed + clipped * not_speculative;
}

StepSeconds step_seconds(const PlanRequest& request, const Workload& work,
                         const std::vector<Chunk>& chunks,
                         const std::vector<AccumulatorSpill>& spills, const Placement& placement,
                         const cost::Measurements& machine) {
    Traffic traffic(work, placement);
    traffic.count_weights(chunks);
    for (size_t c = 0; c < chunks.size(); ++c) {
        if (chunks[c].trainable) traffic.count_update(chunks[c], placement.chunks[c], machine);
    }
    traffic.count_activations(spills);
    const cost::KernelSeconds kernels = kernel_seconds(request, work, placement.saved, machine);
    const cost::OfPrevious waits = cost::waits_for_updates(
        updates_of(work, chunks, placement, machine), placement.groups, kernels);
    return {cost::step_seconds(traffic.all(), kernels, waits, machine)};
}

}  // namespace ferry::planner
