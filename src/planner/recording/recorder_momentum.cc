// The exchange of momentum as tasks (zero/feedback.h): a rank's gradient is kept until the outcome
// is agreed; then turns are compressed, exchanged, merged by their owner, gathered and averaged.
#include <deque>
#include <utility>

#include "recorder_impl.h"

namespace ferry::planner {

struct Recorder::Turn {
    int64_t chunk = 0;
    ChunkPart<Content::feedback> feedback{};
    ChunkPart<Content::kept> gradient{};
    // They came here from NVMe.
    AssignedBuffer staging{}, gradient_staging{};
    // What this rank sends and, later, what the owners have merged; what comes in between. Where
    // ranks exchange it.
    BufferOf<Content::parts> parts{};
    BufferOf<Content::arrived> received{};
    bool merged = false;
};

// Codes on their way between the team, which makes and reads them, and the ranks' exchange: copied
// where the two do not have one memory.
template <Content content>
BufferOf<content> Recorder::codes_of_team() {
    return BufferOf<content>(acquire(plan_.stages_codes() ? Class::codes_staging : Class::parts));
}

void Recorder::copy_codes(const Chunk& chunk, Lane lane, const AssignedBuffer& from,
                          const AssignedBuffer& to, const zero::ByteRun& run) {
    Task copy{.verb = Verb::copy,
              .lane = lane,
              .layer = static_cast<int32_t>(chunk.layer),
              .item = static_cast<int32_t>(&chunk - plan_.chunks.data()),
              .bytes = run.bytes};
    copy.places[0] = from.place(run.first);
    copy.places[1] = to.place(run.first);
    impl_->emit(copy, {{from.resources()[0], Effect::read}, {to.resources()[0], Effect::write}});
}

// What the team has made, to where it is exchanged.
BufferOf<Content::parts> Recorder::codes_to_ranks(const Chunk& chunk,
                                                  BufferOf<Content::parts> made) {
    if (!plan_.stages_codes()) return made;
    auto parts = acquire<Content::parts>();
    copy_codes(chunk, Lane::h2d, made, parts, {0, bytes_of_turn(chunk)});
    return parts;
}

// What has arrived, to where the team reads it.
template <Content content>
BufferOf<content> Recorder::codes_from_ranks(const Chunk& chunk, BufferOf<content> arrived) {
    if (!plan_.stages_codes()) return arrived;
    auto read = codes_of_team<content>();
    copy_codes(chunk, Lane::d2h, arrived, read, {0, bytes_of_turn(chunk)});
    return read;
}

int64_t Recorder::bytes_of_turn(const Chunk& chunk) const {
    return plan_.partition.ranks * plan_.partition.codecs.momentum.bytes(chunk.count);
}

void Recorder::keep_gradient(int64_t layer, const Gradient& gradient) {
    const LayerPlan& where = plan_.layer_plans[static_cast<size_t>(layer)];
    for (int64_t c = where.first_chunk; c < where.first_chunk + where.chunks; ++c) {
        const Chunk& chunk = plan_.chunks[static_cast<size_t>(c)];
        if (!chunk.trainable || !plan_.owns(chunk)) continue;
        auto parts = acquire<Content::parts>();
        const auto wire = acquire<Content::wire>();
        const WrittenOf<Content::leaves> leaves{{leaves_in(wire, chunk).place, wire.resources()}};
        record<op::Keep>(layer, c, {.gradient = gradient, .parts = parts, .leaves = leaves});
        impl_->send(*this, parts, 0, chunk.kept, Class::feedback_staging);
        send_leaves(chunk, chunk.count, wire);
    }
}

Recorder::Turn Recorder::fetch_turn(int64_t index) {
    const Chunk& chunk = plan_.chunks[static_cast<size_t>(index)];
    Turn turn{.chunk = index,
              .feedback = ChunkPart<Content::feedback>::of(chunk.feedback),
              .gradient = ChunkPart<Content::kept>::of(chunk.kept)};
    if (plan_.objects[chunk.feedback].home == Tier::nvme) {
        turn.staging = acquire(Class::feedback_staging);
        impl_->read(chunk.feedback, turn.staging);
        turn.feedback.move_to(turn.staging);
    }
    if (plan_.objects[chunk.kept].home == Tier::nvme) {
        turn.gradient_staging = acquire(Class::feedback_staging);
        impl_->read(chunk.kept, turn.gradient_staging);
        turn.gradient.move_to(turn.gradient_staging);
    }
    return turn;
}

Recorder::Turn Recorder::compress(int64_t index) {
    const Chunk& chunk = plan_.chunks[static_cast<size_t>(index)];
    Turn turn = fetch_turn(index);
    auto made = codes_of_team<Content::parts>();
    record<op::Compress>(
        chunk.layer, index,
        {.gradient = turn.gradient.located(), .feedback = turn.feedback.written(), .parts = made});
    turn.gradient_staging.release();
    turn.parts = codes_to_ranks(chunk, std::move(made));
    turn.received = acquire<Content::arrived>();
    const int64_t bytes = plan_.partition.codecs.momentum.bytes(chunk.count);
    record<op::ExchangeMomentum>(chunk.layer, index,
                                 {.to_ranks = turn.parts, .from_ranks = turn.received},
                                 {.bytes = zero::exchanged_bytes(plan_.partition, bytes)});
    return turn;
}

void Recorder::merge(Turn& turn) {
    if (std::exchange(turn.merged, true)) return;
    const Chunk& chunk = plan_.chunks[static_cast<size_t>(turn.chunk)];
    const int64_t bytes = plan_.partition.codecs.momentum.bytes(chunk.count);
    auto received = codes_from_ranks(chunk, std::move(turn.received));
    const auto merge_into = [&](BufferOf<Content::parts>& merged) {
        record<op::Merge>(
            chunk.layer, turn.chunk,
            {.parts = received, .feedback = turn.feedback.written(), .merged = merged});
    };
    if (plan_.stages_codes()) {
        auto merged = codes_of_team<Content::parts>();
        merge_into(merged);
        copy_codes(chunk, Lane::h2d, merged, turn.parts, {plan_.partition.rank * bytes, bytes});
    } else {
        merge_into(turn.parts);
    }
    received.release();
    record<op::GatherMomentum>(chunk.layer, turn.chunk, {.merged = turn.parts},
                               {.bytes = zero::exchanged_bytes(plan_.partition, bytes)});
}

void Recorder::average(Turn turn) {
    const Chunk& mine = plan_.chunks[static_cast<size_t>(turn.chunk)];
    auto merged = codes_from_ranks(mine, std::move(turn.parts));
    record<op::Average>(mine.layer, turn.chunk,
                        {.merged = merged, .feedback = turn.feedback.written()});
    merged.release();
    update_turn(turn, false);
}

// Of the turn's chunks, those that this rank updates: by the momentum that all have now, or by what
// it moved alone.
void Recorder::update_turn(Turn& turn, bool alone) {
    const Chunk& mine = plan_.chunks[static_cast<size_t>(turn.chunk)];
    const model::Segment& segment =
        zero::segment_of(plan_.layers[static_cast<size_t>(mine.layer)], mine.first);
    const int64_t shard = plan_.partition.shard_elements(segment);
    // Where those arrays begin, in floats.
    const int64_t from = alone ? (2 * plan_.partition.ranks + 1) * mine.count : 0;
    const LayerPlan& where = plan_.layer_plans[static_cast<size_t>(mine.layer)];
    for (int64_t c = where.first_chunk; c < where.first_chunk + where.chunks; ++c) {
        const Chunk& chunk = plan_.chunks[static_cast<size_t>(c)];
        const bool of_turn = chunk.first - mine.first == (chunk.owner - mine.owner) * shard;
        if (!of_turn || !chunk.trainable) continue;
        ByMomentum by{{turn.feedback.place, turn.feedback.resources}, alone};
        by.momentum.place.offset += (from + chunk.owner * mine.count) * 4;
        update_chunk(c, Op::update, &by);
    }
    if (turn.staging.resources().empty()) return;
    impl_->write(mine.feedback, turn.staging, false);
}

void Recorder::update_alone(int64_t layer) {
    const LayerPlan& where = plan_.layer_plans[static_cast<size_t>(layer)];
    for (int64_t c = where.first_chunk; c < where.first_chunk + where.chunks; ++c) {
        const Chunk& chunk = plan_.chunks[static_cast<size_t>(c)];
        if (!chunk.trainable || !plan_.owns(chunk)) continue;
        Turn turn = fetch_turn(c);
        record<op::MoveAlone>(
            chunk.layer, c,
            {.gradient = turn.gradient.located(), .feedback = turn.feedback.written()});
        turn.gradient_staging.release();
        update_turn(turn, true);
    }
}

// One turn is compressed while the one before is on its way, and averaged while the next one is on
// its way back. The order of the exchanges depends on nothing but the number of turns.
void Recorder::update_by_momentum(int64_t layer) {
    const LayerPlan& where = plan_.layer_plans[static_cast<size_t>(layer)];
    std::deque<Turn> turns;
    for (int64_t c = where.first_chunk; c < where.first_chunk + where.chunks; ++c) {
        const Chunk& chunk = plan_.chunks[static_cast<size_t>(c)];
        if (!chunk.trainable || !plan_.owns(chunk)) continue;
        if (std::ssize(turns) == kTurnsAtOnce) {
            merge(turns.back());
            average(std::move(turns.front()));
            turns.pop_front();
        }
        turns.push_back(compress(c));
        if (turns.size() > 1) merge(turns.front());
    }
    if (!turns.empty()) merge(turns.back());
    for (Turn& turn : turns) average(std::move(turn));
}

}  // namespace ferry::planner
