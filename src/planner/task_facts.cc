#include "task_facts.h"

#include "chunks.h"
#include "planner/recorder.h"

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
        for (const ObjectId object : {chunk.weight, chunk.state, chunk.gradient})
            own(object, chunk.layer, static_cast<int64_t>(c));
    }
    for (const AccumulatorSpill& spill : plan.spills) {
        own(spill.object, spill.layer, -1);
        own(spill.table, spill.layer, -1);
    }
    // What a layer leaves is the next one's input.
    const int64_t size = plan.group_size();
    for (int64_t i = 0; i < std::ssize(plan.inputs); ++i)
        own(plan.inputs[static_cast<size_t>(i)], i / size + 1, i % size);
    return owners;
}

namespace {

int64_t bytes_of_chunk(const Plan& plan, const swap::Task& task) {
    const int64_t count = plan.chunks[static_cast<size_t>(task.item)].count;
    const int64_t wire = size_of(plan.wire), leaves = count / kLeafElements * 4;
    switch (static_cast<Op>(task.op)) {
        case Op::round:
            return count * (4 + wire) + leaves;
        case Op::cut:
            return plan.partition.ranks * count * (4 + wire);
        case Op::sum:
            return (plan.partition.ranks + 1) * count * wire + leaves;
        case Op::update:
        case Op::update_speculative:
            return count * update_bytes(plan.state, plan.compute, plan.wire);
        case Op::recast:
            return count * (4 + size_of(plan.compute));
        default:
            return 0;  // what ranks exchange is counted by whoever records it
    }
}

}  // namespace

int64_t touched_bytes(const Plan& plan, const swap::Task& task) {
    const auto buffer = [&](Class c) { return plan.buffers[static_cast<size_t>(c)].bytes; };
    const int64_t x = buffer(Class::activation), tokens = buffer(Class::tokens);
    const auto weights = [&](int32_t layer) {
        return plan.layers[static_cast<size_t>(layer)].elements * size_of(plan.compute);
    };
    // Added to: read and written.
    const auto gradient = [&](int32_t layer) {
        return 2 * plan.layers[static_cast<size_t>(layer)].trainable_elements * 4;
    };
    const int64_t table = plan.tied ? weights(0) : 0, of_table = plan.tied ? gradient(0) : 0;
    switch (static_cast<Op>(task.op)) {
        case Op::load_tokens:
        case Op::load_evaluation:
            return tokens;
        case Op::embed:
            return tokens + 2 * x;
        case Op::forward:
            return weights(task.layer) + 2 * x;
        case Op::head:
            return weights(task.layer) + table + tokens + 2 * x + gradient(task.layer) + of_table;
        case Op::head_loss:
            return weights(task.layer) + table + tokens + x;
        case Op::backward:
            return weights(task.layer) + 3 * x + gradient(task.layer);
        case Op::embed_backward:
            return tokens + 3 * x;
        default:
            return task.item >= 0 ? bytes_of_chunk(plan, task) : 0;
    }
}

}  // namespace ferry::planner
