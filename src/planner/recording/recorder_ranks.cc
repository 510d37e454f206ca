// The exchanges of ranks as tasks: weights gathered before they are used, gradients cut, exchanged
// and added by their owners.
#include "planner/chunks.h"
#include "recorder_impl.h"

namespace ferry::planner {

// ---------------------------------------------------------------- weights

// The whole layer on the device, or the codes that it is decoded from. Each rank brings its own
// shards; NVMe's bytes are verified before they leave this rank, for the all-gather waits for every
// writer of the buffer.
Recorder::Weights Recorder::gather_shards(int64_t layer, Visit visit,
                                          BufferOf<Content::codes>& codes) {
    if (impl_->kept_in_host.contains(layer)) return gather_in_host(layer, codes);
    const bool resident = plan_.layer_plans[static_cast<size_t>(layer)].resident;
    Weights whole = acquire_for_weights(layer);
    if (!resident) impl_->fetch_chunks(*this, layer, whole, [](const Chunk&) { return true; });
    const Weights shards = resident ? impl_->resident(layer) : Weights();
    if (plan_.partition.codecs.weights.on())
        codes = gather_codes(layer, whole, shards);
    else
        gather(layer, whole, shards);
    if (visit == Visit::first) {
        if (plan_.partition.codecs.weights.on())
            keep_second_shards(layer, codes);
        else
            keep_second_shards(layer, whole);
    }
    return whole;
}

// This rank's part of what all ranks have gathered, to where its second shards live.
void Recorder::keep_second_shards(int64_t layer, const AssignedBuffer& gathered) {
    const std::vector<ObjectId>& objects =
        plan_.layer_plans[static_cast<size_t>(layer)].second_shards;
    if (objects.empty()) return;
    const auto runs = zero::second_shards(plan_.partition, plan_.layers[static_cast<size_t>(layer)],
                                          plan_.compute);
    for (size_t i = 0; i < runs.size(); ++i)
        impl_->send(*this, gathered, runs[i].first, objects[i], Class::second_staging,
                    runs[i].bytes);
    impl_->kept_in_host.insert(layer);
}

// The same bytes as all ranks have gathered before in this step, from the ranks of the host alone.
Recorder::Weights Recorder::gather_in_host(int64_t layer, BufferOf<Content::codes>& codes) {
    const model::Layer& shape = plan_.layers[static_cast<size_t>(layer)];
    const std::vector<ObjectId>& objects =
        plan_.layer_plans[static_cast<size_t>(layer)].second_shards;
    const auto runs = zero::second_shards(plan_.partition, shape, plan_.compute);
    const Detail detail{.bytes =
                            zero::gathered_in_host_bytes(plan_.partition, shape, plan_.compute)};
    Weights whole = acquire_for_weights(layer);
    const auto fetch_to = [&](const AssignedBuffer& all) {
        for (size_t i = 0; i < runs.size(); ++i)
            impl_->fetch(*this, objects[i], Class::second_staging, all, runs[i].first,
                         runs[i].bytes);
    };
    if (plan_.partition.codecs.weights.on()) {
        codes = acquire<Content::codes>();
        fetch_to(codes);
        record<op::GatherCodesInHost>(layer, -1, {.codes = codes}, detail);
    } else {
        fetch_to(whole);
        record<op::GatherWeightsInHost>(layer, -1, {.whole = whole}, detail);
    }
    return whole;
}

BufferOf<Content::codes> Recorder::gather_codes(int64_t layer, const Weights& whole,
                                                const Weights& shards) {
    const model::Layer& shape = plan_.layers[static_cast<size_t>(layer)];
    const bool resident = plan_.layer_plans[static_cast<size_t>(layer)].resident;
    auto codes = acquire<Content::codes>();
    if (resident)
        record<op::EncodeWeights>(layer, -1, {.codes = codes, .shards = shards});
    else
        record<op::EncodeWeights>(layer, -1, {.codes = codes, .whole = whole});
    record<op::GatherCodes>(layer, -1, {.codes = codes},
                            {.bytes = zero::gathered_bytes(plan_.partition, shape, plan_.compute)});
    return codes;
}

// As late as possible: the compute lane waits for the codes.
void Recorder::decode_weights(int64_t layer, const BufferOf<Content::codes>& codes,
                              Weights& whole) {
    if (!plan_.partition.codecs.weights.on()) return;
    record<op::DecodeWeights>(layer, -1, {.codes = codes, .whole = whole});
}

// Every rank's shards to their places in `whole`, from there or from this rank's `shards`.
void Recorder::gather(int64_t layer, Weights& whole, const Weights& shards) {
    const model::Layer& shape = plan_.layers[static_cast<size_t>(layer)];
    record<op::GatherWeights>(
        layer, -1, {.whole = whole, .shards = shards},
        {.bytes = zero::gathered_bytes(plan_.partition, shape, plan_.compute)});
}

Recorder::Weights Recorder::fetch_updated_weights(int64_t layer) {
    const bool trains = plan_.layers[static_cast<size_t>(layer)].trainable_elements > 0;
    if (!trains || !plan_.partition.shares_updates()) return fetch_weights(layer, Visit::first);
    if (plan_.layer_plans[static_cast<size_t>(layer)].resident) {
        Weights whole = impl_->resident(layer);
        gather(layer, whole, {});
        return whole;
    }
    Weights whole = acquire_for_weights(layer);
    impl_->fetch_chunks(*this, layer, whole, [](const Chunk& chunk) { return !chunk.replica; });
    gather(layer, whole, {});
    for (const Chunk& chunk : plan_.chunks_of(layer)) {
        if (chunk.replica)
            impl_->send(*this, whole, chunk.first * size_of(plan_.compute), chunk.weight,
                        Class::weight_staging);
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
    impl_->prefetched = gather_shards(layer, Visit::any, impl_->prefetched_codes);
    impl_->prefetched_layer = layer;
}

// ---------------------------------------------------------------- stages

namespace {

// What a rank keeps of a tied table, where it lies in a buffer of the whole layer or of this rank's
// resident weights. The rank at the other end keeps the same.
std::vector<zero::ByteRun> runs_of_table(const Plan& plan) {
    const zero::Partition& partition = plan.partition;
    const model::Layer& table = plan.layers[0];
    const int64_t width = size_of(plan.compute);
    if (!partition.sharding.weights) return {{0, table.elements * width}};
    std::vector<zero::ByteRun> runs;
    for (const model::Segment& segment : table.segments) {
        if (!segment.trainable) continue;
        const zero::Run shard = partition.shard(segment, partition.rank);
        const int64_t at = plan.layer_plans[0].resident
                               ? partition.weight_position(segment, shard.first)
                               : shard.first;
        runs.push_back({at * width, shard.count * width});
    }
    return runs;
}

}  // namespace

// Shards go as they are kept: what all have gathered may have been codes.
void Recorder::give_table(const Weights& table) {
    const bool shards = plan_.partition.sharding.weights;
    Weights own;
    if (shards && plan_.layer_plans[0].resident) {
        own = impl_->resident(0);
    } else if (shards) {
        own = acquire_for_weights(0);
        impl_->fetch_chunks(*this, 0, own, [](const Chunk&) { return true; });
    }
    const Weights& from = shards ? own : table;
    int64_t item = 0;
    for (const zero::ByteRun& run : runs_of_table(plan_)) {
        const LocatedOf<Content::bytes> at{{from.place(run.first), from.resources()}};
        record<op::PassOn>(
            0, item++, {.what = at},
            {.bytes = run.bytes, .flags = static_cast<uint8_t>(cost::StageLink::table)});
    }
}

void Recorder::take_table() {
    const bool resident = plan_.layer_plans[0].resident;
    const Weights own = resident ? impl_->resident(0) : acquire_for_weights(0);
    int64_t item = 0;
    for (const zero::ByteRun& run : runs_of_table(plan_)) {
        const WrittenOf<Content::bytes> at{{own.place(run.first), own.resources()}};
        record<op::TakeOver>(
            0, item++, {.what = at},
            {.bytes = run.bytes, .flags = static_cast<uint8_t>(cost::StageLink::table)});
    }
    if (resident) return;
    for (const Chunk& chunk : plan_.chunks_of(0))
        if (chunk.replica)
            impl_->send(*this, own, chunk.first * size_of(plan_.compute), chunk.weight,
                        Class::weight_staging);
}

// ---------------------------------------------------------------- gradients

// Starts the exchange of one turn: this rank's chunk, and of every other rank the run that lies
// alike in its shard. The ranks' chunks are alike, so all of them start the same exchanges.
void Recorder::exchange(int64_t index, const Gradient& gradient) {
    auto& free = impl_->free[static_cast<size_t>(Class::parts)];
    while (free.size() < 2 && !(impl_->arrivals.empty() && impl_->arrivals_in_host.empty())) {
        if (impl_->arrivals.empty())
            combine_oldest();
        else
            receive_oldest();
    }
    const Chunk& chunk = plan_.chunks[static_cast<size_t>(index)];
    const zero::Partition& partition = plan_.partition;
    const int64_t part = partition.part_bytes(chunk.count, plan_.wire);
    auto out = acquire<Content::parts>();
    record<op::Cut>(chunk.layer, index, {.gradient = gradient, .parts = out});
    auto in = acquire<Content::arrived>();
    if (!partition.two_levels()) {
        record<op::Exchange>(chunk.layer, index, {.to_ranks = out, .from_ranks = in},
                             {.bytes = zero::exchanged_bytes(partition, part)});
        impl_->arrivals.push_back({index, std::move(in)});
        return;
    }
    record<op::ExchangeInHost>(chunk.layer, index, {.to_ranks = out, .from_ranks = in},
                               {.bytes = zero::exchanged_in_host_bytes(partition, part)});
    out.release();
    impl_->arrivals_in_host.push_back({index, std::move(in)});
    // While this turn is on its way in the host, the one before is combined.
    if (impl_->arrivals_in_host.size() > 1) combine_oldest();
}

// What the ranks of the host have for those that stand where this one does: added, coded once more,
// and on its way to them.
void Recorder::combine_oldest() {
    Impl::Arrival arrival = std::move(impl_->arrivals_in_host.front());
    impl_->arrivals_in_host.pop_front();
    while (impl_->free[static_cast<size_t>(Class::parts)].empty() && !impl_->arrivals.empty())
        receive_oldest();
    const Chunk& chunk = plan_.chunks[static_cast<size_t>(arrival.chunk)];
    auto combined = acquire<Content::parts>();
    record<op::Combine>(chunk.layer, arrival.chunk, {.parts = arrival.parts, .combined = combined});
    arrival.parts.release();
    auto in = acquire<Content::arrived>();
    const int64_t part = plan_.partition.part_bytes(chunk.count, plan_.wire);
    record<op::Exchange>(chunk.layer, arrival.chunk, {.to_ranks = combined, .from_ranks = in},
                         {.bytes = zero::exchanged_across_bytes(plan_.partition, part),
                          .flags = cost::kAcrossHosts});
    impl_->arrivals.push_back({arrival.chunk, std::move(in)});
}

void Recorder::receive_gradient() {
    while (!impl_->arrivals.empty()) receive_oldest();
}

void Recorder::receive_oldest() {
    Impl::Arrival arrival = std::move(impl_->arrivals.front());
    impl_->arrivals.pop_front();
    const Chunk& chunk = plan_.chunks[static_cast<size_t>(arrival.chunk)];
    const auto wire = acquire<Content::wire>();
    const auto sum = impl_->rounded(chunk, wire);
    record<op::Sum>(
        chunk.layer, arrival.chunk,
        {.parts = arrival.parts, .wire = sum.written(), .leaves = leaves_in(wire, chunk)});
    arrival.parts.release();
    send_leaves(chunk, chunk.count, wire);
    if (plan_.updates_on_device(chunk)) return;
    if (plan_.partition.sharding.state)
        return impl_->send(*this, wire, 0, chunk.gradient, Class::gradient_staging);
    gather_gradient(arrival.chunk, wire);
}

// Where every rank updates everything, the others' chunks of the turn arrive as well.
void Recorder::gather_gradient(int64_t index, const BufferOf<Content::wire>& wire) {
    const Chunk& mine = plan_.chunks[static_cast<size_t>(index)];
    const int64_t bytes = mine.count * size_of(plan_.wire);
    BufferOf<Content::wire> all(acquire(Class::parts));
    record<op::GatherGradient>(mine.layer, index, {.mine = wire, .all = all},
                               {.bytes = zero::exchanged_bytes(plan_.partition, bytes)});
    const model::Segment& segment =
        zero::segment_of(plan_.layers[static_cast<size_t>(mine.layer)], mine.first);
    const int64_t shard = plan_.partition.shard_elements(segment);
    for (const Chunk& chunk : plan_.chunks_of(mine.layer)) {
        const int64_t apart = (chunk.owner - mine.owner) * shard;
        if (chunk.first - mine.first == apart)
            impl_->send(*this, all, chunk.owner * bytes, chunk.gradient, Class::gradient_staging);
    }
}

// ---------------------------------------------------------------- outcome

// A task over the step's part of the host arena; the code that asks the ranks knows the place.
void Recorder::agree() {
    const std::array<uint32_t, 1> leaves{plan_.leaves_resource}, report{plan_.report_resource};
    record<op::Agree>(-1, -1,
                      {.leaves = LocatedOf<Content::leaves>{{.resources = leaves}},
                       .report = LocatedOf<Content::report>{{.resources = report}}});
}

}  // namespace ferry::planner
