#include <deque>
#include <utility>

#include "chunks.h"
#include "ferry/planner.h"
#include "hazards.h"

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
        case Op::update_bet:
            return "update (bet)";
        case Op::recast:
            return "recast";
    }
    bug("unknown operation");
}

using swap::Lane;
using swap::ObjectId;
using swap::Place;
using swap::Task;
using swap::Tier;
using swap::Verb;

namespace {

Place current(ObjectId object) { return {Place::Kind::current, object, 0}; }

bool is_edge(const model::Layer& layer) { return layer.kind != model::LayerKind::block; }

}  // namespace

// ---------------------------------------------------------------- Lease

Lease::Lease(Lease&& other) noexcept { *this = std::move(other); }

Lease& Lease::operator=(Lease&& other) noexcept {
    release();
    recorder_ = std::exchange(other.recorder_, nullptr);
    class_ = other.class_;
    index_ = other.index_;
    place_ = other.place_;
    resources_ = std::move(other.resources_);
    return *this;
}

Place Lease::place(int64_t offset) const {
    Place moved = place_;
    moved.offset += offset;
    return moved;
}

// ---------------------------------------------------------------- Recorder

struct Recorder::Impl {
    Impl(const Plan& the_plan, std::string name) : plan(the_plan), hazards(the_plan.resources) {
        schedule.name = std::move(name);
        for (size_t c = 0; c < kClasses; ++c) {
            for (int64_t i = 0; i < plan.buffers[c].count; ++i) free[c].push_back(i);
        }
    }

    void emit(Task task, std::span<const Use> uses) {
        auto& lane = schedule.lanes[static_cast<size_t>(task.lane)];
        task.index = static_cast<uint32_t>(lane.size());
        hazards.order(schedule, task, uses);
        lane.push_back(static_cast<uint32_t>(schedule.tasks.size()));
        schedule.tasks.push_back(task);
    }
    void emit(Task task, std::initializer_list<Use> uses) {
        emit(task, std::span<const Use>(uses.begin(), uses.size()));
    }

    // Brings an object to `target` on the device, through a piece of host memory when it is on
    // NVMe.
    void bring(Recorder& recorder, ObjectId object, Class piece_class, const Lease& target,
               int64_t offset) {
        const int64_t bytes = plan.objects[object].bytes;
        const uint32_t into = target.resources_[0];
        Task copy{.verb = Verb::copy, .lane = Lane::h2d, .object = object, .bytes = bytes};
        copy.places[1] = target.place(offset);
        if (plan.objects[object].home == Tier::host) {
            copy.places[0] = current(object);
            emit(copy, {{object, Access::read}, {into, Access::join}});
            return;
        }
        const Lease piece = recorder.acquire(piece_class);
        read(object, piece);
        copy.places[0] = piece.place();
        emit(copy, {{piece.resources_[0], Access::read}, {into, Access::join}});
        verify(object, piece, into);
    }

    void read(ObjectId object, const Lease& into) {
        Task task{.verb = Verb::read,
                  .lane = Lane::read,
                  .object = object,
                  .bytes = plan.objects[object].bytes};
        task.places[0] = into.place();
        emit(task, {{object, Access::read}, {into.resources_[0], Access::write}});
    }

    // The readers of `gated` wait for the check; the copy that fills it does not.
    void verify(ObjectId object, const Lease& piece, uint32_t gated) {
        if (!plan.verify) return;
        Task task{.verb = Verb::verify,
                  .lane = Lane::check,
                  .object = object,
                  .bytes = plan.objects[object].bytes};
        task.places[0] = piece.place();
        emit(task,
             {{object, Access::read}, {piece.resources_[0], Access::read}, {gated, Access::join}});
    }

    void write(ObjectId object, const Lease& from, bool settled) {
        Task task{.verb = Verb::write,
                  .lane = Lane::write,
                  .settled = settled,
                  .object = object,
                  .bytes = plan.objects[object].bytes};
        task.places[0] = from.place();
        emit(task, {{from.resources_[0], Access::read}, {object, Access::write}});
    }

    void seal(ObjectId object, const Lease& piece) {
        if (!plan.verify) return;
        Task task{.verb = Verb::seal,
                  .lane = Lane::check,
                  .object = object,
                  .bytes = plan.objects[object].bytes};
        task.places[0] = piece.place();
        emit(task, {{piece.resources_[0], Access::read}, {object, Access::write}});
    }

    // All of an object that lives on the device, to or from a piece of host memory.
    void copy(ObjectId object, Lane lane, const Lease& piece, Access of_piece, Access of_object) {
        Task copy{.verb = Verb::copy,
                  .lane = lane,
                  .object = object,
                  .bytes = plan.objects[object].bytes};
        const bool up = lane == Lane::h2d;
        copy.places[up ? 0 : 1] = piece.place();
        copy.places[up ? 1 : 0] = current(object);
        emit(copy, {{piece.resources_[0], of_piece}, {object, of_object}});
    }

    // The weights that an update of a split master starts from. Who updates checks them.
    void load_weight(ObjectId weight, const Lease& piece) {
        if (plan.objects[weight].home == Tier::nvme) return read(weight, piece);
        copy(weight, Lane::d2h, piece, Access::write, Access::read);
    }

    // Takes `bytes` at `offset` of a device buffer to the object's home.
    void send(Recorder& recorder, const Lease& from, int64_t offset, ObjectId object,
              Class piece_class) {
        const int64_t bytes = plan.objects[object].bytes;
        Task copy{.verb = Verb::copy, .lane = Lane::d2h, .object = object, .bytes = bytes};
        copy.places[0] = from.place(offset);
        if (plan.objects[object].home == Tier::host) {
            copy.places[1] = current(object);
            emit(copy, {{from.resources_[0], Access::read}, {object, Access::write}});
            return;
        }
        const Lease piece = recorder.acquire(piece_class);
        copy.places[1] = piece.place();
        emit(copy, {{from.resources_[0], Access::read}, {piece.resources_[0], Access::write}});
        seal(object, piece);
        write(object, piece, false);
    }

    // A bet's pending versions: of the state, and of the weight where that is half of the master.
    void settle(int64_t index, Verb verb) {
        const Chunk& chunk = plan.chunks[static_cast<size_t>(index)];
        for (const ObjectId object : {chunk.state, chunk.weight}) {
            if (object == chunk.weight && !plan.state.split) continue;
            emit({.verb = verb, .lane = Lane::write, .object = object}, {{object, Access::write}});
        }
    }

    const Plan& plan;
    swap::Schedule schedule;
    Hazards hazards;
    std::array<std::deque<int64_t>, kClasses> free;  // front: released longest ago
    std::map<int64_t, Lease> kept_inputs;
};

Recorder::Recorder(const Plan& plan, std::string name)
    : plan_(plan), impl_(std::make_unique<Impl>(plan, std::move(name))) {}
Recorder::~Recorder() = default;

void Lease::release() {
    if (recorder_ && index_ >= 0) {
        recorder_->impl_->free[static_cast<size_t>(class_)].push_back(index_);
    }
    recorder_ = nullptr;
    index_ = -1;
}

Lease Recorder::acquire(Class buffers) {
    const Buffers& b = plan_.buffers[static_cast<size_t>(buffers)];
    auto& free = impl_->free[static_cast<size_t>(buffers)];
    FERRY_CHECK(!free.empty(), "the plan has too few buffers: " + b.name);
    Lease lease;
    lease.recorder_ = this;
    lease.class_ = buffers;
    lease.index_ = free.front();
    free.pop_front();
    const auto kind = b.tier == Tier::device ? Place::Kind::device : Place::Kind::host;
    lease.place_ = {kind, swap::kNoObject, b.offset + lease.index_ * b.bytes};
    lease.resources_ = {b.first_resource + static_cast<uint32_t>(lease.index_)};
    return lease;
}

Lease Recorder::fetch_weights(int64_t layer) {
    const LayerPlan& where = plan_.layer_plans[static_cast<size_t>(layer)];
    if (where.resident) {
        Lease lease;
        lease.place_ = {Place::Kind::device, swap::kNoObject, where.device_offset};
        for (const Chunk& chunk : plan_.chunks_of(layer)) lease.resources_.push_back(chunk.weight);
        return lease;
    }
    const bool edge = is_edge(plan_.layers[static_cast<size_t>(layer)]);
    Lease lease = acquire(edge ? Class::edge_weights : Class::block_weights);
    for (const Chunk& chunk : plan_.chunks_of(layer)) {
        impl_->bring(*this, chunk.weight, Class::weight_piece, lease,
                     chunk.first * size_of(plan_.compute));
    }
    return lease;
}

Lease Recorder::fetch_gradient(int64_t layer, bool first_group, bool of_table) {
    const model::Layer& shape = plan_.layers[static_cast<size_t>(layer)];
    Lease lease = acquire(is_edge(shape) ? Class::edge_gradient : Class::block_gradient);
    if (first_group) {
        compute(Op::zero, layer, 0, {{&lease, true}}, shape.trainable_elements * 4);
        return lease;
    }
    for (const Chunk& chunk : plan_.chunks_of(layer)) {
        if (!chunk.trainable) continue;
        impl_->bring(*this, of_table ? chunk.park_table : chunk.park, Class::park_piece, lease,
                     chunk.first * 4);
    }
    return lease;
}

void Recorder::park_gradient(int64_t layer, const Lease& gradient, bool of_table) {
    for (const Chunk& chunk : plan_.chunks_of(layer)) {
        if (!chunk.trainable) continue;
        impl_->send(*this, gradient, chunk.first * 4, of_table ? chunk.park_table : chunk.park,
                    Class::park_piece);
    }
}

void Recorder::send_gradient(int64_t layer, const Lease& gradient) {
    const int64_t first = plan_.layer_plans[static_cast<size_t>(layer)].first_chunk;
    for (int64_t c = first; c < first + plan_.layer_plans[static_cast<size_t>(layer)].chunks; ++c) {
        const Chunk& chunk = plan_.chunks[static_cast<size_t>(c)];
        if (!chunk.trainable) continue;
        const Lease wire = acquire(Class::wire);
        const int64_t leaves_at = plan_.chunk_elements * size_of(plan_.wire);
        Task round{.verb = Verb::kernel,
                   .lane = Lane::compute,
                   .op = static_cast<uint8_t>(Op::round),
                   .layer = static_cast<int32_t>(layer),
                   .item = static_cast<int32_t>(c)};
        round.places = {gradient.place(chunk.first * 4), wire.place(), wire.place(leaves_at)};
        impl_->emit(
            round, {{gradient.resources()[0], Access::read}, {wire.resources()[0], Access::write}});
        impl_->send(*this, wire, 0, chunk.gradient, Class::gradient_piece);
        Task norms{.verb = Verb::copy,
                   .lane = Lane::d2h,
                   .layer = static_cast<int32_t>(layer),
                   .bytes = chunk.count / kLeafElements * 4};
        norms.places[0] = wire.place(leaves_at);
        norms.places[1] = {Place::Kind::host, swap::kNoObject,
                           plan_.leaves_offset + chunk.first_leaf * 4};
        impl_->emit(norms,
                    {{wire.resources()[0], Access::read}, {plan_.leaves_resource, Access::join}});
    }
}

Lease Recorder::load_tokens(int64_t micro_batch, bool evaluation) {
    const Lease staging = acquire(Class::host_tokens);
    const Op op = evaluation ? Op::load_evaluation : Op::load_tokens;
    Task load{.verb = Verb::kernel,
              .lane = Lane::team,
              .op = static_cast<uint8_t>(op),
              .item = static_cast<int32_t>(micro_batch)};
    load.places[0] = staging.place();
    impl_->emit(load, {{staging.resources()[0], Access::write}});
    Lease tokens = acquire(Class::tokens);
    Task copy{.verb = Verb::copy,
              .lane = Lane::h2d,
              .bytes = plan_.buffers[static_cast<size_t>(Class::tokens)].bytes};
    copy.places[0] = staging.place();
    copy.places[1] = tokens.place();
    impl_->emit(copy,
                {{staging.resources()[0], Access::read}, {tokens.resources()[0], Access::write}});
    return tokens;
}

void Recorder::send_report(const Lease& report) {
    Task copy{.verb = Verb::copy, .lane = Lane::d2h, .bytes = plan_.report_bytes()};
    copy.places[0] = report.place();
    copy.places[1] = {Place::Kind::host, swap::kNoObject, plan_.report_offset};
    impl_->emit(copy,
                {{report.resources()[0], Access::read}, {plan_.report_resource, Access::write}});
}

void Recorder::keep_input(int64_t layer, int64_t i, Lease x) {
    const int64_t at = layer * plan_.group_size() + i;
    const ObjectId object = plan_.inputs[static_cast<size_t>(at)];
    if (object == swap::kNoObject) {
        impl_->kept_inputs[at] = std::move(x);
    } else {
        impl_->send(*this, x, 0, object, Class::input_piece);
    }
}

Lease Recorder::recall_input(int64_t layer, int64_t i) {
    const int64_t at = layer * plan_.group_size() + i;
    const ObjectId object = plan_.inputs[static_cast<size_t>(at)];
    if (object == swap::kNoObject) {
        Lease kept = std::move(impl_->kept_inputs.at(at));
        impl_->kept_inputs.erase(at);
        return kept;
    }
    Lease x = acquire(Class::activation);
    impl_->bring(*this, object, Class::input_piece, x, 0);
    return x;
}

void Recorder::compute(Op op, int64_t layer, int64_t item, std::initializer_list<Operand> operands,
                       int64_t bytes) {
    Task task{.verb = Verb::kernel,
              .lane = Lane::compute,
              .op = static_cast<uint8_t>(op),
              .layer = static_cast<int32_t>(layer),
              .item = static_cast<int32_t>(item),
              .bytes = bytes};
    std::vector<Use> uses;
    size_t position = 0;
    for (const Operand& operand : operands) {
        if (operand.lease) {
            task.places[position] = operand.lease->place();
            for (const uint32_t resource : operand.lease->resources()) {
                uses.push_back({resource, operand.writes ? Access::write : Access::read});
            }
        }
        ++position;
    }
    impl_->emit(task, uses);
}

void Recorder::update_chunk(int64_t index, Op op) {
    const Chunk& chunk = plan_.chunks[static_cast<size_t>(index)];
    const bool recast = op == Op::recast;
    Task task{.verb = Verb::kernel,
              .lane = Lane::team,
              .op = static_cast<uint8_t>(op),
              .layer = static_cast<int32_t>(chunk.layer),
              .item = static_cast<int32_t>(index)};
    std::vector<Use> uses;
    Lease stage, gradient, weight;

    const bool stored = plan_.objects[chunk.state].home == Tier::nvme;
    Place state_in = current(chunk.state), state_out = state_in;
    if (stored) {
        stage = acquire(Class::stage);
        impl_->read(chunk.state, stage);
        uses.push_back({stage.resources()[0], Access::write});
        state_in = state_out = stage.place();
    } else if (op == Op::update_bet) {
        state_out = {Place::Kind::fresh, chunk.state, 0};
    }
    uses.push_back({chunk.state, recast ? Access::read : Access::write});

    Place gradient_at = current(chunk.gradient);
    if (!recast && plan_.objects[chunk.gradient].home == Tier::nvme) {
        gradient = acquire(Class::gradient_piece);
        impl_->read(chunk.gradient, gradient);
        uses.push_back({gradient.resources()[0], Access::read});
        gradient_at = gradient.place();
    }
    if (!recast) uses.push_back({chunk.gradient, Access::read});

    Place weight_at = current(chunk.weight), weight_in{};
    const swap::Object& weight_object = plan_.objects[chunk.weight];
    if (weight_object.home != Tier::host) {
        weight = acquire(Class::weight_piece);
        if (plan_.state.split) impl_->load_weight(chunk.weight, weight);
        uses.push_back({weight.resources()[0], Access::write});
        weight_at = weight.place();
    }
    if (plan_.state.split) {
        weight_in = weight_at;
        const bool in_memory = weight_object.home == Tier::host;
        if (in_memory && op == Op::update_bet) weight_at = {Place::Kind::fresh, chunk.weight, 0};
    }
    uses.push_back({chunk.weight, Access::write});

    task.places = recast ? std::array<Place, swap::kPlaces>{state_in, weight_at}
                         : std::array<Place, swap::kPlaces>{state_in, state_out, gradient_at,
                                                            weight_at, weight_in};
    impl_->emit(task, uses);

    if (stored && !recast) impl_->write(chunk.state, stage, op == Op::update);
    if (weight_object.home == Tier::nvme)
        impl_->write(chunk.weight, weight, weight_object.versioned && op == Op::update);
    if (weight_object.home == Tier::device)
        impl_->copy(chunk.weight, Lane::h2d, weight, Access::read, Access::write);
}

void Recorder::move(ObjectId stored, Class through, Move how) {
    const Lease buffer = acquire(through);
    if (how != Move::out) impl_->read(stored, buffer);
    if (how == Move::in) return impl_->verify(stored, buffer, buffer.resources()[0]);
    impl_->seal(stored, buffer);
    impl_->write(stored, buffer, plan_.objects[stored].versioned);
}

void Recorder::commit(int64_t chunk) { impl_->settle(chunk, Verb::commit); }
void Recorder::rollback(int64_t chunk) { impl_->settle(chunk, Verb::rollback); }

void Recorder::mark_verdict() {
    const auto& d2h = impl_->schedule.lanes[static_cast<size_t>(Lane::d2h)];
    FERRY_CHECK(!d2h.empty(), "a step without gradients has no verdict");
    impl_->schedule.verdict = {Lane::d2h, static_cast<uint32_t>(d2h.size() - 1)};
    impl_->schedule.has_verdict = true;
}

swap::Schedule Recorder::finish() {
    FERRY_CHECK(impl_->kept_inputs.empty(), "a block input was kept and never recalled");
    impl_->hazards.finish(impl_->schedule);
    swap::prove_acyclic(impl_->schedule);
    return std::move(impl_->schedule);
}

}  // namespace ferry::planner
