#include <utility>

#include "model/gradients.h"
#include "planner/chunks.h"
#include "recorder_impl.h"

namespace ferry::planner {

// ---------------------------------------------------------------- AssignedBuffer

AssignedBuffer::AssignedBuffer(AssignedBuffer&& other) noexcept { *this = std::move(other); }

AssignedBuffer& AssignedBuffer::operator=(AssignedBuffer&& other) noexcept {
    release();
    recorder_ = std::exchange(other.recorder_, nullptr);
    class_ = other.class_;
    index_ = other.index_;
    place_ = other.place_;
    resources_ = std::move(other.resources_);
    return *this;
}

OperandPlace AssignedBuffer::place(int64_t offset) const {
    OperandPlace moved = place_;
    moved.offset += offset;
    return moved;
}

// ---------------------------------------------------------------- Recorder

Recorder::Recorder(const Plan& plan, std::string name, Keep keep)
    : plan_(plan), impl_(std::make_unique<Impl>(plan, std::move(name), keep)) {}
Recorder::~Recorder() = default;

const std::array<int64_t, swap::kLanes>& Recorder::bytes() const { return impl_->lane_bytes; }

void AssignedBuffer::release() {
    if (recorder_ && index_ >= 0) {
        recorder_->impl_->free[static_cast<size_t>(class_)].push_back(index_);
    }
    recorder_ = nullptr;
    index_ = -1;
}

AssignedBuffer Recorder::acquire(Class buffers) {
    const Buffers& b = plan_.buffers[static_cast<size_t>(buffers)];
    auto& free = impl_->free[static_cast<size_t>(buffers)];
    FERRY_CHECK(!free.empty(), "the plan has too few buffers: " + b.name);
    AssignedBuffer buffer;
    buffer.recorder_ = this;
    buffer.class_ = buffers;
    buffer.index_ = free.front();
    free.pop_front();
    const auto kind =
        b.tier == Tier::device ? OperandPlace::Kind::device : OperandPlace::Kind::host;
    buffer.place_ = {kind, swap::kNoObject, b.offset + buffer.index_ * b.bytes};
    buffer.resources_ = {b.first_resource + static_cast<uint32_t>(buffer.index_)};
    return buffer;
}

Recorder::Weights Recorder::fetch_weights(int64_t layer, Visit visit) {
    if (impl_->prefetched_layer >= 0) {
        FERRY_CHECK(impl_->prefetched_layer == layer, "other weights were prefetched");
        impl_->prefetched_layer = -1;
        Weights weights = std::move(impl_->prefetched);
        decode_weights(layer, std::exchange(impl_->prefetched_codes, {}), weights);
        return weights;
    }
    if (plan_.partition.sharding.weights) {
        BufferOf<Content::codes> codes;
        Weights weights = gather_shards(layer, visit, codes);
        decode_weights(layer, codes, weights);
        return weights;
    }
    if (plan_.layer_plans[static_cast<size_t>(layer)].resident) return impl_->resident(layer);
    Weights buffer = acquire_for_weights(layer);
    impl_->fetch_chunks(*this, layer, buffer, [](const Chunk&) { return true; });
    return buffer;
}

Recorder::Weights Recorder::acquire_for_weights(int64_t layer) {
    const bool edge = is_edge(plan_.layers[static_cast<size_t>(layer)]);
    return Weights(acquire(edge ? Class::edge_weights : Class::block_weights));
}

namespace {

// The object that an accumulator is spilled to: a tied table has two.
template <Content content>
ObjectId object_of(const AccumulatorSpill& spill) {
    return content == Content::table_gradient ? spill.table : spill.object;
}

}  // namespace

template <Content content>
BufferOf<content> Recorder::fetch_accumulator(int64_t layer, bool first_group) {
    const model::Layer& shape = plan_.layers[static_cast<size_t>(layer)];
    BufferOf<content> buffer(
        acquire(is_edge(shape) ? Class::edge_gradient : Class::block_gradient));
    if (first_group) {
        // Few of its rows are added to.
        if (content == Content::gradient && shape.kind == model::LayerKind::embedding)
            record<op::Zero>(layer, 0, {.what = buffer}, {.bytes = shape.trainable_elements * 4});
        return buffer;
    }
    for (const AccumulatorSpill& spill : plan_.spills_of(layer)) {
        impl_->fetch(*this, object_of<content>(spill), Class::spill_staging, buffer,
                     spill.first * 4);
    }
    return buffer;
}

template <Content content>
void Recorder::spill_accumulator(int64_t layer, const BufferOf<content>& gradient) {
    for (const AccumulatorSpill& spill : plan_.spills_of(layer)) {
        impl_->send(*this, gradient, spill.first * 4, object_of<content>(spill),
                    Class::spill_staging);
    }
}

Recorder::Gradient Recorder::fetch_gradient(int64_t layer, bool first_group) {
    return fetch_accumulator<Content::gradient>(layer, first_group);
}

Recorder::Gradient Recorder::norms_gradient(int64_t layer) {
    const int64_t elements = model::norm_elements(plan_.layers[static_cast<size_t>(layer)]);
    if (elements == 0) return {};
    Gradient norms(acquire(Class::norms));
    record<op::Zero>(layer, 0, {.what = norms}, {.bytes = elements * 4});
    return norms;
}

Recorder::TableGradient Recorder::fetch_table_gradient(bool first_group) {
    return fetch_accumulator<Content::table_gradient>(0, first_group);
}

void Recorder::spill_gradient(int64_t layer, const Gradient& gradient) {
    spill_accumulator(layer, gradient);
}

void Recorder::spill_table_gradient(const TableGradient& gradient) {
    spill_accumulator(0, gradient);
}

void Recorder::send_gradient(int64_t layer, const Gradient& gradient) {
    const LayerPlan& where = plan_.layer_plans[static_cast<size_t>(layer)];
    for (int64_t c = where.first_chunk; c < where.first_chunk + where.chunks; ++c) {
        const Chunk& chunk = plan_.chunks[static_cast<size_t>(c)];
        if (!chunk.trainable || !plan_.owns(chunk)) continue;
        if (!plan_.partition.alone()) {
            exchange(c, gradient);
            continue;
        }
        if (chunk.run == 0) continue;
        const AssignedBuffer wire = acquire(Class::wire);
        auto rounded = impl_->rounded(chunk, wire);
        for (const Chunk& more : plan_.run_of(chunk).subspan(1))
            rounded.resources.push_back(more.gradient);
        const LocatedOf<Content::gradient> of_chunk{
            {gradient.place(chunk.first * 4), gradient.resources()}};
        record<op::Round>(
            layer, c,
            {.gradient = of_chunk, .wire = rounded.written(), .leaves = leaves_in(wire, chunk)});
        if (!plan_.updates_on_device(chunk))
            impl_->send(*this, wire, 0, chunk.gradient, Class::gradient_staging);
        send_leaves(chunk, plan_.elements_of_run(chunk), wire);
    }
    while (!impl_->arrivals_in_host.empty()) combine_oldest();
}

// A wire buffer holds the norm leaves behind a chunk's values, or alone.
WrittenOf<Content::leaves> Recorder::leaves_in(const AssignedBuffer& wire,
                                               const Chunk& chunk) const {
    const bool alone = plan_.updates_on_device(chunk);
    return {{wire.place(alone ? 0 : plan_.chunk_elements * size_of(plan_.wire))}};
}

void Recorder::send_leaves(const Chunk& chunk, int64_t elements, const AssignedBuffer& wire) {
    Task norms{.verb = Verb::copy,
               .lane = Lane::d2h,
               .layer = static_cast<int32_t>(chunk.layer),
               .item = static_cast<int32_t>(&chunk - plan_.chunks.data()),
               .bytes = elements / kLeafElements * 4};
    norms.places[0] = leaves_in(wire, chunk).place;
    norms.places[1] = {OperandPlace::Kind::host, swap::kNoObject,
                       plan_.leaves_offset + chunk.first_leaf * 4};
    impl_->emit(norms,
                {{wire.resources()[0], Effect::read}, {plan_.leaves_resource, Effect::join}});
}

BufferOf<Content::tokens> Recorder::load_tokens(int64_t micro_batch, bool evaluation) {
    BufferOf<Content::tokens> staging(acquire(Class::host_tokens));
    if (evaluation)
        record<op::LoadEvaluation>(-1, micro_batch, {.tokens = staging});
    else
        record<op::LoadTokens>(-1, micro_batch, {.tokens = staging});
    BufferOf<Content::tokens> tokens(acquire(Class::tokens));
    Task copy{.verb = Verb::copy,
              .lane = Lane::h2d,
              .item = static_cast<int32_t>(micro_batch),
              .bytes = plan_.buffers[static_cast<size_t>(Class::tokens)].bytes};
    copy.places[0] = staging.place();
    copy.places[1] = tokens.place();
    impl_->emit(copy,
                {{staging.resources()[0], Effect::read}, {tokens.resources()[0], Effect::write}});
    return tokens;
}

void Recorder::send_report(const BufferOf<Content::report>& report) {
    Task copy{.verb = Verb::copy, .lane = Lane::d2h, .bytes = plan_.report_bytes()};
    copy.places[0] = report.place();
    copy.places[1] = {OperandPlace::Kind::host, swap::kNoObject, plan_.report_offset};
    impl_->emit(copy,
                {{report.resources()[0], Effect::read}, {plan_.report_resource, Effect::write}});
}

void Recorder::save_input(int64_t layer, int64_t i, Input x) {
    const int64_t at = layer * impl_->inputs_of_a_block + i;
    const ObjectId object = plan_.inputs[static_cast<size_t>(at)];
    if (object == swap::kNoObject) {
        impl_->saved_inputs[at] = std::move(x);
    } else {
        impl_->send(*this, x, 0, object, Class::input_staging);
    }
}

Recorder::Input Recorder::fetch_input(int64_t layer, int64_t i) {
    const int64_t at = layer * impl_->inputs_of_a_block + i;
    if (auto saved = impl_->saved_inputs.extract(at)) return std::move(saved.mapped());
    Input x = acquire<Content::input>();
    impl_->fetch(*this, plan_.inputs[static_cast<size_t>(at)], Class::input_staging, x, 0);
    return x;
}

void Recorder::prefetch_input(int64_t layer, int64_t i) {
    impl_->saved_inputs.emplace(layer * impl_->inputs_of_a_block + i, fetch_input(layer, i));
}

void Recorder::record_kernel(Op op, int64_t layer, int64_t item,
                             std::span<const Assigned::GivenOperand> operands,
                             const Detail& detail) {
    const cost::OperationRow& row = cost::row_of(op);
    FERRY_CHECK(!detail.on_device || row.device_too, row.name);
    Task task{.verb = Verb::kernel,
              .lane = detail.on_device ? Lane::compute : row.lane,
              .op = static_cast<uint8_t>(op),
              .flags = detail.flags,
              .layer = static_cast<int32_t>(layer),
              .item = static_cast<int32_t>(item),
              .bytes = detail.bytes};
    std::vector<Use> uses;
    for (const uint32_t resource : detail.overwrites) uses.push_back({resource, Effect::write});
    size_t position = 0;
    for (const auto& [at, role, optional] : operands) {
        const bool given = at.place.kind != OperandPlace::Kind::none || !at.resources.empty();
        FERRY_CHECK(given || optional, row.name);
        const bool writes = role == Role::out || role == Role::in_out;
        for (const uint32_t resource : at.resources)
            uses.push_back({resource, writes ? Effect::write : Effect::read});
        task.places[position++] = at.place;
    }
    impl_->emit(task, uses);
}

// ---------------------------------------------------------------- updates

template <template <class> class Operation>
void Recorder::record_update(int64_t index, const ChunkPart<Content::state>& state,
                             const ChunkPart<Content::wire>& gradient,
                             const ChunkPart<Content::weight>& weight, const Detail& detail) {
    const Chunk& chunk = plan_.chunks[static_cast<size_t>(index)];
    const bool speculative = Operation<Assigned>::kOp == Op::update_speculative;
    const LocatedOf<Content::state> before{{state.place}};
    const LocatedOf<Content::weight> weight_before{
        {plan_.state.split ? weight.place : OperandPlace{}}};
    WrittenOf<Content::state> after = state.written();
    WrittenOf<Content::weight> weight_after = weight.written();
    // In memory the old version stays until the outcome; what was staged is written to a fresh
    // slot.
    if (speculative && state.is_home) after.place = {OperandPlace::Kind::fresh, chunk.state, 0};
    if (speculative && plan_.state.split && weight.is_home)
        weight_after.place = {OperandPlace::Kind::fresh, chunk.weight, 0};
    record<Operation>(chunk.layer, index,
                      {.before = before,
                       .state = after,
                       .gradient = gradient.located(),
                       .weight = weight_after,
                       .weight_before = weight_before},
                      detail);
}

void Recorder::update_chunk(int64_t index, Op op, const ByMomentum* by) {
    const Chunk& chunk = plan_.chunks[static_cast<size_t>(index)];
    const Tier state_home = plan_.objects[chunk.state].home;
    auto state = ChunkPart<Content::state>::of(chunk.state);
    auto gradient = ChunkPart<Content::wire>::of(chunk.gradient);
    auto weight = ChunkPart<Content::weight>::of(chunk.weight);
    if (plan_.updates_on_device(chunk)) {
        FERRY_CHECK(op == Op::update, "what the device updates does not speculate");
        if (chunk.run == 0) return;  // an earlier chunk's task updates it
        for (const Chunk& more : plan_.run_of(chunk).subspan(1)) {
            state.resources.push_back(more.state);
            gradient.resources.push_back(more.gradient);
            weight.resources.push_back(more.weight);
        }
        return record_update<op::Update>(index, state, gradient, weight, {.on_device = true});
    }
    const bool recast = op == Op::recast, stored = state_home == Tier::nvme;
    const swap::Object& weight_object = plan_.objects[chunk.weight];
    AssignedBuffer stage, gradient_staging, weight_staging;
    if (stored) {
        stage = acquire(Class::state_staging);
        impl_->read(chunk.state, stage);
        state.place = stage.place();
        state.is_home = false;
    }
    if (by) {
        const Located& momentum = by->momentum;
        gradient = {.place = momentum.place,
                    .resources = {momentum.resources.begin(), momentum.resources.end()},
                    .is_home = false};
    } else if (!recast && plan_.objects[chunk.gradient].home == Tier::nvme) {
        gradient_staging = acquire(Class::gradient_staging);
        impl_->read(chunk.gradient, gradient_staging);
        gradient.move_to(gradient_staging);
    }
    if (weight_object.home != Tier::host) {
        weight_staging = acquire(Class::weight_staging);
        if (plan_.state.split) impl_->load_weight(chunk.weight, weight_staging);
        weight.move_to(weight_staging);
    }
    const bool keeps = recast || (by && by->leaves_state);
    const auto flags = static_cast<uint8_t>((by ? cost::kTakesMomentum : 0) |
                                            (by && keeps ? cost::kLeavesState : 0));
    const Detail detail{.flags = flags, .overwrites = stage.resources()};
    if (recast)
        record<op::Recast>(chunk.layer, index,
                           {.state = state.located(), .weight = weight.written()}, detail);
    else if (op == Op::update)
        record_update<op::Update>(index, state, gradient, weight, detail);
    else
        record_update<op::UpdateSpeculative>(index, state, gradient, weight, detail);

    if (stored && !keeps) impl_->write(chunk.state, stage, op == Op::update);
    if (weight_object.home == Tier::nvme)
        impl_->write(chunk.weight, weight_staging, weight_object.versioned && op == Op::update);
    if (weight_object.home == Tier::device)
        impl_->copy(chunk.weight, Lane::h2d, weight_staging, Effect::read, Effect::write);
}

void Recorder::move(ObjectId stored, Class through, Move how) {
    const AssignedBuffer buffer = acquire(through);
    if (how != Move::out) impl_->read(stored, buffer);
    if (how == Move::in) return impl_->verify(stored, buffer, buffer.resources()[0]);
    impl_->seal(stored, buffer);
    impl_->write(stored, buffer, plan_.objects[stored].versioned);
}

void Recorder::commit(int64_t chunk) { impl_->end_speculation(chunk, Verb::commit); }
void Recorder::rollback(int64_t chunk) { impl_->end_speculation(chunk, Verb::rollback); }

void Recorder::mark_committed() {
    swap::Schedule& schedule = impl_->schedule;
    schedule.committed_writes = std::ssize(schedule.lanes[static_cast<size_t>(Lane::write)]);
}

void Recorder::mark_outcome() {
    const bool alone = plan_.partition.decides_alone();
    if (!alone) {
        FERRY_CHECK(impl_->arrivals.empty(), "a gradient is still under way");
        agree();
    }
    if (impl_->keep == Keep::bytes) return;
    const Lane lane = alone ? Lane::d2h : Lane::comm;
    const auto& tasks = impl_->schedule.lanes[static_cast<size_t>(lane)];
    FERRY_CHECK(!tasks.empty(), "a step without gradients has no outcome");
    impl_->schedule.outcome = {lane, static_cast<uint32_t>(tasks.size() - 1)};
    impl_->schedule.has_outcome = true;
}

swap::Schedule Recorder::finish() {
    FERRY_CHECK(impl_->saved_inputs.empty(), "a block input was saved and never fetched");
    FERRY_CHECK(impl_->prefetched_layer < 0, "weights were prefetched and never fetched");
    impl_->hazards.finish(impl_->schedule);
    swap::prove_acyclic(impl_->schedule);
    return std::move(impl_->schedule);
}

}  // namespace ferry::planner
