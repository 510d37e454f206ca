// How much of the optimizer's work is done before the clip factor is known, and what storage has
// left for it.
#pragma once

#include <vector>

#include "placement.h"

namespace ferry::planner {

// The part of the optimizer's work that is worth doing before the clip factor is known. It is none
// where a quarter of the next forward pass hides all of it. Else backward and forward are left the
// same share of slack, as any late update makes its layer's forward wait. It is never more than
// backward hides. `out_of_place`: seconds of a speculative update, of one after the outcome.
double speculative_fraction(double forward_s, double backward_s, double optimizer_s,
                            double out_of_place);

// The speculative share of what the host updates in this placement: see speculative_fraction().
double expected_speculative_fraction(const PlanRequest& request, const Workload& work,
                                     const std::vector<Chunk>& chunks, const Placement& placement,
                                     const cost::Measurements& machine);

// Bytes that a placement needs on NVMe beyond the paths' sizes, whatever is speculative.
int64_t missing_on_paths(const PlanRequest& request, const Workload& work,
                         const std::vector<Chunk>& chunks,
                         const std::vector<AccumulatorSpill>& spills, const Placement& placement);

// The room that NVMe paths have left beside all that has to be stored. Speculative updates that
// were not asked for take their second slots from it alone. A durable step has second slots in any
// case.
class SpeculationRoom {
public:
    SpeculationRoom(const PlanRequest& request, const Workload& work,
                    const std::vector<Chunk>& chunks, const std::vector<AccumulatorSpill>& spills,
                    const Placement& placement);
    // Bytes of the second slots of a chunk that lives there.
    int64_t bytes_for(const Chunk& chunk, const Placement::ChunkHomes& homes) const;
    // 0 where what is stored already takes more than there is.
    int64_t left() const { return left_; }
    void take(int64_t bytes) { left_ -= bytes; }

private:
    const Workload& work_;
    const bool durable_;
    int64_t left_;
};

}  // namespace ferry::planner
