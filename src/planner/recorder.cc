#include <utility>

#include "chunks.h"
#include "recorder_impl.h"

namespace ferry::planner {

const char* name_of(Op op) {
    switch (op) {
        case Op::load_tokens:
            return "load tokens";
        case Op::load_evaluation:
            return "load held-back tokens";
        case Op::embed:
            return "embed";
        case Op::forward:
            return "forward";
        case Op::head:
            return "head and loss";
        case Op::head_loss:
            return "loss";
        case Op::backward:
            return "backward";
        case Op::embed_backward:
            return "embed backward";
        case Op::zero:
            return "zero";
        case Op::add:
            return "add";
        case Op::round:
            return "round and norm";
        case Op::update:
            return "update";
        case Op::update_speculative:
            return "update (speculative)";
        case Op::recast:
            return "recast";
        case Op::cut:
            return "cut for the ranks";
        case Op::sum:
            return "sum, round and norm";
        case Op::gather_weights:
            return "gather weights";
        case Op::exchange:
            return "exchange gradients";
        case Op::gather_gradient:
            return "gather gradients";
        case Op::agree:
            return "agree";
    }
    bug("unknown operation");
}

// ---------------------------------------------------------------- SlotLease

SlotLease::SlotLease(SlotLease&& other) noexcept { *this = std::move(other); }

SlotLease& SlotLease::operator=(SlotLease&& other) noexcept {
    release();
    recorder_ = std::exchange(other.recorder_, nullptr);
    class_ = other.class_;
    index_ = other.index_;
    place_ = other.place_;
    resources_ = std::move(other.resources_);
    return *this;
}

Place SlotLease::place(int64_t offset) const {
    Place moved = place_;
    moved.offset += offset;
    return moved;
}

// ---------------------------------------------------------------- Recorder

Recorder::Recorder(const Plan& plan, std::string name, Keep keep)
    : plan_(plan), impl_(std::make_unique<Impl>(plan, std::move(name), keep)) {}
Recorder::~Recorder() = default;

const std::array<int64_t, swap::kLanes>& Recorder::bytes() const { return impl_->lane_bytes; }

void SlotLease::release() {
    if (recorder_ && index_ >= 0) {
        recorder_->impl_->free[static_cast<size_t>(class_)].push_back(index_);
    }
    recorder_ = nullptr;
    index_ = -1;
}

SlotLease Recorder::acquire(Class buffers) {
    const Buffers& b = plan_.buffers[static_cast<size_t>(buffers)];
    auto& free = impl_->free[static_cast<size_t>(buffers)];
    FERRY_CHECK(!free.empty(), "the plan has too few buffers: " + b.name);
    SlotLease lease;
    lease.recorder_ = this;
    lease.class_ = buffers;
    lease.index_ = free.front();
    free.pop_front();
    const auto kind = b.tier == Tier::device ? Place::Kind::device : Place::Kind::host;
    lease.place_ = {kind, swap::kNoObject, b.offset + lease.index_ * b.bytes};
    lease.resources_ = {b.first_resource + static_cast<uint32_t>(lease.index_)};
    return lease;
}

SlotLease Recorder::fetch_weights(int64_t layer) {
    if (impl_->prefetched_layer >= 0) {
        FERRY_CHECK(impl_->prefetched_layer == layer, "other weights were prefetched");
        impl_->prefetched_layer = -1;
        return std::move(impl_->prefetched);
    }
    if (plan_.partition.sharding.weights) return gather_shards(layer);
    if (plan_.layer_plans[static_cast<size_t>(layer)].resident) return impl_->resident(layer);
    SlotLease lease = acquire_for_weights(layer);
    impl_->fetch_chunks(*this, layer, lease, [](const Chunk&) { return true; });
    return lease;
}

SlotLease Recorder::acquire_for_weights(int64_t layer) {
    const bool edge = is_edge(plan_.layers[static_cast<size_t>(layer)]);
    return acquire(edge ? Class::edge_weights : Class::block_weights);
}

SlotLease Recorder::fetch_gradient(int64_t layer, bool first_group, bool of_table) {
    const model::Layer& shape = plan_.layers[static_cast<size_t>(layer)];
    SlotLease lease = acquire(is_edge(shape) ? Class::edge_gradient : Class::block_gradient);
    if (first_group) {
        compute(Op::zero, layer, 0, {{&lease, true}}, {.bytes = shape.trainable_elements * 4});
        return lease;
    }
    for (const AccumulatorSpill& spill : plan_.spills_of(layer)) {
        impl_->bring(*this, of_table ? spill.table : spill.object, Class::spill_piece, lease,
                     spill.first * 4);
    }
    return lease;
}

void Recorder::spill_gradient(int64_t layer, const SlotLease& gradient, bool of_table) {
    for (const AccumulatorSpill& spill : plan_.spills_of(layer)) {
        impl_->send(*this, gradient, spill.first * 4, of_table ? spill.table : spill.object,
                    Class::spill_piece);
    }
}

void Recorder::send_gradient(int64_t layer, const SlotLease& gradient) {
    const LayerPlan& where = plan_.layer_plans[static_cast<size_t>(layer)];
    for (int64_t c = where.first_chunk; c < where.first_chunk + where.chunks; ++c) {
        const Chunk& chunk = plan_.chunks[static_cast<size_t>(c)];
        if (!chunk.trainable || !plan_.owns(chunk)) continue;
        if (!plan_.partition.alone()) {
            exchange(c, gradient);
            continue;
        }
        const SlotLease wire = acquire(Class::wire);
        // What the device updates stays there; of the wire buffer only the leaves are used.
        const bool stays = plan_.updates_on_device(chunk);
        Task round = impl_->kernel(Lane::compute, Op::round, c);
        round.places = {gradient.place(chunk.first * 4),
                        stays ? current(chunk.gradient) : wire.place(), leaves_in(wire)};
        std::vector<Use> uses{{gradient.resources()[0], Effect::read},
                              {wire.resources()[0], Effect::write}};
        if (stays) uses.push_back({chunk.gradient, Effect::write});
        impl_->emit(round, uses);
        if (!stays) impl_->send(*this, wire, 0, chunk.gradient, Class::gradient_piece);
        send_leaves(chunk, wire);
    }
}

// A wire buffer holds the norm leaves behind a chunk's values.
Place Recorder::leaves_in(const SlotLease& wire) const {
    return wire.place(plan_.chunk_elements * size_of(plan_.wire));
}

void Recorder::send_leaves(const Chunk& chunk, const SlotLease& wire) {
    Task norms{.verb = Verb::copy,
               .lane = Lane::d2h,
               .layer = static_cast<int32_t>(chunk.layer),
               .item = static_cast<int32_t>(&chunk - plan_.chunks.data()),
               .bytes = chunk.count / kLeafElements * 4};
    norms.places[0] = leaves_in(wire);
    norms.places[1] = {Place::Kind::host, swap::kNoObject,
                       plan_.leaves_offset + chunk.first_leaf * 4};
    impl_->emit(norms,
                {{wire.resources()[0], Effect::read}, {plan_.leaves_resource, Effect::join}});
}

SlotLease Recorder::load_tokens(int64_t micro_batch, bool evaluation) {
    const SlotLease staging = acquire(Class::host_tokens);
    const Op op = evaluation ? Op::load_evaluation : Op::load_tokens;
    Task load{.verb = Verb::kernel,
              .lane = Lane::team,
              .op = static_cast<uint8_t>(op),
              .item = static_cast<int32_t>(micro_batch)};
    load.places[0] = staging.place();
    impl_->emit(load, {{staging.resources()[0], Effect::write}});
    SlotLease tokens = acquire(Class::tokens);
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

void Recorder::send_report(const SlotLease& report) {
    Task copy{.verb = Verb::copy, .lane = Lane::d2h, .bytes = plan_.report_bytes()};
    copy.places[0] = report.place();
    copy.places[1] = {Place::Kind::host, swap::kNoObject, plan_.report_offset};
    impl_->emit(copy,
                {{report.resources()[0], Effect::read}, {plan_.report_resource, Effect::write}});
}

void Recorder::save_input(int64_t layer, int64_t i, SlotLease x) {
    const int64_t at = layer * plan_.group_size() + i;
    const ObjectId object = plan_.inputs[static_cast<size_t>(at)];
    if (object == swap::kNoObject) {
        impl_->saved_inputs[at] = std::move(x);
    } else {
        impl_->send(*this, x, 0, object, Class::input_piece);
    }
}

SlotLease Recorder::fetch_input(int64_t layer, int64_t i) {
    const int64_t at = layer * plan_.group_size() + i;
    if (auto kept = impl_->saved_inputs.extract(at)) return std::move(kept.mapped());
    SlotLease x = acquire(Class::activation);
    impl_->bring(*this, plan_.inputs[static_cast<size_t>(at)], Class::input_piece, x, 0);
    return x;
}

void Recorder::prefetch_input(int64_t layer, int64_t i) {
    impl_->saved_inputs.emplace(layer * plan_.group_size() + i, fetch_input(layer, i));
}

void Recorder::compute(Op op, int64_t layer, int64_t item, std::initializer_list<Operand> operands,
                       const Detail& detail) {
    Task task{.verb = Verb::kernel,
              .lane = Lane::compute,
              .op = static_cast<uint8_t>(op),
              .flags = detail.flags,
              .layer = static_cast<int32_t>(layer),
              .item = static_cast<int32_t>(item),
              .bytes = detail.bytes};
    std::vector<Use> uses;
    size_t position = 0;
    for (const Operand& operand : operands) {
        if (operand.lease) {
            task.places[position] = operand.lease->place();
            for (const uint32_t resource : operand.lease->resources()) {
                uses.push_back({resource, operand.writes ? Effect::write : Effect::read});
            }
        }
        ++position;
    }
    impl_->emit(task, uses);
}

void Recorder::update_chunk(int64_t index, Op op) {
    const Chunk& chunk = plan_.chunks[static_cast<size_t>(index)];
    if (plan_.updates_on_device(chunk)) return impl_->update_on_device(index, op);
    const bool recast = op == Op::recast;
    Task task = impl_->kernel(Lane::team, op, index);
    std::vector<Use> uses;
    SlotLease stage, gradient, weight;

    const bool stored = plan_.objects[chunk.state].home == Tier::nvme;
    Place state_in = current(chunk.state), state_out = state_in;
    if (stored) {
        stage = acquire(Class::stage);
        impl_->read(chunk.state, stage);
        uses.push_back({stage.resources()[0], Effect::write});
        state_in = state_out = stage.place();
    } else if (op == Op::update_speculative) {
        state_out = {Place::Kind::fresh, chunk.state, 0};
    }
    uses.push_back({chunk.state, recast ? Effect::read : Effect::write});

    Place gradient_at = current(chunk.gradient);
    if (!recast && plan_.objects[chunk.gradient].home == Tier::nvme) {
        gradient = acquire(Class::gradient_piece);
        impl_->read(chunk.gradient, gradient);
        uses.push_back({gradient.resources()[0], Effect::read});
        gradient_at = gradient.place();
    }
    if (!recast) uses.push_back({chunk.gradient, Effect::read});

    Place weight_at = current(chunk.weight), weight_in{};
    const swap::Object& weight_object = plan_.objects[chunk.weight];
    if (weight_object.home != Tier::host) {
        weight = acquire(Class::weight_piece);
        if (plan_.state.split) impl_->load_weight(chunk.weight, weight);
        uses.push_back({weight.resources()[0], Effect::write});
        weight_at = weight.place();
    }
    if (plan_.state.split) {
        weight_in = weight_at;
        const bool in_memory = weight_object.home == Tier::host;
        if (in_memory && op == Op::update_speculative)
            weight_at = {Place::Kind::fresh, chunk.weight, 0};
    }
    uses.push_back({chunk.weight, Effect::write});

    task.places = recast ? std::array<Place, swap::kPlaces>{state_in, weight_at}
                         : std::array<Place, swap::kPlaces>{state_in, state_out, gradient_at,
                                                            weight_at, weight_in};
    impl_->emit(task, uses);

    if (stored && !recast) impl_->write(chunk.state, stage, op == Op::update);
    if (weight_object.home == Tier::nvme)
        impl_->write(chunk.weight, weight, weight_object.versioned && op == Op::update);
    if (weight_object.home == Tier::device)
        impl_->copy(chunk.weight, Lane::h2d, weight, Effect::read, Effect::write);
}

void Recorder::move(ObjectId stored, Class through, Move how) {
    const SlotLease buffer = acquire(through);
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
    const bool alone = plan_.partition.alone();
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
