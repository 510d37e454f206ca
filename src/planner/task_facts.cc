#include "task_facts.h"

namespace ferry::planner {

using swap::ObjectId;

std::vector<Owner> owners_of_objects(const Plan& plan) {
    std::vector<Owner> owners(plan.objects.size());
    const auto own = [&](ObjectId object, int64_t layer, int64_t item) {
        if (object != swap::kNoObject)
            owners[object] = {static_cast<int32_t>(layer), static_cast<int32_t>(item)};
    };
    for (size_t c = 0; c < plan.chunks.size(); ++c) {
        const Chunk& chunk = plan.chunks[c];
        for (const ObjectId object :
             {chunk.weight, chunk.state, chunk.gradient, chunk.kept, chunk.feedback})
            own(object, chunk.layer, static_cast<int64_t>(c));
    }
    for (const AccumulatorSpill& spill : plan.spills) {
        own(spill.object, spill.layer, -1);
        own(spill.table, spill.layer, -1);
    }
    for (int64_t l = 0; l < std::ssize(plan.layer_plans); ++l)
        for (const ObjectId object : plan.layer_plans[static_cast<size_t>(l)].second_shards)
            own(object, l, -1);
    // A layer's output is the next one's input.
    const int64_t size = plan.inputs_of_a_block();
    for (int64_t i = 0; i < std::ssize(plan.inputs); ++i)
        own(plan.inputs[static_cast<size_t>(i)], i / size + 1, i % size);
    return owners;
}

}  // namespace ferry::planner
