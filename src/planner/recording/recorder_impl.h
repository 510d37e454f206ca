// A recorder's state while it records, and the tasks that its methods are made of.
#pragma once

#include <deque>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "hazards.h"
#include "planner/task_facts.h"
#include "planner/work.h"
#include "recorder.h"

namespace ferry::planner {

using swap::Lane;
using swap::ObjectId;
using swap::OperandPlace;
using swap::Task;
using swap::Tier;
using swap::Verb;

inline OperandPlace current(ObjectId object) { return {OperandPlace::Kind::current, object, 0}; }

inline bool is_edge(const model::Layer& layer) { return layer.kind != model::LayerKind::block; }

// An operand: an object in the tier where it lives, or the buffer that it was copied to.
template <Content content>
struct Recorder::ChunkPart {
    OperandPlace place{};
    std::vector<uint32_t> resources{};
    bool is_home = true;

    static ChunkPart of(ObjectId object) {
        return {.place = current(object), .resources = {object}};
    }
    void move_to(const AssignedBuffer& buffer) {
        place = buffer.place();
        resources.insert(resources.begin(), buffer.resources()[0]);
        is_home = false;
    }
    LocatedOf<content> located() const { return {{place, resources}}; }
    WrittenOf<content> written() const { return {{place, resources}}; }
};

struct Recorder::Impl {
    Impl(const Plan& the_plan, std::string name, Keep what)
        : plan(the_plan),
          keep(what),
          owners(owners_of_objects(the_plan)),
          inputs_of_a_block(the_plan.inputs_of_a_block()),
          hazards(the_plan.resources) {
        schedule.name = std::move(name);
        for (size_t c = 0; c < kClasses; ++c) {
            for (int64_t i = 0; i < plan.buffers[c].count; ++i) free[c].push_back(i);
        }
    }

    void emit(Task task, std::span<const Use> uses) {
        if (task.verb == Verb::kernel && task.bytes == 0)
            task.bytes = cost::row_of(task).bytes(work_of(plan, task));
        lane_bytes[static_cast<size_t>(task.lane)] += task.bytes;
        if (keep == Keep::bytes) return;
        if (task.object != swap::kNoObject) {
            task.layer = owners[task.object].layer;
            task.item = owners[task.object].item;
        }
        auto& lane = schedule.lanes[static_cast<size_t>(task.lane)];
        task.index = static_cast<uint32_t>(lane.size());
        hazards.order(schedule, task, uses);
        lane.push_back(static_cast<uint32_t>(schedule.tasks.size()));
        schedule.tasks.push_back(task);
    }
    void emit(Task task, std::initializer_list<Use> uses) {
        emit(task, std::span<const Use>(uses.begin(), uses.size()));
    }

    // Fetches an object, or so many bytes of it, to `target` on the device, through staging memory
    // when it is on NVMe.
    void fetch(Recorder& recorder, ObjectId object, Class staging_class,
               const AssignedBuffer& target, int64_t offset, std::optional<int64_t> only = {}) {
        const int64_t bytes = only.value_or(plan.objects[object].bytes);
        const uint32_t into = target.resources_[0];
        Task copy{.verb = Verb::copy, .lane = Lane::h2d, .object = object, .bytes = bytes};
        copy.places[1] = target.place(offset);
        if (plan.objects[object].home == Tier::host) {
            copy.places[0] = current(object);
            emit(copy, {{object, Effect::read}, {into, Effect::join}});
            return;
        }
        const AssignedBuffer staging = recorder.acquire(staging_class);
        read(object, staging);
        copy.places[0] = staging.place();
        emit(copy, {{staging.resources_[0], Effect::read}, {into, Effect::join}});
        verify(object, staging, into);
    }

    void read(ObjectId object, const AssignedBuffer& into) {
        Task task{.verb = Verb::read,
                  .lane = Lane::read,
                  .object = object,
                  .bytes = plan.objects[object].bytes};
        task.places[0] = into.place();
        emit(task, {{object, Effect::read}, {into.resources_[0], Effect::write}});
    }

    // The readers of `gated` wait for the check; the copy that fills it does not.
    void verify(ObjectId object, const AssignedBuffer& staging, uint32_t gated) {
        if (!plan.verify) return;
        Task task{.verb = Verb::verify,
                  .lane = Lane::check,
                  .object = object,
                  .bytes = plan.objects[object].bytes};
        task.places[0] = staging.place();
        emit(
            task,
            {{object, Effect::read}, {staging.resources_[0], Effect::read}, {gated, Effect::join}});
    }

    void write(ObjectId object, const AssignedBuffer& from, bool commits) {
        Task task{.verb = Verb::write,
                  .lane = Lane::write,
                  .commits = commits,
                  .object = object,
                  .bytes = plan.objects[object].bytes};
        task.places[0] = from.place();
        emit(task, {{from.resources_[0], Effect::read}, {object, Effect::write}});
    }

    void seal(ObjectId object, const AssignedBuffer& staging) {
        if (!plan.verify) return;
        Task task{.verb = Verb::seal,
                  .lane = Lane::check,
                  .object = object,
                  .bytes = plan.objects[object].bytes};
        task.places[0] = staging.place();
        emit(task, {{staging.resources_[0], Effect::read}, {object, Effect::write}});
    }

    // All of an object that lives on the device, to or from staging memory.
    void copy(ObjectId object, Lane lane, const AssignedBuffer& staging, Effect of_staging,
              Effect of_object) {
        Task copy{.verb = Verb::copy,
                  .lane = lane,
                  .object = object,
                  .bytes = plan.objects[object].bytes};
        const bool up = lane == Lane::h2d;
        copy.places[up ? 0 : 1] = staging.place();
        copy.places[up ? 1 : 0] = current(object);
        emit(copy, {{staging.resources_[0], of_staging}, {object, of_object}});
    }

    // Those of a layer's weights that `wanted` picks, to their place in `into`.
    template <class Wanted>
    void fetch_chunks(Recorder& recorder, int64_t layer, const AssignedBuffer& into,
                      const Wanted& wanted) {
        for (const Chunk& chunk : plan.chunks_of(layer)) {
            if (wanted(chunk))
                fetch(recorder, chunk.weight, Class::weight_staging, into,
                      chunk.first * size_of(plan.compute));
        }
    }

    // A layer's weights where they live on the device.
    Weights resident(int64_t layer) const {
        Weights buffer;
        buffer.place_ = {OperandPlace::Kind::device, swap::kNoObject,
                         plan.layer_plans[static_cast<size_t>(layer)].device_offset};
        for (const Chunk& chunk : plan.chunks_of(layer)) buffer.resources_.push_back(chunk.weight);
        return buffer;
    }

    // The weights that an update of a split master starts from. Who updates checks them.
    void load_weight(ObjectId weight, const AssignedBuffer& staging) {
        if (plan.objects[weight].home == Tier::nvme) return read(weight, staging);
        copy(weight, Lane::d2h, staging, Effect::write, Effect::read);
    }

    // Takes `bytes`, or as many as the object has, at `offset` of a device buffer to its home.
    void send(Recorder& recorder, const AssignedBuffer& from, int64_t offset, ObjectId object,
              Class staging_class, std::optional<int64_t> only = {}) {
        const int64_t bytes = only.value_or(plan.objects[object].bytes);
        Task copy{.verb = Verb::copy, .lane = Lane::d2h, .object = object, .bytes = bytes};
        copy.places[0] = from.place(offset);
        if (plan.objects[object].home == Tier::host) {
            copy.places[1] = current(object);
            emit(copy, {{from.resources_[0], Effect::read}, {object, Effect::write}});
            return;
        }
        const AssignedBuffer staging = recorder.acquire(staging_class);
        copy.places[1] = staging.place();
        emit(copy, {{from.resources_[0], Effect::read}, {staging.resources_[0], Effect::write}});
        seal(object, staging);
        write(object, staging, false);
    }

    // Where a rounded chunk goes. What the device updates stays there; of the wire buffer only the
    // leaves are used then.
    ChunkPart<Content::wire> rounded(const Chunk& chunk, const AssignedBuffer& wire) const {
        ChunkPart<Content::wire> part{.place = wire.place(), .resources = {wire.resources()[0]}};
        if (!plan.updates_on_device(chunk)) return part;
        part.place = current(chunk.gradient);
        part.resources.push_back(chunk.gradient);
        return part;
    }

    // A speculative update's pending versions: of the state, and of the weight where that is half
    // of the master.
    void end_speculation(int64_t index, Verb verb) {
        const Chunk& chunk = plan.chunks[static_cast<size_t>(index)];
        for (const ObjectId object : {chunk.state, chunk.weight}) {
            if (object == chunk.weight && !plan.state.split) continue;
            emit({.verb = verb, .lane = Lane::write, .object = object}, {{object, Effect::write}});
        }
    }

    const Plan& plan;
    const Keep keep;
    const std::vector<Owner> owners;  // by object
    const int64_t inputs_of_a_block;
    std::array<int64_t, swap::kLanes> lane_bytes{};
    swap::Schedule schedule;
    Hazards hazards;
    std::array<std::deque<int64_t>, kClasses> free;  // front: released longest ago
    std::map<int64_t, Input> saved_inputs;
    int64_t prefetched_layer = -1;  // whose weights `prefetched` are
    Weights prefetched;
    BufferOf<Content::codes> prefetched_codes;  // which they are decoded from
    std::set<int64_t> kept_in_host;             // layers whose second shards are this step's
    struct Arrival {                            // the ranks' parts of this rank's chunk, under way
        int64_t chunk = 0;
        BufferOf<Content::arrived> parts{};
    };
    // The oldest first: those that their owner adds, and those that the host combines before.
    std::deque<Arrival> arrivals, arrivals_in_host;
};

}  // namespace ferry::planner
