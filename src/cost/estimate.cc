#include "cost/estimate.h"

#include <algorithm>
#include <ranges>

namespace ferry::cost {

KernelSeconds timed_kernels(const KernelTimes& kernels, int64_t micro_batches, int64_t blocks) {
    using model::LayerKind;
    double forward = 0, backward = 0, head = 0;  // of a block, and of the head
    for (const OperationRow& row : operations()) {
        const double longest = kernels.longest(row.op, row.layer);
        const bool block = row.layer == LayerKind::block;
        if (block && row.pass == Pass::forward) forward += longest;
        if (block && (row.pass == Pass::backward || row.pass == Pass::left)) backward += longest;
        if (row.pass == Pass::both) head += longest;
    }
    const auto passes = static_cast<double>(micro_batches), count = static_cast<double>(blocks);
    return {.forward = passes * count * forward, .backward = passes * (count * backward + head)};
}

double update_seconds(int64_t elements, const ElementBytes& element, const Measurements& measured) {
    return measured.update_overhead_s +
           update_bytes(static_cast<double>(elements), element) / measured.dram_bytes_per_s;
}

OfPrevious waits_for_updates(const std::vector<LayerUpdates>& layers, int64_t groups,
                             const KernelSeconds& kernels) {
    const auto visits = static_cast<double>(groups * (std::ssize(layers) - 2));
    const double forward_s = kernels.forward / visits, backward_s = kernels.backward / visits;

    double to_come_s = kernels.backward / static_cast<double>(groups);
    double speculative_s = -to_come_s;  // the end of backward is 0
    for (const LayerUpdates& layer : std::views::reverse(layers)) {
        to_come_s -= layer.block ? backward_s : 0;
        if (layer.speculative_s > 0)
            speculative_s = std::max(speculative_s, -to_come_s) + layer.speculative_s;
    }
    const auto wait_after = [&](double updated_s, double LayerUpdates::*due) {
        double now_s = 0, kernels_s = 0;
        for (const LayerUpdates& layer : layers) {
            updated_s += layer.*due;
            if (layer.in_order_s > 0) now_s = std::max(now_s, updated_s);
            now_s += layer.block ? forward_s : 0;
            kernels_s += layer.block ? forward_s : 0;
        }
        return now_s - kernels_s;
    };
    return {wait_after(std::max(0.0, speculative_s), &LayerUpdates::after_outcome_s),
            wait_after(0, &LayerUpdates::in_order_s)};
}

OfPrevious step_seconds(const PlacedTraffic& traffic, const KernelSeconds& kernels,
                        const OfPrevious& waits, const Measurements& measured) {
    const double up = traffic.up_bytes, down = traffic.down_bytes, stored = traffic.stored_bytes;
    const double compute_s = kernels.forward + kernels.backward + traffic.device_updates_s;
    const double moved = dram_bytes(0, up + down, stored, measured);
    const double host_s = traffic.host_updates_s + moved / measured.dram_bytes_per_s;
    const double links_s = std::max(std::max(up, down) / measured.copy_bytes_per_s,
                                    stored / measured.nvme_bytes_per_s);
    if (measured.computes_on_host) {
        const double all_s = std::max(links_s, compute_s + host_s);
        return {all_s, all_s};
    }
    const auto beside = [&](double wait_s) {
        return std::max({links_s, host_s, compute_s + wait_s});
    };
    return {beside(waits.committed), beside(waits.not_speculative)};
}

}  // namespace ferry::cost
