// What a placement keeps on the device.
#include <algorithm>
#include <array>
#include <cstdint>
#include <numeric>
#include <span>
#include <vector>

#include "place_impl.h"
#include "zero/stage_order.h"

namespace ferry::planner {

using swap::Tier;

namespace {

// How many buffers of each class: what a step cannot do without, and what keeps the lanes busy.
struct Depths {
    int64_t weights = 1, gradients = 1, wire = 1, spare_activations = 0;
    int64_t exchanges = 2;  // with several ranks: what goes out, and what comes in
};
constexpr Depths kLean{};
constexpr Depths kBusy{.weights = 2, .gradients = 2, .wire = 4, .spare_activations = 1};
// In the order in which they are given memory.
constexpr std::array kDeepened{&Depths::weights, &Depths::wire, &Depths::spare_activations,
                               &Depths::gradients};
static_assert(kDeepened.size() + 1 == kMostYielded);

class DevicePlacer : Placing {
public:
    DevicePlacer(const ToPlace& what, Placement& result) : Placing(what, result) {}

    void make() {
        choose_groups();
        spend_device();
    }

private:
    Budget& device() { return result_.device; }
    const zero::Stage& stage() const { return work_.partition.stage; }
    int64_t block_count() const { return static_cast<int64_t>(work_.layers.size()) - 2; }
    // Of a pipeline's stage, in so many groups.
    struct Order {
        int64_t groups = 0;
        int64_t under_way = 1, passing = 1;    // groups: see zero::Stage, zero::held_at_once()
        int64_t visits_under_way = 1;          // over all virtual stages
        std::vector<int64_t> kept_by_layer{};  // groups whose inputs a block keeps
    };
    const Order& order(int64_t groups) const {
        if (order_.groups == groups) return order_;
        const std::vector<int64_t> each = stage().under_way_of_each(groups);
        order_ = {.groups = groups,
                  .under_way = std::ranges::max(each),
                  .visits_under_way = std::accumulate(each.begin(), each.end(), int64_t{0}),
                  .kept_by_layer = stage().under_way_by_layer(groups, std::ssize(work_.layers))};
        // Gradients arrive before what goes on has left.
        if (!stage().all())
            order_.passing = std::max<int64_t>(2, zero::held_at_once(stage(), groups));
        return order_;
    }
    // Micro-batches whose inputs a block keeps at the same time.
    int64_t under_way(int64_t groups) const {
        return order(groups).under_way * (micro_batches_ / groups);
    }
    // The same of a block of this stage; 0: another's.
    int64_t kept_by(int64_t block, int64_t groups) const {
        return order(groups).kept_by_layer[static_cast<size_t>(block + 1)] *
               (micro_batches_ / groups);
    }
    // Micro-batches for which a block that saves this holds it at the same time: what backward has
    // left reads attention's and the MLP's again.
    int64_t held(model::Saved what, int64_t groups) const {
        const int64_t read_again = what == model::Saved::projections ? 0 : stage().deferred(groups);
        return std::min(order(groups).under_way + read_again, groups) * (micro_batches_ / groups);
    }
    // Blocks of groups for which backward keeps something. Where no group's is left behind, it is
    // used up block by block.
    int64_t blocks_deferred(int64_t groups) const {
        if (!stage().splits_backward) return 0;
        const int64_t deferred = stage().deferred(groups);
        if (deferred == 0) return 1;
        return (end_block() - first_block()) * std::min(deferred + 1, groups);
    }
    // Of this rank's stage: the first, and the one behind the last.
    int64_t first_block() const {
        return stage().all() ? 0 : std::max<int64_t>(stage().first, 1) - 1;
    }
    int64_t end_block() const {
        return stage().all() ? block_count() : std::min(stage().end - 1, block_count());
    }

    using Counts = std::array<int64_t, kClasses>;
    // `inputs`: block inputs of a group that stay on the device until backward. `saving`: blocks
    // that save each activation there.
    Counts device_counts(const Depths& depth, int64_t groups, int64_t inputs,
                         const model::OfSaved<int64_t>& saving) const {
        Counts counts{};
        counts[at(Class::block_weights)] = depth.weights;
        counts[at(Class::edge_weights)] = tied_ ? 2 : 1;
        counts[at(Class::block_gradient)] = depth.gradients;
        counts[at(Class::edge_gradient)] = tied_ ? 3 : 1;
        counts[at(Class::wire)] = depth.wire;
        counts[at(Class::parts)] = work_.partition.alone() ? 0
                                   : has_feedback() ? std::max(depth.exchanges, 2 * kTurnsAtOnce)
                                                    : depth.exchanges;
        // One is gathered while the one before is decoded.
        counts[at(Class::codes)] = work_.partition.codecs.weights.on() ? 2 : 0;
        counts[at(Class::activation)] = order(groups).passing * (micro_batches_ / groups) + 1 +
                                        depth.spare_activations + inputs;
        for (const model::Saved what : model::kAllSaved)
            counts[at(class_of(what))] = saving[at(what)] * held(what, groups);
        counts[at(Class::deferred)] = blocks_deferred(groups) * (micro_batches_ / groups);
        counts[at(Class::norms)] = stage().splits_backward ? end_block() - first_block() : 0;
        counts[at(Class::tokens)] = order(groups).visits_under_way * (micro_batches_ / groups);
        counts[at(Class::lists)] = work_.needs.lists > 0 ? 1 : 0;
        counts[at(Class::scratch)] = 1;
        counts[at(Class::report)] = 1;
        return counts;
    }
    int64_t device_bytes(const Depths& depth, int64_t groups) const {
        const Counts counts = device_counts(depth, groups, 0, asked_for());
        int64_t bytes = work_.needs.overhead + work_.needs.page_tables + work_.matrix_room();
        for (size_t c = 0; c < kClasses; ++c) bytes += counts[c] * bytes_of(static_cast<Class>(c));
        return bytes;
    }

    // The fewest groups whose work fits: a further group moves weights and accumulators once more.
    void choose_groups() {
        for (const int64_t groups : group_counts(micro_batches_)) {
            if (groups < request_.swap.groups.value_or(1)) continue;
            result_.groups = groups;
            if (device_bytes(kLean, groups) <= device().limit()) return;
            if (request_.swap.groups) break;
        }
        refuse(device(), device_bytes(kLean, result_.groups),
               "the device budget is too small for one layer and its work",
               asked_for() != model::OfSaved<int64_t>{}
                   ? "lower swap.save_attention, swap.save_mlp or swap.save_projections"
                   : "lower batch.micro_batch, batch.micro_batches, batch.sequence, "
                     "numerics.head_tile or swap.chunk_elements");
    }

    // What fits of kBusy and beyond, less what is yielded: what came last goes first.
    Depths device_depths() const {
        Depths depth = kLean;
        const auto deepened = std::min(kDeepened.size(), kMostYielded - yielded_);
        for (int64_t Depths::*field : std::span(kDeepened).first(deepened)) {
            Depths deeper = depth;
            deeper.*field = kBusy.*field;
            if (device_bytes(deeper, result_.groups) <= result_.device.limit()) depth = deeper;
        }
        if (yielded_ > 0) return depth;
        // The gradients of two blocks: one is rounded while the one before is on its way, so that
        // kernels do not wait for copies.
        const int64_t chunks = most_chunks_of_a_block();
        try_depth(depth, &Depths::wire, 2 * chunks, Class::wire, 16);
        // The parts of a whole block on their way while the block below computes. What leaves and
        // what arrives has a buffer for each of its chunks, so that no cut waits for an exchange.
        const bool both = work_.partition.alone() ||
                          try_depth(depth, &Depths::exchanges, 2 * chunks, Class::parts, 8);
        if (!both) try_depth(depth, &Depths::exchanges, kLean.exchanges + chunks, Class::parts, 8);
        return depth;
    }

    void spend_device() {
        const Depths depth = device_depths();
        int64_t left = device().limit() - device_bytes(depth, result_.groups);
        const int64_t inputs =
            std::min(inputs_of_last(to_save_.inputs), left / bytes_of(Class::activation));
        left -= inputs * bytes_of(Class::activation);
        result_.counts = device_counts(depth, result_.groups, inputs, save_activations(left));
        if (work_.needs.overhead > 0)
            device().need({RowKind::process, "the process on the device: context, libraries"},
                          work_.needs.overhead);
        if (work_.needs.page_tables > 0)
            device().need({RowKind::page_tables, "page tables of the host tier"},
                          work_.needs.page_tables);
        if (work_.matrix_room() > 0)
            device().need({RowKind::newton_schulz, "Newton-Schulz, of a matrix from the host"},
                          work_.matrix_room());
        for (size_t c = 0; c < kClasses; ++c) {
            const auto id = static_cast<Class>(c);
            if (result_.counts[c] > 0) device().need(row_of(id), result_.counts[c] * bytes_of(id));
        }
        save_inputs(inputs);
        make_resident();
    }

    bool is_asked_for(const SavedActivation& activation) const {
        return blocks_asked_to_save(request_, activation.what).has_value();
    }
    model::OfSaved<int64_t> asked_for() const {
        model::OfSaved<int64_t> blocks{};
        for (const SavedActivation& activation : to_save_.activations)
            blocks[at(activation.what)] += is_asked_for(activation);
        return blocks;
    }

    // Activations that were asked for are among the buffers already. Returns how many blocks save
    // each.
    model::OfSaved<int64_t> save_activations(int64_t left_bytes) {
        model::OfSaved<int64_t> blocks{};
        for (auto& of_layers : result_.saved) of_layers.assign(work_.layers.size(), false);
        for (const SavedActivation& activation : to_save_.activations) {
            const int64_t bytes =
                held(activation.what, result_.groups) * bytes_of(class_of(activation.what));
            if (!is_asked_for(activation) && bytes > left_bytes) continue;
            left_bytes -= is_asked_for(activation) ? 0 : bytes;
            result_.saved[at(activation.what)][activation.layer] = true;
            ++blocks[at(activation.what)];
        }
        return blocks;
    }

    // Embedding first, then layers 0, 1, 2, ...: needed first, and their gradients arrive last.
    // Whole layers as far as they fit, for a byte of state beside resident weights saves twice the
    // traffic that a byte of further weights does (decision 19); then weights alone.
    void make_resident() {
        result_.resident.assign(work_.layers.size(), false);
        result_.chunks.resize(chunks_.size());
        bool whole = true;
        double may = most_elements_on_device();
        size_t c = 0;
        for (size_t l = 0; l < work_.layers.size(); ++l) {
            if (work_.layers[l].elements == 0) continue;  // another stage's
            if (stores_weights() && work_.layers[l].trainable_elements > 0) continue;
            const int64_t bytes = round_up(
                work_.partition.weight_elements(work_.layers[l]) * size_of(work_.numerics.compute),
                kPage);
            if (!device().take({RowKind::resident_weights, "resident weights"}, bytes)) break;
            result_.resident[l] = true;
            for (; c < chunks_.size() && chunks_[c].layer <= static_cast<int64_t>(l); ++c) {
                if (!chunks_[c].trainable || !result_.resident[size_t(chunks_[c].layer)]) continue;
                // Of the processors' matrices none is updated beside the team.
                if (is_matrix(chunks_[c]) && !work_.sends_matrices) continue;
                may -= static_cast<double>(chunks_[c].count);
                whole = whole && may >= 0 && keep_state(chunks_[c], result_.chunks[c]);
            }
        }
    }

    // Up to so many buffers, if they fit and the further ones take at most this part of the budget.
    bool try_depth(Depths& depth, int64_t Depths::*field, int64_t buffers, Class of,
                   int64_t part) const {
        Depths deeper = depth;
        deeper.*field = std::max(depth.*field, buffers);
        const int64_t limit = result_.device.limit();
        const bool fits = (deeper.*field - depth.*field) * bytes_of(of) <= limit / part &&
                          device_bytes(deeper, result_.groups) <= limit;
        if (fits) depth = deeper;
        return fits;
    }

    // On the device, with the gradient that its update waits for the outcome with.
    bool keep_state(const Chunk& chunk, Placement::ChunkHomes& homes) {
        const int64_t state = planner::state_bytes(chunk);
        const int64_t gradient = round_up(chunk.count * size_of(work_.numerics.wire), kPage);
        const bool first_matrix = is_matrix(chunk) && !result_.matrices_on_device;
        const int64_t room = first_matrix ? work_.matrix_room() : 0;
        if (state + gradient + room > device().limit() - device().spent()) return false;
        if (first_matrix) {
            device().need({RowKind::newton_schulz, "Newton-Schulz, of a matrix on the device"},
                          room);
            result_.matrices_on_device = true;
        }
        device().need(state_row(), state);
        device().need({RowKind::gradients, "gradients"}, gradient);
        homes.state = homes.gradient = Tier::device;
        return true;
    }

    // Where every rank updates everything, the others' gradients go through buffers to the host.
    double most_elements_on_device() const {
        if (!work_.partition.alone() && !work_.partition.sharding.state) return 0;
        if (has_feedback()) return 0;  // it comes to the processors
        double trainable = 0;
        for (const Chunk& chunk : chunks_)
            trainable += chunk.trainable ? static_cast<double>(chunk.count) : 0;
        const double stored = has_nvme() ? given_fraction().value_or(0) : 0;
        const double automatic = request_.device == DeviceKind::cuda ? 1 : 0;
        return std::min(request_.swap.state_on_device.value_or(automatic), 1 - stored) * trainable;
    }

    int64_t most_chunks_of_a_block() const {
        std::vector<int64_t> chunks(work_.layers.size());
        for (const Chunk& chunk : chunks_) {
            if (chunk.trainable && chunk.owner == work_.partition.rank)
                ++chunks[static_cast<size_t>(chunk.layer)];
        }
        int64_t most = 0;
        for (size_t l = 0; l < chunks.size(); ++l) {
            if (work_.layers[l].kind == model::LayerKind::block) most = std::max(most, chunks[l]);
        }
        return most;
    }

    // That as many of the last blocks keep.
    int64_t inputs_of_last(int64_t blocks) const {
        int64_t inputs = 0;
        for (int64_t b = block_count() - 1; b >= 0 && blocks > 0; --b) {
            inputs += kept_by(b, result_.groups);
            blocks -= kept_by(b, result_.groups) > 0 ? 1 : 0;
        }
        return inputs;
    }

    // The last blocks' inputs are needed again first: they keep the device's buffers. Those of
    // another stage's blocks are nowhere.
    void save_inputs(int64_t on_device) {
        const int64_t each = under_way(result_.groups);
        result_.inputs.assign(static_cast<size_t>(block_count() * each), Tier::device);
        for (int64_t b = block_count() - 1; b >= 0; --b) {
            for (int64_t i = kept_by(b, result_.groups) - 1; i >= 0; --i)
                if (--on_device < 0) result_.inputs[static_cast<size_t>(b * each + i)] = Tier::nvme;
        }
    }

    mutable Order order_{};  // of the groups asked for last
};

}  // namespace

void place_on_device(const ToPlace& what, Placement& result) { DevicePlacer(what, result).make(); }

}  // namespace ferry::planner
