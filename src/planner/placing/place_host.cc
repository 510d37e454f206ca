// What a placement keeps in host memory and on NVMe: greedy, in the order of bytes moved per byte
// kept.
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "place_impl.h"
#include "speculation.h"
#include "step_seconds.h"

namespace ferry::planner {

using swap::Tier;

namespace {

class HostPlacer : Placing {
public:
    HostPlacer(const ToPlace& what, Placement& result) : Placing(what, result) {}

    void make() {
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
    }

private:
    Budget& host() { return result_.host; }
    int64_t group_size() const { return micro_batches_ / result_.groups; }

    void reserve_host_buffers() {
        const int64_t leaves = leaves_of(chunks_, work_.partition);
        host().need({RowKind::report, "norm leaves and report"},
                    round_up(report_room(leaves, work_.report_bytes), kPage));
        if (work_.matrix_workspace() > 0)
            host().need({RowKind::newton_schulz, "workspace of Newton-Schulz"},
                        round_up(work_.matrix_workspace(), kPage));
        reserve(Class::host_tokens, {RowKind::tokens, "token batches"},
                std::min<int64_t>(2, group_size()));
        // One of each even without NVMe: first contents and the hash pass through them.
        reserve(Class::state_staging, staging_row(), 1);
        reserve(Class::weight_staging, staging_row(), 1);
        if (has_feedback() && work_.needs.maps_host)
            reserve(Class::codes_staging, staging_row(), 2 * kTurnsAtOnce);
        if (!has_nvme()) return;
        reserve(Class::gradient_staging, staging_row(), 1);
        if (std::count(result_.inputs.begin(), result_.inputs.end(), Tier::nvme) > 0) {
            reserve(Class::input_staging, staging_row(), 1);
        }
        if (result_.groups > 1) reserve(Class::spill_staging, staging_row(), 1);
        if (has_feedback()) reserve(Class::feedback_staging, staging_row(), kTurnsAtOnce + 1);
        if (work_.partition.keeps_second_shards()) reserve(Class::second_staging, staging_row(), 1);
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

    static RowName staging_row() { return {RowKind::staging, "staging buffers"}; }

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

    void reserve(Class c, const RowName& row, int64_t count) {
        result_.counts[at(c)] = count;
        host().need(row, count * bytes_of(c));
    }

    void deepen(Class c, int64_t most, int64_t most_spent) {
        int64_t& count = result_.counts[at(c)];
        while (count > 0 && count < most && host().spent() < most_spent &&
               host().take(staging_row(), bytes_of(c))) {
            ++count;
        }
    }

    // Without NVMe everything has to be in host memory, fits or not: the sum is the smallest
    // budget.
    bool claim(Tier& home, const RowName& row, int64_t bytes) {
        if (!has_nvme()) host().need(row, bytes);
        if (has_nvme() && !host().take(row, bytes)) return false;
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
                claim(homes.state, state_row(), state_bytes(chunk));
        });
        for (size_t c = 0; c < chunks_.size(); ++c) {
            if (result_.resident[static_cast<size_t>(chunks_[c].layer)]) {
                result_.chunks[c].weight = Tier::device;
            } else if (!stores_weights() || !chunks_[c].trainable) {
                claim(result_.chunks[c].weight, {RowKind::weights, "weights"},
                      weight_bytes(chunks_[c]));
            }
        }
        place_second_shards();
        choose_spills();
        for_updated_on_host([&](const Chunk& chunk, Placement::ChunkHomes& homes) {
            claim(homes.gradient, {RowKind::gradients, "gradients"},
                  chunk.count * size_of(work_.numerics.wire));
        });
        place_feedback();
        for (Tier& input : result_.inputs) {
            if (input != Tier::device)
                claim(input, {RowKind::block_inputs, "block inputs"}, bytes_of(Class::activation));
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
            claim(homes.kept, {RowKind::gradients, "gradients"},
                  round_up(ranks * chunk.count * size_of(work_.numerics.wire), kPage));
        });
        for_turns([&](const Chunk& chunk, Placement::ChunkHomes& homes) {
            due += stored;
            if (due >= 1)
                due -= 1;
            else
                claim(homes.feedback, {RowKind::momentum, "momentum and its errors"},
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
                claim(home, {RowKind::second_shards, "second shards of weights"},
                      round_up(run.bytes, kPage));
                result_.second_shards[l].push_back(home);
            }
        }
    }

    void choose_spills() {
        result_.spills.assign(spills_.size(), Tier::nvme);
        if (result_.groups == 1) return;
        for (size_t i = 0; i < spills_.size(); ++i) {
            const int64_t copies = tied_ && spills_[i].layer == 0 ? 2 : 1;
            claim(result_.spills[i], {RowKind::accumulators, "gradient accumulators"},
                  copies * spills_[i].count * 4);
        }
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
            if (stored < share * seen || !claim(homes.state, state_row(), state_bytes(chunk)))
                stored += count;
        });
        // A last part of memory may be left.
        for_waiting([&](const Chunk& chunk, Placement::ChunkHomes& homes) {
            const auto count = double(chunk.count);
            if (stored - count >= wanted && claim(homes.state, state_row(), state_bytes(chunk)))
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
        if (in_memory) host().need(state_row(), state);
        if (two_weights) host().need({RowKind::weights, "weights"}, weights);
        return true;
    }
};

}  // namespace

void place_behind_device(const ToPlace& what, Placement& result) {
    HostPlacer(what, result).make();
}

}  // namespace ferry::planner
