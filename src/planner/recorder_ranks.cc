// What the ranks say to each other, in tasks: weights gathered before they are used, gradients cut,
// exchanged and added by their owners.
#include "chunks.h"
#include "recorder_impl.h"

namespace ferry::planner {

// ---------------------------------------------------------------- weights

// The whole layer on the device. Each rank brings its own shards; NVMe's bytes are verified before
// they leave this rank, for the all-gather waits for every writer of the buffer.
SlotLease Recorder::gather_shards(int64_t layer) {
    const bool resident = plan_.layer_plans[static_cast<size_t>(layer)].resident;
    SlotLease whole = acquire_for_weights(layer);
    if (!resident) impl_->fetch_chunks(*this, layer, whole, [](const Chunk&) { return true; });
    const SlotLease shards = resident ? impl_->resident(layer) : SlotLease();
    gather(layer, whole, resident ? &shards : nullptr);
    return whole;
}

// Every rank's shards to their places in `whole`, from there or from this rank's `shards`.
void Recorder::gather(int64_t layer, const SlotLease& whole, const SlotLease* shards) {
    const model::Layer& shape = plan_.layers[static_cast<size_t>(layer)];
    Task task{.verb = Verb::kernel,
              .lane = Lane::comm,
              .op = static_cast<uint8_t>(Op::gather_weights),
              .layer = static_cast<int32_t>(layer),
              .bytes = zero::gathered_bytes(plan_.partition, shape, plan_.compute)};
    task.places[0] = whole.place();
    std::vector<Use> uses;
    for (const uint32_t resource : whole.resources()) uses.push_back({resource, Effect::write});
    if (shards) {
        task.places[1] = shards->place();
        for (const uint32_t resource : shards->resources())
            uses.push_back({resource, Effect::read});
    }
    impl_->emit(task, uses);
}

SlotLease Recorder::fetch_updated_weights(int64_t layer) {
    const bool trains = plan_.layers[static_cast<size_t>(layer)].trainable_elements > 0;
    if (!trains || !plan_.partition.shares_updates()) return fetch_weights(layer);
    if (plan_.layer_plans[static_cast<size_t>(layer)].resident) {
        SlotLease whole = impl_->resident(layer);
        gather(layer, whole, nullptr);
        return whole;
    }
    SlotLease whole = acquire_for_weights(layer);
    impl_->fetch_chunks(*this, layer, whole, [](const Chunk& chunk) { return !chunk.replica; });
    gather(layer, whole, nullptr);
    for (const Chunk& chunk : plan_.chunks_of(layer)) {
        if (chunk.replica)
            impl_->send(*this, whole, chunk.first * size_of(plan_.compute), chunk.weight,
                        Class::weight_piece);
    }
    return whole;
}

void Recorder::share_updates(int64_t layer) {
    if (plan_.partition.shares_updates()) fetch_updated_weights(layer);
}

void Recorder::prefetch_weights(int64_t layer) {
    if (!plan_.partition.sharding.weights) return;
    const bool edge = is_edge(plan_.layers[static_cast<size_t>(layer)]);
    const Class buffers = edge ? Class::edge_weights : Class::block_weights;
    if (impl_->free[static_cast<size_t>(buffers)].empty()) return;
    impl_->prefetched = fetch_weights(layer);
    impl_->prefetched_layer = layer;
}

// ---------------------------------------------------------------- gradients

// Starts the exchange of one turn: this rank's chunk, and of every other rank the run that lies
// alike in its shard. The ranks' chunks are alike, so all of them start the same exchanges.
void Recorder::exchange(int64_t index, const SlotLease& gradient) {
    auto& free = impl_->free[static_cast<size_t>(Class::pieces)];
    while (free.size() < 2 && !impl_->arrivals.empty()) receive_oldest();
    const Chunk& chunk = plan_.chunks[static_cast<size_t>(index)];
    const SlotLease out = acquire(Class::pieces);
    Task cut = impl_->kernel(Lane::compute, Op::cut, index);
    cut.places = {gradient.place(), out.place()};
    impl_->emit(cut,
                {{gradient.resources()[0], Effect::read}, {out.resources()[0], Effect::write}});
    SlotLease in = acquire(Class::pieces);
    Task exchange = impl_->kernel(Lane::comm, Op::exchange, index);
    exchange.bytes = zero::exchanged_bytes(plan_.partition, chunk.count * size_of(plan_.wire));
    exchange.places = {out.place(), in.place()};
    impl_->emit(exchange, {{out.resources()[0], Effect::read}, {in.resources()[0], Effect::write}});
    impl_->arrivals.push_back({index, std::move(in)});
}

void Recorder::receive_gradient() {
    while (!impl_->arrivals.empty()) receive_oldest();
}

void Recorder::receive_oldest() {
    Impl::Arrival arrival = std::move(impl_->arrivals.front());
    impl_->arrivals.pop_front();
    const Chunk& chunk = plan_.chunks[static_cast<size_t>(arrival.chunk)];
    const SlotLease wire = acquire(Class::wire);
    Task sum = impl_->kernel(Lane::compute, Op::sum, arrival.chunk);
    const bool stays = plan_.updates_on_device(chunk);  // as in send_gradient()
    sum.places = {arrival.pieces.place(), stays ? current(chunk.gradient) : wire.place(),
                  leaves_in(wire)};
    std::vector<Use> uses{{arrival.pieces.resources()[0], Effect::read},
                          {wire.resources()[0], Effect::write}};
    if (stays) uses.push_back({chunk.gradient, Effect::write});
    impl_->emit(sum, uses);
    arrival.pieces.release();
    send_leaves(chunk, wire);
    if (stays) return;
    if (plan_.partition.sharding.state)
        return impl_->send(*this, wire, 0, chunk.gradient, Class::gradient_piece);
    gather_gradient(arrival.chunk, wire);
}

// Where every rank updates everything, the others' chunks of the turn arrive as well.
void Recorder::gather_gradient(int64_t index, const SlotLease& wire) {
    const Chunk& mine = plan_.chunks[static_cast<size_t>(index)];
    const int64_t bytes = mine.count * size_of(plan_.wire);
    const SlotLease all = acquire(Class::pieces);
    Task task = impl_->kernel(Lane::comm, Op::gather_gradient, index);
    task.bytes = zero::exchanged_bytes(plan_.partition, bytes);
    task.places = {wire.place(), all.place()};
    impl_->emit(task, {{wire.resources()[0], Effect::read}, {all.resources()[0], Effect::write}});
    const model::Segment& segment =
        zero::segment_of(plan_.layers[static_cast<size_t>(mine.layer)], mine.first);
    const int64_t shard = plan_.partition.shard_elements(segment);
    for (const Chunk& chunk : plan_.chunks_of(mine.layer)) {
        const int64_t apart = (chunk.owner - mine.owner) * shard;
        if (chunk.first - mine.first == apart)
            impl_->send(*this, all, chunk.owner * bytes, chunk.gradient, Class::gradient_piece);
    }
}

// ---------------------------------------------------------------- outcome

void Recorder::agree() {
    Task task{.verb = Verb::kernel, .lane = Lane::comm, .op = static_cast<uint8_t>(Op::agree)};
    impl_->emit(task,
                {{plan_.leaves_resource, Effect::read}, {plan_.report_resource, Effect::read}});
}

}  // namespace ferry::planner
