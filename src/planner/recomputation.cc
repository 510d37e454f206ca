#include <algorithm>
#include <functional>
#include <limits>

#include "placement.h"
#include "step_seconds.h"

namespace ferry::planner {
namespace {

// Blocks that backward visits, those first whose attention is dearest, and of alike ones the last:
// theirs is kept for the shortest time.
std::vector<size_t> blocks_by_attention(const Workload& work) {
    std::vector<size_t> blocks;
    if (work.needs.attention == 0) return blocks;
    bool trains = false;
    for (size_t l = 0; l < work.layers.size(); ++l) {
        trains = trains || work.layers[l].trainable_elements > 0;
        if (trains && work.layers[l].kind == model::LayerKind::block) blocks.push_back(l);
    }
    std::ranges::reverse(blocks);
    std::ranges::stable_sort(blocks, std::greater(), [&](size_t l) {
        return work.needs.attention_flops[static_cast<size_t>(work.layers[l].index)];
    });
    return blocks;
}

}  // namespace

Placement place_for_speed(const Config& config, const Workload& work,
                          const std::vector<Chunk>& chunks, const std::vector<Park>& parks,
                          const MachineFigures& machine) {
    const std::vector<size_t> blocks = blocks_by_attention(work);
    const auto keeping = [&](int64_t count) {
        return place(config, work, chunks, parks, machine,
                     std::span(blocks).first(static_cast<size_t>(count)));
    };
    const int64_t asked = config.swap.keep_attention, most = std::ssize(blocks);
    if (asked >= 0) return keeping(std::min(asked, most));
    if (config.budgets.device_bytes == kUnlimited) return keeping(0);  // what is to spare?
    const auto seconds = [&](int64_t count) {
        try {
            const Placement placement = keeping(count);
            if (std::ranges::count(placement.attention, true) == count)
                return step_seconds(config, work, chunks, parks, placement, machine);
        } catch (const Error& error) {
            if (error.trouble() != Trouble::does_not_fit) throw;
        }
        return std::numeric_limits<double>::infinity();
    };
    // The less is computed, the more travels. All counts are tried: a chunk that no longer fits
    // makes steps in what travels, and so lesser minima.
    int64_t best = 0;
    double least = std::numeric_limits<double>::infinity();
    for (int64_t count = 0; count <= most; ++count) {
        const double of_step = seconds(count);
        if (of_step == std::numeric_limits<double>::infinity()) break;
        if (of_step >= least) continue;
        least = of_step;
        best = count;
    }
    return keeping(best);
}

}  // namespace ferry::planner
