#include "layout.h"

#include <algorithm>
#include <span>
#include <utility>
#include <vector>

#include "planner/task_facts.h"

namespace ferry::planner {

using swap::Object;
using swap::ObjectId;
using swap::Tier;

namespace {

// Classes of host slots, in the plan's order.
constexpr int kStateSlots = 0, kWeightSlots = 1;
// Room for what a run is besides its chunks: a few numbers, and its configuration as text.
constexpr int64_t kRunStateBytes = 16 * kKiB;

class Layout {
public:
    Layout(Plan& plan, const Placement& placement, const Workload& work)
        : plan_(plan), placement_(placement), work_(work) {}

    void make_objects() {
        for (size_t c = 0; c < plan_.chunks.size(); ++c) {
            Chunk& chunk = plan_.chunks[c];
            const Placement::ChunkHomes& homes = placement_.chunks[c];
            const int64_t weight = size_of(plan_.compute), wire = size_of(plan_.wire);
            chunk.weight = add(homes.weight, chunk.count * weight,
                               slots_of(chunk, Class::weight_staging, work_));
            if (!chunk.trainable) continue;
            chunk.speculative = homes.speculative;
            plan_.speculative = plan_.speculative || chunk.speculative;
            chunk.state =
                add(homes.state, state_bytes(chunk), slots_of(chunk, Class::state_staging, work_));
            FERRY_CHECK(!plan_.durable || homes.state == Tier::nvme, "durable state is on NVMe");
            if (homes.state == Tier::nvme || chunk.speculative)
                make_versioned(chunk.state, chunk.speculative, kStateSlots);
            if (plan_.state.split && (chunk.speculative || plan_.durable))
                make_versioned(chunk.weight, chunk.speculative, kWeightSlots);
            chunk.gradient = add(homes.gradient, chunk.count * wire,
                                 slots_of(chunk, Class::gradient_staging, work_));
            if (!plan_.has_feedback() || !plan_.owns(chunk)) continue;
            const int ranks = plan_.partition.ranks;
            const SlotFamily slots = slots_of(chunk, Class::feedback_staging, work_);
            chunk.kept = add(homes.kept, ranks * chunk.count * wire, slots_of_kept(work_));
            chunk.feedback =
                add(homes.feedback,
                    zero::feedback_bytes(chunk.count, ranks, plan_.partition.codecs.local_steps),
                    slots);
        }
        if (plan_.groups > 1) make_spills();
        for (const Tier home : placement_.inputs) {
            const int64_t bytes = buffer_bytes(Class::activation, work_);
            plan_.inputs.push_back(
                home == Tier::device
                    ? swap::kNoObject
                    : add(home, bytes, {RowKind::block_inputs, "block inputs", bytes}));
        }
        make_second_shards();
        const std::vector<Owner> owners = owners_of_objects(plan_);
        for (size_t i = 0; i < owners.size(); ++i) plan_.objects[i].layer = owners[i].layer;
        // A committed update writes a fresh slot before it frees the old one.
        for (size_t c = 0; c < slot_kinds_.size(); ++c) {
            int64_t& slots = plan_.slot_classes[c].slots;
            if (slot_kinds_[c] == RowKind::state)
                slots += plan_.buffers[at(Class::state_staging)].count;
            if (slot_kinds_[c] == RowKind::weights && stores_versioned_weights())
                slots += plan_.buffers[at(Class::weight_staging)].count;
        }
    }

    void make_spills() {
        for (size_t i = 0; i < plan_.spills.size(); ++i) {
            AccumulatorSpill& spill = plan_.spills[i];
            const auto make = [&] {
                return add(placement_.spills[i], spill.count * 4,
                           {RowKind::accumulators, "accumulators",
                            buffer_bytes(Class::spill_staging, work_)});
            };
            spill.object = make();
            if (plan_.tied && spill.layer == 0) spill.table = make();
        }
    }

    // Whole pages, so that they can lie on NVMe.
    void make_second_shards() {
        for (size_t l = 0; l < plan_.layers.size(); ++l) {
            const std::vector<Tier>& homes = placement_.second_shards[l];
            if (homes.empty()) continue;
            const auto runs = zero::second_shards(plan_.partition, plan_.layers[l], plan_.compute);
            for (size_t i = 0; i < runs.size(); ++i)
                plan_.layer_plans[l].second_shards.push_back(
                    add(homes[i], round_up(runs[i].bytes, kPage),
                        {RowKind::second_shards, "second shards of weights",
                         buffer_bytes(Class::second_staging, work_)}));
        }
    }

    void make_buffers() {
        for (size_t c = 0; c < kClasses; ++c) {
            const auto id = static_cast<Class>(c);
            plan_.buffers[c] = {.name = name_of(id),
                                .tier = id < Class::state_staging ? Tier::device : Tier::host,
                                .bytes = buffer_bytes(id, work_),
                                .count = placement_.counts[c]};
        }
    }

    // Buffers first, so that what meets io_uring is one run; then fixed homes; then host slots.
    void assign_addresses() {
        plan_.resources = static_cast<uint32_t>(plan_.objects.size());
        for (Buffers& b : plan_.buffers) {
            b.offset = take(b.tier, b.bytes * b.count);
            b.first_resource = plan_.resources;
            plan_.resources += static_cast<uint32_t>(b.count);
        }
        plan_.io_bytes = plan_.host_bytes;
        plan_.leaves_resource = plan_.resources++;
        plan_.leaves_offset = take(Tier::host, report_room(plan_.leaves, work_.report_bytes));
        plan_.report_resource = plan_.resources++;
        plan_.report_offset = plan_.leaves_offset + round_up(plan_.leaves * 4, 8);
        plan_.workspace_bytes = work_.matrix_workspace();
        if (plan_.workspace_bytes > 0)
            plan_.workspace_offset = take(Tier::host, plan_.workspace_bytes);
        plan_.room_bytes = work_.matrix_room();
        plan_.room_scratch_bytes = work_.needs.matrix_scratch;
        if (plan_.room_bytes > 0) plan_.sent_room_offset = take(Tier::device, plan_.room_bytes);
        if (placement_.matrices_on_device)
            plan_.own_room_offset = take(Tier::device, plan_.room_bytes);
        for (size_t l = 0; l < plan_.layers.size(); ++l) {
            LayerPlan& layer = plan_.layer_plans[l];
            layer.resident = placement_.resident[l];
            for (const model::Saved what : model::kAllSaved)
                layer.saves[at(what)] = placement_.saved[at(what)][l];
            if (!layer.resident) continue;
            const model::Layer& shape = plan_.layers[l];
            layer.device_offset =
                take(Tier::device, plan_.partition.weight_elements(shape) * size_of(plan_.compute));
            for (const Chunk& chunk : plan_.chunks_of(static_cast<int64_t>(l))) {
                const int64_t position = plan_.partition.weight_position(
                    zero::segment_of(shape, chunk.first), chunk.first);
                plan_.objects[chunk.weight].offset =
                    layer.device_offset + position * size_of(plan_.compute);
            }
        }
        // The gradients of a run follow each other.
        for (const ObjectId Chunk::*of : {&Chunk::state, &Chunk::gradient}) {
            for (const Chunk& chunk : plan_.chunks) {
                if (plan_.updates_on_device(chunk))
                    plan_.objects[chunk.*of].offset =
                        take(Tier::device, plan_.objects[chunk.*of].bytes);
            }
        }
        plan_.host_slots = {{.slot_bytes = buffer_bytes(Class::state_staging, work_)},
                            {.slot_bytes = buffer_bytes(Class::weight_staging, work_)}};
        for (Object& object : plan_.objects) {
            if (object.home != Tier::host) continue;
            if (object.versioned)
                plan_.host_slots[static_cast<size_t>(object.slot_class)].slots += 2;
            else
                object.offset = take(Tier::host, object.bytes);
        }
        for (swap::HostSlots& c : plan_.host_slots)
            c.offset = take(Tier::host, c.slots * c.slot_bytes);
    }

    // Runs end where anything changes but the place in the layer, and where the leaves would fill
    // more than a wire buffer.
    void make_runs() {
        const int64_t most = plan_.buffers[at(Class::wire)].bytes / 4 * kLeafElements;
        Chunk* first = nullptr;
        int64_t elements = 0;
        for (size_t c = 0; c < plan_.chunks.size(); ++c) {
            Chunk& chunk = plan_.chunks[c];
            elements += chunk.count;
            if (first != nullptr && elements <= most && continues(plan_.chunks[c - 1], chunk)) {
                ++first->run;
                chunk.run = 0;
            } else {
                first = &chunk;
                elements = chunk.count;
            }
        }
    }

    // What each class of slots on NVMe holds.
    std::span<const RowKind> slot_kinds() const { return slot_kinds_; }

private:
    bool continues(const Chunk& before, const Chunk& chunk) const {
        return plan_.updates_on_device(before) && plan_.updates_on_device(chunk) &&
               !is_matrix(before) && !is_matrix(chunk) && before.layer == chunk.layer &&
               before.owner == chunk.owner && before.decays == chunk.decays &&
               before.format == chunk.format && before.first + before.count == chunk.first;
    }
    int64_t take(Tier tier, int64_t bytes) {
        int64_t& end = tier == Tier::device ? plan_.device_bytes : plan_.host_bytes;
        return std::exchange(end, end + round_up(bytes, kPage));
    }

    // `speculative`: it holds two versions until the outcome. A durable one stays until the next
    // is; a speculative update then waits for that rather than for a third slot.
    void make_versioned(ObjectId id, bool speculative, int host_class) {
        Object& object = plan_.objects[id];
        object.versioned = true;
        if (object.home == Tier::host) object.slot_class = host_class;
        if (object.home == Tier::nvme && (speculative || plan_.durable))
            ++plan_.slot_classes[static_cast<size_t>(object.slot_class)].slots;
    }

    bool stores_versioned_weights() const {
        return std::ranges::any_of(plan_.chunks, [&](const Chunk& chunk) {
            const Object& weight = plan_.objects[chunk.weight];
            return weight.home == Tier::nvme && weight.versioned;
        });
    }

    ObjectId add(Tier home, int64_t bytes, const SlotFamily& family) {
        Object object{.home = home, .bytes = bytes};
        if (home == Tier::nvme) {
            aio::SlotClass& c = slots(family);
            ++c.slots;
            object.slot_class = static_cast<int>(&c - plan_.slot_classes.data());
        }
        plan_.objects.push_back(object);
        return static_cast<ObjectId>(plan_.objects.size() - 1);
    }

    aio::SlotClass& slots(const SlotFamily& family) {
        auto& classes = plan_.slot_classes;
        const auto found = std::ranges::find(classes, family.name, &aio::SlotClass::name);
        if (found != classes.end()) return *found;
        slot_kinds_.push_back(family.kind);
        return classes.emplace_back(aio::SlotClass{family.name, family.bytes, 0});
    }

    Plan& plan_;
    const Placement& placement_;
    const Workload& work_;
    std::vector<RowKind> slot_kinds_{};  // of plan_.slot_classes
};

// A slot lies on one path: what is left at the end of each may be too small for one.
int64_t enough_over(size_t paths, const Plan& plan) {
    int64_t largest = 0;
    for (const aio::SlotClass& c : plan.slot_classes) largest = std::max(largest, c.slot_bytes);
    return plan.nvme_bytes + (static_cast<int64_t>(paths) - 1) * largest;
}

void spend_nvme(Plan& plan, std::span<const RowKind> slot_kinds, Budget& nvme, size_t paths) {
    // A write goes to a fresh slot: that of a speculative update, of an update under way, of a
    // durable version.
    for (size_t c = 0; c < plan.slot_classes.size(); ++c) {
        const aio::SlotClass& slots = plan.slot_classes[c];
        const int64_t stored = std::ranges::count_if(plan.objects, [&](const Object& object) {
            return object.home == Tier::nvme && object.slot_class == static_cast<int>(c);
        });
        nvme.need({slot_kinds[c], slots.name}, stored * slots.slot_bytes);
        if (slots.slots > stored)
            nvme.need({RowKind::fresh_slots, slots.name + ", fresh slots"},
                      (slots.slots - stored) * slots.slot_bytes);
    }
    if (plan.durable) {
        plan.record_bytes = swap::map_bytes(plan.objects) + kRunStateBytes;
        nvme.need({RowKind::maps, "maps of the durable state"},
                  2 * round_up(plan.record_bytes + kPage, kPage));
    }
    if (!plan.slot_classes.empty())
        nvme.need({RowKind::headers, "headers of the files"},
                  static_cast<int64_t>(paths) * aio::kHeaderBytes);
    plan.nvme_bytes = nvme.spent();
    if (!nvme.exceeded()) return;
    const int64_t needed = nvme.sharers() * nvme.spent(), limit = nvme.sharers() * nvme.limit();
    const std::string enough = std::to_string(nvme.sharers() * enough_over(paths, plan));
    // Speculative updates that were not asked for never are what is too much.
    const std::string otherwise =
        plan.durable ? "set checkpoint.durable_steps to false, which spares the second copy of "
                       "the state"
        : plan.speculative
            ? "set swap.speculate to \"auto\", which speculates no more than there is room for"
            : "raise budgets.host";
    throw Error(Trouble::does_not_fit, {.what = "the NVMe budget is too small",
                                        .where = "budgets.nvme",
                                        .measured = needed_text(nvme, nvme.spent()),
                                        .limit = format_bytes(limit) + " over all paths, " +
                                                 format_bytes(needed - limit) + " missing",
                                        .remedy = "raise the sizes in budgets.nvme to " + enough +
                                                  " in all, add a path, or " + otherwise});
}

}  // namespace

void lay_out(Plan& plan, const Placement& placement, const Workload& work, Budget nvme,
             size_t paths) {
    plan.groups = placement.groups;
    Layout layout(plan, placement, work);
    layout.make_buffers();
    layout.make_objects();
    layout.assign_addresses();
    layout.make_runs();
    spend_nvme(plan, layout.slot_kinds(), nvme, paths);
    for (const Budget* budget : {&placement.device, &placement.host, &std::as_const(nvme)}) {
        plan.rows.insert(plan.rows.end(), budget->rows().begin(), budget->rows().end());
    }
    FERRY_CHECK(plan.device_bytes + plan.device_overhead_bytes == placement.device.spent(),
                "the device arena is what was budgeted");
    FERRY_CHECK(plan.host_bytes == placement.host.spent(), "the host arena is what was budgeted");
}

}  // namespace ferry::planner
