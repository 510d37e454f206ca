#include <algorithm>

#include "cost/traffic.h"
#include "layout.h"
#include "planner/chunks.h"
#include "planner/planner.h"
#include "recomputation.h"

namespace ferry::planner {
namespace {

// More would take gigabytes to plan with, and objects are numbered in 32 bits.
constexpr int64_t kChunksMost = int64_t{1} << 22;

int64_t elements_of(const std::vector<model::Layer>& layers) {
    int64_t elements = 0;
    for (const model::Layer& layer : layers) elements += layer.elements;
    return elements;
}

// By arithmetic, before anything is as large as the model.
void require_few_chunks(const std::vector<model::Layer>& layers, int64_t chunk_elements) {
    const int64_t elements = elements_of(layers);
    if (elements / chunk_elements <= kChunksMost) return;
    throw Error(
        Trouble::does_not_fit,
        {.what = "the model has more chunks than can be planned",
         .where = "model, swap.chunk_elements",
         .measured = std::to_string(elements) + " parameters in chunks of " +
                     std::to_string(chunk_elements),
         .limit = std::to_string(kChunksMost) + " chunks",
         .remedy = "set swap.chunk_elements to " +
                   std::to_string(round_up(ceil_div(elements, kChunksMost), kLeafElements)) +
                   " or more, or correct the model's shape"});
}

Plan plan_with(int64_t chunk_elements, const PlanRequest& request,
               const std::vector<model::Layer>& layers, const model::Numerics& numerics,
               const DeviceNeeds& needs, const cost::Measurements& machine,
               const zero::Partition& partition) {
    const MatrixNeeds matrices = matrix_needs(layers, request.state, request.ns_products);
    Plan plan{.partition = partition,
              .micro_batches = request.micro_batches,
              .tokens = numerics.tokens(),
              .input_bytes = needs.activation,
              .exchanges = needs.exchanges,
              .chunk_elements = std::max(chunk_elements, matrices.elements),
              .tied = partition.ties(layers),
              .documents = numerics.documents,
              .verify = request.swap.verify,
              .compute = numerics.compute,
              .wire = numerics.wire,
              .state = request.state,
              .layers = layers,
              .device_overhead_bytes = needs.overhead + needs.page_tables};
    plan.layer_plans.resize(plan.layers.size());
    plan.chunks = cut_chunks(plan.layers, chunk_elements, plan.state, partition, plan.layer_plans);
    plan.spills = cut_spills(plan.layers, chunk_elements, plan.layer_plans);
    plan.ns_steps = request.ns_steps;
    plan.ns_products = request.ns_products;
    plan.leaves = leaves_of(plan.chunks, partition);
    // Of a stage: another one trains.
    if (plan.leaves == 0 && request.trains && partition.stage.all()) {
        throw Error(Trouble::usage, {.what = "every tensor is frozen: there is nothing to train",
                                     .where = "freeze",
                                     .remedy = "remove a pattern from \"freeze\""});
    }
    plan.durable = request.durable && plan.leaves > 0;
    const Workload work{.layers = plan.layers,
                        .numerics = numerics,
                        .needs = needs,
                        .partition = partition,
                        .chunk_elements = plan.chunk_elements,
                        .cut_elements = chunk_elements,
                        .matrices = matrices,
                        .report_bytes = plan.report_bytes(),
                        .state = plan.state,
                        .ns_steps = plan.ns_steps,
                        .ns_products = plan.ns_products,
                        .sends_matrices = request.device == DeviceKind::cuda};
    const Placement placement = place_for_speed(request, work, plan.chunks, plan.spills, machine);
    lay_out(plan, placement, work, nvme_budget(request), request.budgets.nvme.size());
    return plan;
}

// More than a plan ever has on the host: two versions of everything, and every block's input.
int64_t most_host_bytes(const PlanRequest& request, const std::vector<model::Layer>& layers,
                        const model::Numerics& numerics, const DeviceNeeds& needs) {
    const int64_t of_an_element =
        2 * (ceil_div(largest_state_bytes(kLeafElements, request.state), kLeafElements) +
             size_of(numerics.wire) + size_of(numerics.compute));
    const int64_t inputs = std::ssize(layers) * request.micro_batches * needs.activation;
    return std::min(request.budgets.host_bytes,
                    elements_of(layers) * of_an_element + inputs + kGiB);
}

// The same beside the page tables that its host tier asks of the device: 8 bytes for a page of
// 4 KiB, also where the host has huge pages. With less left on the device more lies in host memory,
// so once more until it is enough.
Plan plan_and_map(int64_t chunk_elements, const PlanRequest& request,
                  const std::vector<model::Layer>& layers, const model::Numerics& numerics,
                  DeviceNeeds needs, const cost::Measurements& machine,
                  const zero::Partition& partition) {
    constexpr int64_t kMappedByAByte = 4096 / 8;
    for (;;) {
        int64_t on_host = 0;
        try {
            Plan plan =
                plan_with(chunk_elements, request, layers, numerics, needs, machine, partition);
            if (!needs.maps_host || plan.host_bytes <= kMappedByAByte * needs.page_tables)
                return plan;
            on_host = plan.host_bytes;
        } catch (const Error& error) {
            if (!needs.maps_host || needs.page_tables > 0 ||
                error.trouble() != Trouble::does_not_fit) {
                throw;
            }
            // The budget that the message names has to have room for the tables, too.
            on_host = most_host_bytes(request, layers, numerics, needs);
        }
        needs.page_tables = round_up(ceil_div(on_host, kMappedByAByte), kMiB);
    }
}

}  // namespace

std::vector<int64_t> group_counts(int64_t micro_batches) {
    std::vector<int64_t> found;
    for (int64_t groups = 1; groups <= micro_batches; ++groups) {
        if (micro_batches % groups == 0) found.push_back(groups);
    }
    return found;
}

bool Plan::trains_below(int64_t layer) const {
    return partition.stage.trains_before(layer) ||
           std::any_of(layers.begin(), layers.begin() + layer,
                       [](const model::Layer& l) { return l.trainable_elements > 0; });
}

bool Plan::goes_back(int64_t layer) const {
    return layers[static_cast<size_t>(layer)].kind == model::LayerKind::block &&
           partition.stage.has(layer) && trains_below(layer + 1);
}

model::BlockExchanges Plan::exchanges_of(int64_t layer) const {
    model::BlockExchanges found = exchanges.of(layers[static_cast<size_t>(layer)].kind);
    if (!layer_plans[static_cast<size_t>(layer)].saves[at(model::Saved::attention)]) return found;
    found.sequence.backward_bytes -= found.sequence.attention_bytes;
    found.sequence.backward_calls -= found.sequence.attention_calls;
    return found;
}

int64_t Plan::blocks_saving(model::Saved what) const {
    return std::ranges::count_if(layer_plans,
                                 [what](const LayerPlan& l) { return l.saves[at(what)]; });
}

int64_t Plan::inputs_on_device() const {
    const std::vector<int64_t> under_way =
        partition.stage.under_way_by_layer(groups, std::ssize(layers));
    const int64_t each = inputs_of_a_block();
    int64_t found = 0;
    for (int64_t i = 0; i < std::ssize(inputs); ++i)
        found += inputs[static_cast<size_t>(i)] == swap::kNoObject &&
                 i % each < under_way[static_cast<size_t>(i / each + 1)] * group_size();
    return found;
}

int64_t Plan::blocks_saving_inputs() const {
    return ceil_div(inputs_on_device(), inputs_of_a_block());
}

int64_t Plan::blocks() const {
    return std::ranges::count_if(layers, [](const model::Layer& layer) {
        return layer.kind == model::LayerKind::block && layer.elements > 0;
    });
}

int64_t Plan::blocks_at_most() const {
    int64_t blocks = 0;
    for (int64_t layer = 0; layer < std::ssize(layers); ++layer) blocks += goes_back(layer);
    return blocks;
}

Plan make_plan(const PlanRequest& request, const std::vector<model::Layer>& layers,
               const model::Numerics& numerics, const DeviceNeeds& needs,
               const cost::Measurements& machine, const zero::Partition& partition) {
    const bool automatic = !request.swap.chunk_elements;
    const auto moved = static_cast<int64_t>(
        cost::element_bytes(request.state, numerics.compute, numerics.wire).updated());
    int64_t elements =
        automatic ? choose_chunk_elements(layers, request, partition, machine, moved)
                  : std::min(*request.swap.chunk_elements, largest_shard(layers, partition));
    require_few_chunks(layers, elements);
    for (;; elements /= 2) {
        try {
            return plan_and_map(elements, request, layers, numerics, needs, machine, partition);
        } catch (const Error& error) {
            // Smaller chunks pass through smaller buffers. Refuse only what the smallest cannot do:
            // then the budget that the message names works.
            const bool smaller = automatic && elements > kLeafElements &&
                                 elements_of(layers) / (elements / 2) <= kChunksMost;
            if (!smaller || error.trouble() != Trouble::does_not_fit) throw;
        }
    }
}

}  // namespace ferry::planner
