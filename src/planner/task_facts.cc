#include "task_facts.h"

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
        for (const ObjectId object :
             {chunk.weight, chunk.state, chunk.gradient, chunk.kept, chunk.feedback})
            own(object, chunk.layer, static_cast<int64_t>(c));
    }
    for (const AccumulatorSpill& spill : plan.spills) {
        own(spill.object, spill.layer, -1);
        own(spill.table, spill.layer, -1);
    }
    // A layer's output is the next one's input.
    const int64_t size = plan.inputs_of_a_block();
    for (int64_t i = 0; i < std::ssize(plan.inputs); ++i)
        own(plan.inputs[static_cast<size_t>(i)], i / size + 1, i % size);
    return owners;
}

namespace {

// Whoever touches the bytes checks them: what an update reads from NVMe, and what it will write
// there.
int64_t bytes_checked_by_update(const Plan& plan, const swap::Task& task) {
    if (!plan.verify) return 0;
    const Chunk& chunk = plan.chunks[static_cast<size_t>(task.item)];
    const auto object_of = [&](Content content) {
        return content == Content::state      ? chunk.state
               : content == Content::weight   ? chunk.weight
               : content == Content::kept     ? chunk.kept
               : content == Content::feedback ? chunk.feedback
               : content == Content::wire     ? chunk.gradient
                                              : swap::kNoObject;
    };
    int64_t checked = 0;
    for (const cost::OperandOf& operand : cost::row_of(task).operands) {
        const ObjectId object = object_of(operand.content);
        if (object == swap::kNoObject) continue;
        const swap::Object& known = plan.objects[object];
        if (!operand.optional && known.home == swap::Tier::nvme) checked += known.bytes;
    }
    return checked;
}

// A task of the device is of a whole run, but for those of ranks.
bool is_of_run(const swap::Task& task) {
    return task.lane == swap::Lane::compute &&
           (cost::is_update(task) || static_cast<Op>(task.op) == Op::round);
}

void set_chunk(cost::Work& work, const Plan& plan, const swap::Task& task) {
    const Chunk& chunk = plan.chunks[static_cast<size_t>(task.item)];
    work.elements = is_of_run(task) ? plan.elements_of_run(chunk) : chunk.count;
    work.state = chunk.format;
}

}  // namespace

cost::Work work_of(const Plan& plan, const swap::Task& task) {
    const auto buffer = [&](Class c) { return plan.buffers[static_cast<size_t>(c)].bytes; };
    cost::Work work{.bytes = task.bytes,
                    .flags = task.flags,
                    .tokens = plan.tokens,
                    .tokens_bytes = buffer(Class::tokens),
                    .input_bytes = buffer(Class::activation),
                    .exchanges = plan.exchanges,
                    .ranks = plan.partition.ranks,
                    .codecs = plan.partition.codecs,
                    .compute = plan.compute,
                    .wire = plan.wire,
                    .state = plan.state};
    if (cost::is_update(task) && (task.flags & cost::kTakesMomentum) != 0) work.wire = DType::f32;
    if (task.layer >= 0) work.layer = &plan.layers[static_cast<size_t>(task.layer)];
    if (work.layer && plan.tied && work.layer->kind == model::LayerKind::head)
        work.table = &plan.layers.front();
    if (cost::row_of(task).item == cost::ItemOf::chunk) {
        const Chunk& chunk = plan.chunks[static_cast<size_t>(task.item)];
        set_chunk(work, plan, task);
        if (is_matrix(chunk) && cost::is_update(task))
            work.products = products_of(chunk, plan.ns_steps, plan.ns_products, plan.compute,
                                        task.lane == swap::Lane::team);
    }
    if (task.lane == swap::Lane::team && cost::is_update(task))
        work.checked_bytes = bytes_checked_by_update(plan, task);
    return work;
}

cost::WorkOf work_of(const Plan& plan) {
    return [&plan](const swap::Task& task) { return work_of(plan, task); };
}

}  // namespace ferry::planner
