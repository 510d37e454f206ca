#include "measure.h"

#include <algorithm>

#include "train/stack/device_needs.h"

namespace ferry::train {

planner::PlanRequest request_of_buffers(planner::PlanRequest request, const planner::Plan& plan) {
    request.budgets = {.device_bytes = plan.device_overhead_bytes + device_buffer_bytes(plan)};
    request.durable = false;
    request.swap = {.chunk_elements = plan.chunk_elements,
                    .groups = plan.groups,
                    .state_on_device = 0,
                    .save_attention = plan.blocks_saving(model::Saved::attention),
                    .save_mlp = plan.blocks_saving(model::Saved::mlp),
                    .save_projections = plan.blocks_saving(model::Saved::projections),
                    .save_inputs = plan.blocks_saving_inputs()};
    return request;
}

Patterns make_patterns(std::span<std::byte> memory, int64_t vocab) {
    const size_t half = memory.size() / 8 * 4;
    const std::span<std::byte> numbers = memory.first(half), tokens = memory.subspan(half, half);
    for (size_t i = 0; i < half / 4; ++i) {
        const auto noise = static_cast<uint32_t>((i + 1) * 2654435761U >> 16);
        const uint32_t small = 0x3c80U | (noise & 0x807fU);  // +-0.016 to 0.031, as bf16
        reinterpret_cast<uint32_t*>(numbers.data())[i] = small << 16 | small;
        reinterpret_cast<uint32_t*>(tokens.data())[i] = noise % static_cast<uint32_t>(vocab);
    }
    return {numbers, tokens};
}

void fill_buffers(const Bench& on, const Patterns& patterns) {
    for (size_t c = 0; c < planner::kClasses; ++c) {
        const planner::Buffers& b = on.plan.buffers[c];
        if (b.tier != swap::Tier::device || static_cast<planner::Class>(c) == planner::Class::lists)
            continue;
        const auto from = static_cast<planner::Class>(c) == planner::Class::tokens
                              ? patterns.tokens
                              : patterns.numbers;
        fill_device(on, on.device.memory().data() + b.offset, b.bytes * b.count, from);
    }
    fill_documents(on);
}

std::span<std::byte> staging_buffers(const planner::Plan& plan, std::span<std::byte> host) {
    const auto begin_of = [&](planner::Class c) {
        return static_cast<size_t>(plan.buffers[static_cast<size_t>(c)].offset);
    };
    const size_t first = begin_of(planner::Class::state_staging);
    return host.subspan(first, begin_of(planner::Class::host_tokens) - first);
}

cost::Measurements take_measurements(const swap::Schedule& step, const Bench& on, NodeTeams& teams,
                                     const optim::Scalars& scalars, std::span<std::byte> host,
                                     int64_t vocab, const std::function<UpdateRates()>& updates,
                                     Together& together) {
    const auto staging = [&](planner::Class c) {
        const planner::Buffers& b = on.plan.buffers[static_cast<size_t>(c)];
        return host.subspan(static_cast<size_t>(b.offset), static_cast<size_t>(b.bytes));
    };
    const std::span<std::byte> state = staging(planner::Class::state_staging),
                               weight = staging(planner::Class::weight_staging);
    const Patterns patterns = make_patterns(state, vocab);
    // The best that a product reaches: before the kernels' load. It overwrites device buffers.
    const double product = time_product(on, patterns.numbers, together);
    fill_buffers(on, patterns);
    cost::Measurements found{.memory_of = cost::Of::rank,
                             .computes_on_host = on.device.kind() == DeviceKind::cpu,
                             .product_flops_per_s = product,
                             .kernels = time_kernels(step, on, together)};
    found.kernels.saved_s = time_saved(on, together);
    found.copy_bytes_per_s = time_copies(on, weight, together);
    set_updates(updates(), found);
    found.check_bytes_per_s = time_checks(state, together);
    found.threads = teams.all().threads();
    found.device_bytes_per_s =
        found.computes_on_host ? found.dram_bytes_per_s : time_device_updates(on, scalars);
    found.device_copy_bytes_per_s = time_device_copies(on, together);
    agree_on_slowest(together, found);
    return found;
}

}  // namespace ferry::train
