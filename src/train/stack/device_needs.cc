#include "device_needs.h"

#include <algorithm>
#include <mutex>
#include <optional>

#include "base/log.h"
#include "base/text.h"
#include "comm/comm.h"
#include "cost/traffic.h"
#include "ferry/units.h"
#include "ops/blas_kernels.h"
#include "ops/product_table.h"
#include "train/kernels/newton_schulz.h"

namespace ferry::train {
namespace {

// By the first rank: the others run the same kernels, or the run is refused.
void advise_once() {
    static std::once_flag once;
    if (comm::launched_rank().value_or(0) != 0) return;
    std::call_once(once, [] {
        if (const std::string text = ops::slow_blas(); !text.empty()) log_info(text);
    });
}

std::optional<ops::ProductTable> product_table_of(const Config& config) {
    const std::string& path = config.numerics.products;
    if (path.empty()) return {};
    return ops::ProductTable::parse(
        read_text_file(path, {.name = "the table of products",
                              .remedy = "write one with ferry bench kernels --tune"}),
        path);
}

}  // namespace

std::unique_ptr<ops::Ops> ops_on(Device& device, const Config& config, Team& team) {
    if (config.device == DeviceKind::cpu && !config.numerics.products.empty()) {
        throw Error(Trouble::usage, {.what = "a table of products is of a GPU's",
                                     .where = "numerics.products",
                                     .measured = "device is cpu",
                                     .remedy = "leave the key out, or set device to cuda"});
    }
    if (device.kind() == DeviceKind::cpu) {
        auto made = ops::make_cpu_ops(team);
        advise_once();
        return made;
    }
    const auto products = product_table_of(config);
    return ops::make_cuda_ops(device, config.numerics.attention, ops::kMostSlopeBytes, false,
                              products ? &*products : nullptr);
}

model::OfSaved<std::vector<double>> saved_flops(const model::Decoder& decoder) {
    const model::Shape& shape = decoder.shape();
    const model::Numerics& numerics = decoder.numerics();
    const auto tokens = static_cast<double>(numerics.tokens());
    const auto width = static_cast<double>(shape.heads * shape.head_dim);
    const auto inner = static_cast<double>((shape.gated ? 2 : 1) * shape.intermediate);
    const auto keys = static_cast<double>(shape.kv_heads * shape.head_dim);
    // Of ranks that share sequences or tensors nobody saves them.
    const bool exchanges = numerics.parts > 1 || numerics.slices > 1;
    const double projected = exchanges ? 0 : 2 * (width + keys);
    std::vector<double> attention, mlp, projections;
    const double attended = 4 * tokens * width;
    for (int64_t block = 0; block < shape.layers; ++block) {  // scores and weighted sums
        attention.push_back(attended * cost::keys_seen(shape, numerics.whole_sequence(), block));
        mlp.push_back(2 * tokens * inner * static_cast<double>(shape.hidden));
        projections.push_back(2 * tokens * projected * static_cast<double>(shape.hidden));
    }
    return {attention, mlp, projections};
}

model::OfSaved<double> most_saved_flops(const model::Decoder& decoder) {
    model::OfSaved<double> most{};
    const auto flops = saved_flops(decoder);
    for (const model::Saved what : model::kAllSaved)
        most[at(what)] = std::ranges::max(flops[at(what)]);
    return most;
}

model::OfSaved<int64_t> saved_bytes(const model::Decoder& decoder) {
    model::OfSaved<int64_t> bytes{};
    for (const model::Saved what : model::kAllSaved) bytes[at(what)] = decoder.saved_bytes(what);
    return bytes;
}

int64_t overhead_of(const Device& device) {
    if (device.kind() == DeviceKind::cpu) return 0;
    // The driver loads a kernel's code at its first call; check_device_memory() measures after it.
    constexpr int64_t kCodeBytes = 64 * kMiB;
    return round_up(device.overhead_bytes() + kCodeBytes, kMiB);
}

planner::DeviceNeeds needs_of(const Device& device, const model::Decoder& decoder) {
    return {.activation = decoder.activation_bytes(),
            .scratch = decoder.scratch_bytes(),
            .overhead = overhead_of(device),
            .lists = decoder.pattern_bytes(),
            .matrix_scratch = matrix_scratch_bytes(decoder.ops(), decoder.layers()),
            .exchanges = decoder.exchanges(),
            .saved = saved_bytes(decoder),
            .saved_flops = saved_flops(decoder),
            .maps_host = device.kind() == DeviceKind::cuda,
            .deferred = decoder.deferred_bytes()};
}

int64_t device_bytes_within(int64_t budget, const Device& device) {
    if (device.kind() == DeviceKind::cpu) return budget;
    const int64_t most = device.overhead_bytes() + device.free_bytes();
    if (most >= budget) return budget;
    if (budget != kUnlimited) {
        log_warn("budgets.device is " + format_bytes(budget) + ", but the GPU has no more than " +
                 format_bytes(most) + " for this process");
    }
    return most;
}

int64_t device_buffer_bytes(const planner::Plan& plan) {
    int64_t bytes = 0;
    for (const planner::Buffers& b : plan.buffers) {
        if (b.tier == swap::Tier::device) bytes += b.bytes * b.count;
    }
    return bytes;
}

int64_t overwritable_bytes(const planner::Plan& plan) {
    const planner::Buffers& lists = plan.buffers[static_cast<size_t>(planner::Class::lists)];
    return lists.count > 0 ? lists.offset : device_buffer_bytes(plan);
}

}  // namespace ferry::train
