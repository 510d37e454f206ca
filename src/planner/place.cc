// Greedy, in the order of bytes moved per byte kept.
#include "place.h"

#include <algorithm>
#include <cmath>
#include <span>

#include "chunks.h"
#include "speculation.h"
#include "step_seconds.h"

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

class Placer {
public:
    Placer(const PlanRequest& request, const Workload& work, const std::vector<Chunk>& chunks,
           const std::vector<AccumulatorSpill>& spills, const cost::Measurements& machine,
           const ToSave& to_save, size_t yielded)
        : request_(request),
          work_(work),
          chunks_(chunks),
          spills_(spills),
          to_save_(to_save),
          yielded_(yielded),
          micro_batches_(request.micro_batches),
          tied_(work.partition.ties(work.layers)),
          machine_(machine),
          result_{.device = Budget(Tier::device, request.budgets.device_bytes),
                  .host = Budget(Tier::host, request.budgets.host_bytes, request.sharers)} {}

    Placement make() {
        choose_groups();
        spend_device();
        reserve_host_buffers();
        choose_homes();
        if (host().exceeded()) {
            refuse(host(), host().spent(),
                   has_nvme() ? "the host budget is too small even with all state on NVMe"
                              : "the model's state does not fit into the host budget",
                   !has_nvme() ? "add a path to budgets.nvme"
                   : work_.cut_elements > kLeafElements
                       ? "lower swap.chunk_elements"
                       : "lower batch.micro_batch or batch.sequence");
        }
        return std::move(result_);
    }

private:
    Budget& device() { return result_.device; }
    Budget& host() { return result_.host; }
    bool has_feedback() const { return work_.partition.codecs.momentum.on(); }
    bool has_nvme() const { return !request_.budgets.nvme.empty(); }
    const zero::Stage& stage() const { return work_.partition.stage; }
    int64_t group_size() const { return micro_batches_ / result_.groups; }
    int64_t block_count() const { return static_cast<int64_t>(work_.layers.size()) - 2; }
    // Micro-batches whose inputs a block keeps at the same time.
    int64_t under_way(int64_t groups) const {
        return stage().under_way(groups) * (micro_batches_ / groups);
    }
    // Micro-batches for which a block that saves this holds it at the same time: what backward has
    // left reads attention's and the MLP's again.
    int64_t held(model::Saved what, int64_t groups) const {
        const bool read_again = what != model::Saved::projections;
        return under_way(groups) +
               (read_again ? stage().deferred(groups) * (micro_batches_ / groups) : 0);
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
    int64_t bytes_of(Class c) const { return buffer_bytes(c, work_); }

    // ---- device

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
        // Of a pipeline's stage gradients arrive before what goes on has left.
        const int64_t passing = stage().all() ? 1 : 2;
        counts[at(Class::activation)] =
            passing * (micro_batches_ / groups) + 1 + depth.spare_activations + inputs;
        for (const model::Saved what : model::kAllSaved)
            counts[at(class_of(what))] = saving[at(what)] * held(what, groups);
        counts[at(Class::deferred)] = blocks_deferred(groups) * (micro_batches_ / groups);
        counts[at(Class::norms)] = stage().splits_backward ? end_block() - first_block() : 0;
        counts[at(Class::tokens)] = under_way(groups);
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
        const int64_t inputs = std::min(
            std::min(end_block() - first_block(), to_save_.inputs) * under_way(result_.groups),
            left / bytes_of(Class::activation));
        left -= inputs * bytes_of(Class::activation);
        result_.counts = device_counts(depth, result_.groups, inputs, save_activations(left));
        if (work_.needs.overhead > 0)
            device().need("the process on the device: context, libraries", work_.needs.overhead);
        if (work_.needs.page_tables > 0)
            device().need("page tables of the host tier", work_.needs.page_tables);
        if (work_.matrix_room() > 0)
            device().need("Newton-Schulz, of a matrix from the host", work_.matrix_room());
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
            if (!device().take("resident weights", bytes)) break;
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
            device().need("Newton-Schulz, of a matrix on the device", room);
            result_.matrices_on_device = true;
        }
        device().need(kState, state);
        device().need("gradients", gradient);
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

    // The last blocks' inputs are needed again first: they keep the device's buffers. Those of
    // another stage's blocks are nowhere.
    void save_inputs(int64_t on_device) {
        const int64_t each = under_way(result_.groups);
        result_.inputs.assign(static_cast<size_t>(block_count() * each), Tier::device);
        const auto end = result_.inputs.begin() + end_block() * each;
        std::fill(result_.inputs.begin() + first_block() * each, end - on_device, Tier::nvme);
    }

    // ---- host

    void reserve_host_buffers() {
        const int64_t leaves = leaves_of(chunks_, work_.partition);
        host().need("norm leaves and report",
                    round_up(report_room(leaves, work_.report_bytes), kPage));
        if (work_.matrix_workspace() > 0)
            host().need("workspace of Newton-Schulz", round_up(work_.matrix_workspace(), kPage));
        reserve(Class::host_tokens, "token batches", std::min<int64_t>(2, group_size()));
        // One of each even without NVMe: first contents and the hash pass through them.
        reserve(Class::state_staging, kStaging, 1);
        reserve(Class::weight_staging, kStaging, 1);
        if (!has_nvme()) return;
        reserve(Class::gradient_staging, kStaging, 1);
        if (std::count(result_.inputs.begin(), result_.inputs.end(), Tier::nvme) > 0) {
            reserve(Class::input_staging, kStaging, 1);
        }
        if (result_.groups > 1) reserve(Class::spill_staging, kStaging, 1);
        if (has_feedback()) reserve(Class::feedback_staging, kStaging, kTurnsAtOnce + 1);
        if (work_.partition.keeps_second_shards()) reserve(Class::second_staging, kStaging, 1);
        // A quarter of the budget at most: memory that holds state saves more than a deeper queue.
        // All kinds alike: what is under way of one waits for the others.
        for (int64_t count = 2; count <= chunks_under_way(); ++count) {
            for (const Class c :
                 {Class::state_staging, Class::weight_staging, Class::gradient_staging,
                  Class::input_staging, Class::spill_staging, Class::second_staging}) {
                deepen(c, count, host().limit() / 4);
            }
        }
    }

    static constexpr const char* kStaging = "staging buffers";
    static constexpr const char* kState = "optimizer state";

    // A chunk is read, updated and written. While the slowest of the three is busy with one, the
    // others hold as many more as their share of its time, and one is being filled. Where it takes
    // several at once to keep the storage busy, each takes as many times as long.
    int64_t chunks_under_way() const {
        const int64_t at_once = request_.swap.chunks_at_once.value_or(machine_.nvme_at_once);
        const double stored_s = static_cast<double>(bytes_of(Class::state_staging)) /
                                machine_.nvme_bytes_per_s,
                     read_s = static_cast<double>(at_once) * stored_s,
                     update_s = update_seconds(work_, machine_), all_s = 2 * read_s + update_s;
        return 1 + static_cast<int64_t>(std::ceil(all_s / std::max(stored_s, update_s)));
    }

    // Updates of resident weights go on while a block's weights, on their way to the device too,
    // keep the copies busy.
    int64_t chunks_behind_a_block() const {
        constexpr double kMost = 16;
        const double block_s =
            static_cast<double>(bytes_of(Class::block_weights)) / machine_.copy_bytes_per_s;
        return static_cast<int64_t>(
            std::min(kMost, 2 + std::ceil(block_s / update_seconds(work_, machine_))));
    }

    void reserve(Class c, const char* what, int64_t count) {
        result_.counts[at(c)] = count;
        host().need(what, count * bytes_of(c));
    }

    void deepen(Class c, int64_t most, int64_t most_spent) {
        int64_t& count = result_.counts[at(c)];
        while (count > 0 && count < most && host().spent() < most_spent &&
               host().take(kStaging, bytes_of(c))) {
            ++count;
        }
    }

    // Without NVMe everything has to be in host memory, fits or not: the sum is the smallest
    // budget.
    bool claim(Tier& home, const char* what, int64_t bytes) {
        if (!has_nvme()) host().need(what, bytes);
        if (has_nvme() && !host().take(what, bytes)) return false;
        home = Tier::host;
        return true;
    }

    template <class Body>
    void for_trainable(const Body& body) {
        for (size_t c = 0; c < chunks_.size(); ++c) {
            if (chunks_[c].trainable) body(chunks_[c], result_.chunks[c]);
        }
    }
    // Those that the host updates.
    template <class Body>
    void for_updated_on_host(const Body& body) {
        for_trainable([&](const Chunk& chunk, Placement::ChunkHomes& homes) {
            if (homes.state != Tier::device) body(chunk, homes);
        });
    }

    bool is_remainder(const Chunk& chunk) const { return chunk.count * 8 <= work_.cut_elements; }

    // Host memory goes where it saves most traffic per byte: weights (read twice, written once),
    // accumulators and gradients, block inputs, then optimizer state.
    void choose_homes() {
        // Remainders, such as the norms' state: a whole slot each would be a waste.
        for_updated_on_host([&](const Chunk& chunk, Placement::ChunkHomes& homes) {
            if (is_remainder(chunk) && !fraction_is_given())
                claim(homes.state, kState, state_bytes(chunk));
        });
        for (size_t c = 0; c < chunks_.size(); ++c) {
            if (result_.resident[static_cast<size_t>(chunks_[c].layer)]) {
                result_.chunks[c].weight = Tier::device;
            } else if (!stores_weights() || !chunks_[c].trainable) {
                claim(result_.chunks[c].weight, "weights", weight_bytes(chunks_[c]));
            }
        }
        place_second_shards();
        choose_spills();
        for_updated_on_host([&](const Chunk& chunk, Placement::ChunkHomes& homes) {
            claim(homes.gradient, "gradients", chunk.count * size_of(work_.numerics.wire));
        });
        place_feedback();
        for (Tier& input : result_.inputs) {
            if (input != Tier::device) claim(input, "block inputs", bytes_of(Class::activation));
        }
        place_states();
        if (!has_nvme()) deepen(Class::weight_staging, chunks_behind_a_block(), host().limit());
        place_speculation();
    }

    // Gradients that wait for the outcome are written and read once, momentum with its errors too,
    // which is more bytes. The share of the state that has to be on NVMe is theirs as well.
    void place_feedback() {
        if (!has_feedback()) return;
        const int ranks = work_.partition.ranks;
        const double stored = has_nvme() ? given_fraction().value_or(0) : 0;
        double due = 0;
        const auto for_turns = [&](const auto& body) {
            for_trainable([&](const Chunk& chunk, Placement::ChunkHomes& homes) {
                if (chunk.owner == work_.partition.rank) body(chunk, homes);
            });
        };
        for_turns([&](const Chunk& chunk, Placement::ChunkHomes& homes) {
            claim(homes.kept, "gradients",
                  round_up(ranks * chunk.count * size_of(work_.numerics.wire), kPage));
        });
        for_turns([&](const Chunk& chunk, Placement::ChunkHomes& homes) {
            due += stored;
            if (due >= 1)
                due -= 1;
            else
                claim(homes.feedback, "momentum and its errors",
                      round_up(zero::feedback_bytes(chunk.count, ranks,
                                                    work_.partition.codecs.local_steps),
                               kPage));
        });
    }

    // Of layers that a step visits more than once: written at the first visit, read at the others.
    void place_second_shards() {
        result_.second_shards.assign(work_.layers.size(), {});
        if (!work_.partition.keeps_second_shards()) return;
        bool trains_below = false;
        for (size_t l = 0; l < work_.layers.size(); ++l) {
            const model::Layer& layer = work_.layers[l];
            trains_below = trains_below || layer.trainable_elements > 0;
            const bool goes_back = layer.kind == model::LayerKind::block && trains_below;
            const bool table = layer.kind == model::LayerKind::embedding && tied_;
            if (result_.groups == 1 && !goes_back && !table) continue;
            for (const zero::ByteRun& run :
                 zero::second_shards(work_.partition, layer, work_.numerics.compute)) {
                Tier home = Tier::nvme;
                claim(home, "second shards of weights", round_up(run.bytes, kPage));
                result_.second_shards[l].push_back(home);
            }
        }
    }

    void choose_spills() {
        result_.spills.assign(spills_.size(), Tier::nvme);
        if (result_.groups == 1) return;
        for (size_t i = 0; i < spills_.size(); ++i) {
            const int64_t copies = tied_ && spills_[i].layer == 0 ? 2 : 1;
            claim(result_.spills[i], "gradient accumulators", copies * spills_[i].count * 4);
        }
    }

    // The weight of a split master is half of a version, and a durable version is on NVMe.
    bool stores_weights() const { return work_.state.split && request_.durable; }
    // The least share of the state on NVMe; none: what the budget asks.
    std::optional<double> given_fraction() const {
        return request_.durable ? 1 : request_.swap.state_on_nvme;
    }
    bool fraction_is_given() const { return has_nvme() && given_fraction(); }
    bool all_speculate() const { return request_.swap.speculate == Speculate::all; }
    // The weight of a split master is half of the old version, so a speculative update must leave
    // it as it was. A weight that lives on the device has no second place.
    bool can_speculate(const Chunk& chunk) const {
        return chunk.trainable &&
               !(work_.state.split && result_.resident[static_cast<size_t>(chunk.layer)]);
    }
    bool must_speculate(const Chunk& chunk) const {
        return all_speculate() && can_speculate(chunk);
    }
    // State in memory is updated in place, unless it is speculative: then it has two slots.
    int64_t state_bytes(const Chunk& chunk) const {
        return must_speculate(chunk) ? 2 * bytes_of(Class::state_staging)
                                     : planner::state_bytes(chunk);
    }
    int64_t weight_bytes(const Chunk& chunk) const {
        return work_.state.split && must_speculate(chunk)
                   ? 2 * bytes_of(Class::weight_staging)
                   : chunk.count * size_of(work_.numerics.compute);
    }
    // Spreads the state that has to be on NVMe evenly over the layers: the drives and the memory
    // then share every phase of a step.
    void place_states() {
        double trainable = 0, waiting = 0, bytes = 0;
        for_trainable(
            [&](const Chunk& chunk, Placement::ChunkHomes&) { trainable += double(chunk.count); });
        const auto for_waiting = [&](const auto& body) {
            for_updated_on_host([&](const Chunk& chunk, Placement::ChunkHomes& homes) {
                if (homes.state != Tier::host) body(chunk, homes);
            });
        };
        for_waiting([&](const Chunk& chunk, Placement::ChunkHomes&) {
            waiting += double(chunk.count);
            bytes += double(state_bytes(chunk));
        });
        if (waiting == 0) return;
        const double wanted = has_nvme() ? given_fraction().value_or(0) * trainable : 0;
        const double room = double(host().limit() - host().spent());
        const double too_much = has_nvme() ? std::clamp(1 - room / bytes, 0.0, 1.0) : 0;
        const double share = std::max(too_much, std::min(1.0, wanted / waiting));
        double seen = 0, stored = 0;
        for_waiting([&](const Chunk& chunk, Placement::ChunkHomes& homes) {
            const auto count = double(chunk.count);
            seen += count;
            if (stored < share * seen || !claim(homes.state, kState, state_bytes(chunk)))
                stored += count;
        });
        // A last part of memory may be left.
        for_waiting([&](const Chunk& chunk, Placement::ChunkHomes& homes) {
            const auto count = double(chunk.count);
            if (stored - count >= wanted && claim(homes.state, kState, state_bytes(chunk)))
                stored -= count;
        });
    }

    // Spread evenly over the layers, so that what is left for after the outcome is, too.
    void place_speculation() {
        if (request_.swap.speculate == Speculate::off) return;
        const double fraction = all_speculate() ? 1
                                                : expected_speculative_fraction(
                                                      request_, work_, chunks_, result_, machine_);
        SpeculationRoom room(request_, work_, chunks_, spills_, result_);
        double wanted = 0;
        for_updated_on_host([&](const Chunk& chunk, const Placement::ChunkHomes& homes) {
            if (can_speculate(chunk)) wanted += double(room.bytes_for(chunk, homes));
        });
        const double stored = all_speculate() ? 1
                              : wanted > 0    ? std::min(fraction, double(room.left()) / wanted)
                                              : fraction;
        double due = 0;
        for_updated_on_host([&](const Chunk& chunk, Placement::ChunkHomes& homes) {
            due += room.bytes_for(chunk, homes) > 0 ? stored : fraction;
            if (due < 1 || !may_speculate(chunk, homes, room)) return;
            homes.speculative = true;
            due -= 1;
        });
    }

    // State in memory is updated speculatively where memory to spare is known, and where updates do
    // not take the cores that compute: beside a GPU. Takes the second slots of what it allows.
    bool may_speculate(const Chunk& chunk, const Placement::ChunkHomes& homes,
                       SpeculationRoom& room) {
        if (all_speculate() || !can_speculate(chunk)) return can_speculate(chunk);
        const bool in_memory = homes.state == Tier::host;
        const bool may_in_memory = !machine_.computes_on_host &&
                                   request_.budgets.host_bytes != kUnlimited &&
                                   !is_remainder(chunk);
        if (in_memory && !may_in_memory) return false;
        const int64_t state =
            in_memory ? 2 * bytes_of(Class::state_staging) - state_bytes(chunk) : 0;
        const bool two_weights = work_.state.split && homes.weight == Tier::host;
        const int64_t weights =
            two_weights ? 2 * bytes_of(Class::weight_staging) - weight_bytes(chunk) : 0;
        const int64_t stored = room.bytes_for(chunk, homes);
        if (host().spent() + state + weights > host().limit() || stored > room.left()) return false;
        room.take(stored);
        if (in_memory) host().need(kState, state);
        if (two_weights) host().need("weights", weights);
        return true;
    }

    const PlanRequest& request_;
    const Workload& work_;
    const std::vector<Chunk>& chunks_;
    const std::vector<AccumulatorSpill>& spills_;
    const ToSave to_save_;
    const size_t yielded_;
    const int64_t micro_batches_;
    const bool tied_;
    const cost::Measurements& machine_;
    Placement result_;
};

}  // namespace

std::optional<int64_t> blocks_asked_to_save(const PlanRequest& request, model::Saved what) {
    const SwapConfig& swap = request.swap;
    return model::OfSaved<std::optional<int64_t>>{swap.save_attention, swap.save_mlp,
                                                  swap.save_projections}[at(what)];
}

Placement place(const PlanRequest& request, const Workload& work, const std::vector<Chunk>& chunks,
                const std::vector<AccumulatorSpill>& spills, const cost::Measurements& machine,
                const ToSave& to_save, size_t yielded) {
    return Placer(request, work, chunks, spills, machine, to_save, yielded).make();
}

}  // namespace ferry::planner
