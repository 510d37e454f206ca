#include "place.h"

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "place_impl.h"

namespace ferry::planner {

std::optional<int64_t> blocks_asked_to_save(const PlanRequest& request, model::Saved what) {
    const SwapConfig& swap = request.swap;
    return model::OfSaved<std::optional<int64_t>>{swap.save_attention, swap.save_mlp,
                                                  swap.save_projections}[at(what)];
}

Placement place(const PlanRequest& request, const Workload& work, const std::vector<Chunk>& chunks,
                const std::vector<AccumulatorSpill>& spills, const cost::Measurements& machine,
                const ToSave& to_save, size_t yielded) {
    Placement result{.device = Budget(swap::Tier::device, request.budgets.device_bytes),
                     .host = Budget(swap::Tier::host, request.budgets.host_bytes, request.sharers)};
    const ToPlace what{request, work, chunks, spills, machine, to_save, yielded};
    place_on_device(what, result);
    place_behind_device(what, result);
    return result;
}

}  // namespace ferry::planner
