#include "planner/work.h"

namespace ferry::planner {
namespace {

// Whoever touches the bytes checks them: what an update reads from NVMe, and what it will write
// there.
int64_t bytes_checked_by_update(const Plan& plan, const swap::Task& task) {
    if (!plan.verify) return 0;
    const Chunk& chunk = plan.chunks[static_cast<size_t>(task.item)];
    const auto object_of = [&](cost::Content content) {
        return content == cost::Content::state      ? chunk.state
               : content == cost::Content::weight   ? chunk.weight
               : content == cost::Content::kept     ? chunk.kept
               : content == cost::Content::feedback ? chunk.feedback
               : content == cost::Content::wire     ? chunk.gradient
                                                    : swap::kNoObject;
    };
    int64_t checked = 0;
    for (const cost::OperandOf& operand : cost::row_of(task).operands) {
        const swap::ObjectId object = object_of(operand.content);
        if (object == swap::kNoObject) continue;
        const swap::Object& known = plan.objects[object];
        if (!operand.optional && known.home == swap::Tier::nvme) checked += known.bytes;
    }
    return checked;
}

bool is_of_run(const swap::Task& task) {
    return task.lane == swap::Lane::compute && cost::row_of(task).spans_run;
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
                    .ranks = plan.partition.ranks,
                    .summed_parts = plan.partition.summed_parts(),
                    .codecs = plan.partition.codecs,
                    .compute = plan.compute,
                    .wire = plan.wire,
                    .state = plan.state};
    if (cost::is_update(task) && (task.flags & cost::kTakesMomentum) != 0) work.wire = DType::f32;
    if (task.layer >= 0) {
        work.layer = &plan.layers[static_cast<size_t>(task.layer)];
        work.exchanges = plan.exchanges_of(task.layer);
    }
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
