#include "cost/layout_seconds.h"

#include <algorithm>
#include <numeric>

#include "cost/rank_part.h"
#include "ferry/error.h"
#include "ferry/units.h"

namespace ferry::cost {
namespace {

// Backward computes forward again, then two products for each of forward's. Forward, forward again,
// gradients of inputs and of weights take as long each.
constexpr double kPassesBackward = 3;
constexpr double kPasses = 1 + kPassesBackward;
// The head: forward, and both gradients in the same visit.
constexpr double kPassesOfHead = 3;
// What a block's kernels hold beside its input, in block inputs: what all of a token is in, and
// queries, keys, values, the MLP's width and their gradients.
constexpr double kWorkingWhole = 4, kWorkingDivided = 20;
// Of a token's loss: what ranks that have rows of the vocabulary tell each other.
constexpr double kToldBytes = 24;

// Times that all rows of the residual stream but a rank's own go one way, gathered or scattered, of
// a micro-batch: in the residual type, and in the compute type. A sum is both ways.
struct OneWays {
    double residual = 0, compute = 0;
};
// Forward, backward and what it computes again, together.
struct StreamTraffic {
    OneWays block{}, embedding{}, head{};
};
// Each rank has the whole stream: sums of what attention and the MLP give, one of them computed
// again, and of their gradients (Shoeybi et al., Megatron-LM, 2019).
constexpr StreamTraffic kWholeRows{
    .block = {.residual = 6, .compute = 4}, .embedding = {.residual = 2}, .head = {.compute = 2}};
// Each has a part of the rows: products gather what is normed and scatter what they give, and
// backward the reverse (Korthikanti et al., Reducing Activation Recomputation, 2022). What is
// normed is gathered once more for the products that backward computes again.
constexpr StreamTraffic kPartOfRows{
    .block = {.residual = 3, .compute = 8}, .embedding = {.residual = 2}, .head = {.compute = 2}};

class Weigher {
public:
    Weigher(const ModelSizes& model, const Cluster& cluster, const Layout& layout)
        : m_(model), c_(cluster), found_(layout), has_(model, found_) {}

    Weighed weigh() {
        time_slots();
        count_memory();
        const double pipelined = pass_through();
        const double exchanged = exchange();
        const double updated = update();
        // Updates run beside backward and the next forward; what they need beyond shows.
        found_.update_seconds = std::max(0.0, updated - pipelined);
        found_.exchange_seconds += exchanged;
        found_.seconds = pipelined + exchanged + found_.update_seconds;
        return {found_, fits()};
    }

private:
    double bytes_of(const OneWays& ways) const {
        return ways.residual * has_.one_way(m_.residual) +
               ways.compute * has_.one_way(m_.element.weight);
    }

    double link() const { return comm_rate(c_.measured); }
    double network() const { return c_.network_bytes_per_s / static_cast<double>(c_.on_a_host); }
    bool crosses_hosts(int64_t ranks) const { return ranks > c_.on_a_host; }

    // Of so many ranks, each `apart` from the next, those on a host.
    int64_t of_a_group_here(int64_t ranks, int64_t apart) const {
        return std::clamp<int64_t>(c_.on_a_host / apart, 1, ranks);
    }
    // Of neighbours that share tensors; a host may begin within a group.
    int64_t slices_here() const { return std::gcd(found_.tensor, c_.on_a_host); }
    double group_rate(int64_t ranks, int64_t apart) const {
        return mean_rate(ranks, of_a_group_here(ranks, apart), link(), network());
    }
    double across(double bytes, int64_t ranks, int64_t apart) const {
        const int64_t here = of_a_group_here(ranks, apart);
        if (ranks == here) return 0;
        return bytes * static_cast<double>(ranks - here) / static_cast<double>(ranks - 1);
    }

    // What the slowest stage takes of these: the cut evens a head out as far as whole blocks allow.
    double slowest(double block, double embedding, double head) const {
        const double each = static_cast<double>(m_.blocks);
        return std::max({(each * block + embedding + head) / has_.stages(), has_.blocks() * block,
                         head + block});
    }

    // Of a micro-batch on the slowest stage, with what its kernels send from within.
    void time_slots() {
        const auto all = static_cast<double>(has_.tokens());
        const double rate = c_.measured.assumed_flops_per_s;
        const double block = kPasses * all * has_.block_flops() / rate;
        const double head = kPassesOfHead * 2 * all * static_cast<double>(has_.table()) / rate;
        const double within = mean_rate(found_.tensor, slices_here(), link(), network());
        const StreamTraffic& stream = m_.shares_rows ? kPartOfRows : kWholeRows;
        const double told = kToldBytes * all * static_cast<double>(found_.tensor - 1);
        const double sums = bytes_of(stream.block) + of_few_keys(),
                     of_embedding = bytes_of(stream.embedding),
                     of_head = bytes_of(stream.head) + told, of_sequences = of_heads();
        const double computed = slowest(block, 0, head);
        const double sequences_s =
            found_.sequence > 1 ? of_sequences / group_rate(found_.sequence, found_.tensor) : 0;
        slot_s_ = slowest(block + sums / within + sequences_s, of_embedding / within,
                          head + of_head / within);
        const double edges =
            found_.pipeline == 1 ? of_embedding + of_head : std::max(of_embedding, of_head);
        found_.tensor_bytes = has_.micro_batches() * (has_.blocks() * sums + edges);
        found_.sequence_bytes = has_.micro_batches() * has_.blocks() * of_sequences;
        if (const int64_t here = slices_here(); here < found_.tensor)
            found_.across_hosts_bytes += found_.tensor_bytes *
                                         static_cast<double>(found_.tensor - here) /
                                         static_cast<double>(found_.tensor - 1);
        found_.across_hosts_bytes += across(found_.sequence_bytes, found_.sequence, found_.tensor);
        found_.compute_seconds = has_.micro_batches() * computed;
        found_.exchange_seconds = has_.micro_batches() * (slot_s_ - computed);
    }
    // Gradients of a head of keys that several have.
    double of_few_keys() const {
        if (found_.tensor <= m_.kv_heads) return 0;
        return static_cast<double>((found_.tensor - 1) * has_.tokens() * found_.sequence * 2 *
                                   m_.head_dim) *
               has_.width();
    }
    // Queries, keys and values to the ranks that have their heads, and the output back; backward
    // twice that (Jacobs et al., DeepSpeed Ulysses, 2023).
    double of_heads() const {
        const int64_t keys = std::max<int64_t>(m_.kv_heads / found_.tensor, 1),
                      queries = m_.heads / found_.tensor / keys;
        const int64_t columns = ceil_div(keys, found_.sequence) * m_.head_dim * (2 * queries + 2);
        return 3 * static_cast<double>((found_.sequence - 1) * has_.tokens() * columns) *
               has_.width();
    }

    // ------------------------------------------------------------ memory

    // Block inputs of groups between their forward and their backward, of the stage that has most.
    double input_groups() const {
        switch (found_.order) {
            case Order::one_f_one_b:
            case Order::zero_bubble:
                return std::min(has_.stages(), has_.groups());
            case Order::interleaved:
                // Of P V virtual stages as many as 1F1B has of stages, and P - 1 more until the
                // first comes back (Narayanan et al., Efficient Large-Scale Language Model
                // Training, 2021).
                return std::min(has_.stages() + (has_.stages() - 1) / has_.virtual_stages(),
                                has_.groups());
            case Order::round_robin:
                return has_.groups();
        }
        bug("no such order");
    }

    // What the stages of zero bubble have under way: stage s inputs of P - s groups, and factors of
    // s + 1, which stay on its device (Qi et al., Zero Bubble Pipeline Parallelism, 2023: H1). The
    // sum is largest at an end, or where there are no more groups.
    struct UnderWay {
        double inputs = 0, factors = 0;  // the most of each
        double both = 0;                 // of a stage
    };
    UnderWay under_way() const {
        const double inputs = has_.blocks() * has_.group_size() * has_.input_bytes();
        UnderWay most{.inputs = input_groups() * inputs};
        most.both = most.inputs;
        if (found_.order != Order::zero_bubble) return most;
        const int64_t last = found_.pipeline - 1;
        const double factors = has_.blocks() * has_.group_size() * has_.factor_bytes();
        for (const int64_t s : {int64_t{0}, last, std::min(found_.groups - 1, last),
                                std::max<int64_t>(found_.pipeline - found_.groups, 0)}) {
            const auto forward = static_cast<double>(std::min(found_.pipeline - s, found_.groups)),
                       left = static_cast<double>(std::min(s + 1, found_.groups));
            const double kept = s == 0 ? factors / has_.blocks() : left * factors;
            most.factors = std::max(most.factors, kept);
            most.both = std::max(most.both, forward * inputs + kept);
        }
        return most;
    }

    double& home(StateOn tier) {
        switch (tier) {
            case StateOn::device:
                return found_.device_bytes;
            case StateOn::host:
                return found_.host_bytes;
            case StateOn::nvme:
                return found_.nvme_bytes;
        }
        bug("no such tier");
    }

    void count_memory() {
        const double of_block = 2 * static_cast<double>(has_.block()),
                     edge = static_cast<double>(has_.edge());
        found_.device_bytes =
            (kWorkingWhole + kWorkingDivided / has_.slices()) * has_.stream_bytes() +
            (of_block + edge) * (has_.width() + 4);
        // A group's at the layer where it is; between stages what arrives and what leaves.
        found_.device_bytes +=
            (found_.pipeline > 1 ? 2 : 1) * has_.group_size() * has_.input_bytes();
        const double state = has_.own() * m_.element.state,
                     gradient = has_.own() * static_cast<double>(m_.element.wire);
        found_.state_bytes = static_cast<int64_t>(has_.own() * m_.element.state_and_gradient());
        home(found_.state) += state;
        if (found_.state != StateOn::nvme) home(found_.state) += gradient;
        (found_.weights_stay ? found_.device_bytes : found_.host_bytes) +=
            has_.kept() * has_.width();
        // Accumulators are in the host between two groups, whole on every rank.
        if (found_.groups > 1) found_.host_bytes += accumulator_bytes(has_.elements());
        const UnderWay most = under_way();
        if (most.both <= c_.device_bytes - found_.device_bytes) {
            found_.device_bytes += most.both;
        } else {
            found_.device_bytes += most.factors;
            found_.host_bytes += most.inputs;
            const double all = has_.micro_batches() * has_.blocks() * has_.input_bytes();
            out_bytes_ += all;
            in_bytes_ += all;
        }
        if (found_.state != StateOn::nvme) return;
        // Gradients of stored state stay in the host where it has room, as in a plan.
        const auto here = static_cast<double>(c_.here());
        gradients_stored_ = here * (found_.host_bytes + gradient) > c_.host_bytes;
        (gradients_stored_ ? found_.nvme_bytes : found_.host_bytes) += gradient;
    }

    // ------------------------------------------------------------ time

    // All micro-batches through all stages.
    double pass_through() {
        if (found_.pipeline == 1) return has_.micro_batches() * slot_s_;
        const int64_t of_a_stage = found_.tensor * has_.sharer_count();
        const bool crosses = crosses_hosts(c_.ranks);
        const int64_t at_once = std::min(of_a_stage, c_.on_a_host);
        const double rate =
            crosses ? c_.network_bytes_per_s / static_cast<double>(at_once) : link();
        const double passed_s = has_.input_bytes() / rate + (crosses ? c_.latency_s : 0);
        found_.pipeline_bytes =
            2 * has_.virtual_stages() * has_.micro_batches() * has_.input_bytes();
        // A tied table's gradient comes back from the last stage, once.
        const double table =
            m_.tied ? static_cast<double>(has_.padded(has_.table())) * has_.width() / has_.sharers()
                    : 0;
        found_.pipeline_bytes += table;
        if (crosses) found_.across_hosts_bytes += found_.pipeline_bytes;
        found_.exchange_seconds += table / rate;
        // A slot is no shorter than what it passes, each way on its own.
        const double slot = std::max(slot_s_, 2 * has_.virtual_stages() * passed_s);
        found_.exchange_seconds += has_.micro_batches() * (slot - slot_s_);
        const Passing passing{.order = found_.order,
                              .stages = found_.pipeline,
                              .groups = found_.groups,
                              .group_size = found_.micro_batches / found_.groups,
                              .virtual_stages = found_.virtual_stages,
                              .blocks = has_.blocks_of_one()};
        const double waits = waiting_visits(passing) / passing.visits() * has_.micro_batches();
        found_.bubble_seconds = waits * slot + (has_.stages() - 1) * 2 * passed_s;
        return has_.micro_batches() * slot + found_.bubble_seconds + table / rate;
    }

    SharedTraffic shared(int64_t elements) const {
        const zero::Partition partition{.ranks = static_cast<int>(has_.sharer_count()),
                                        .sharding = has_.sharding()};
        const int64_t shard = elements / has_.sharer_count(), gradient = shard * m_.element.wire;
        return shared_traffic(
            partition, {.weights = shard * m_.element.weight, .part = gradient, .sum = gradient},
            zero::Exchanged::gradients);
    }

    // State, gradients and weights among the ranks of a slice: what the pass that records them does
    // not hide. Of a pipeline the last group alone hides gradients, else all micro-batches do,
    // layer by layer. Stage 3 gathers weights at each visit of a group, the head's and the
    // embedding's at one of both. 1 and 2 gather once, at the first visit after the update, so
    // beside the first group's forward (Recorder::fetch_updated_weights). At 0 the sums come back
    // to all as soon as they are made, so beside backward (Recorder::receive_oldest; Rajbhandari et
    // al., ZeRO, 2020).
    double exchange() {
        if (has_.sharer_count() == 1) return 0;
        const double up = shared(has_.all()).weights.bytes(),
                     again = shared(has_.in_blocks()).again.bytes(),
                     gradient = shared(has_.all()).update.bytes();
        const double rate = group_rate(has_.sharer_count(), found_.tensor);
        const double forward = has_.group_size() * slot_s_ / kPasses,
                     backward = kPassesBackward * forward;
        const double gathers = has_.shares_weights() ? has_.groups() : 1;
        found_.zero_bytes = gathers * (up + again) + gradient;
        found_.across_hosts_bytes += across(found_.zero_bytes, has_.sharer_count(), found_.tensor);
        const double operations =
            static_cast<double>(m_.blocks) / has_.stages() *
            (crosses_hosts(found_.tensor * has_.sharer_count()) ? c_.latency_s : 0);
        const auto shows = [&](double bytes, double hides) {
            return std::max(0.0, bytes / rate + operations - hides);
        };
        const double last = shows(gradient + again, backward);
        if (!has_.shares_weights()) return shows(up, forward) + last;
        return gathers * shows(up, forward) + (gathers - 1) * shows(again, backward) + last;
    }

    // What is copied and updated beside the products.
    double update() {
        const double moved = update_bytes(has_.own(), m_.element);
        const Measurements& rates = c_.measured;
        if (!found_.weights_stay) in_bytes_ += has_.groups() * has_.read_in_a_group();
        // Each further group moves the accumulators.
        const double accumulators = (has_.groups() - 1) * accumulator_bytes(has_.elements());
        in_bytes_ += accumulators;
        out_bytes_ += accumulators;
        if (found_.state != StateOn::device) {
            const MovedBytes by_host =
                moved_by({.state = has_.own() * m_.element.state,
                          .gradient = has_.own() * static_cast<double>(m_.element.wire),
                          .weight = has_.own() * has_.width(),
                          .reads_weight = m_.element.split,
                          .state_stored = found_.state == StateOn::nvme,
                          .gradient_stored = gradients_stored_,
                          .weight_on_device = found_.weights_stay});
            in_bytes_ += by_host.up;
            out_bytes_ += by_host.down;
            found_.stored_bytes = by_host.stored;
        }
        found_.copied_bytes = in_bytes_ + out_bytes_;
        const double copying = std::max(in_bytes_, out_bytes_) / rates.copy_bytes_per_s;
        if (found_.state == StateOn::device)
            return std::max(moved / rates.device_bytes_per_s, copying);
        const double stored = found_.stored_bytes;
        return std::max(
            {copying,
             dram_bytes(moved, found_.copied_bytes, stored, rates) / rates.dram_bytes_per_s,
             stored > 0 ? stored / rates.nvme_bytes_per_s : 0});
    }

    bool fits() const {
        const auto here = static_cast<double>(c_.here());
        return found_.device_bytes <= c_.device_bytes &&
               here * found_.host_bytes <= c_.host_bytes &&
               here * found_.nvme_bytes <= c_.nvme_bytes;
    }

    const ModelSizes& m_;
    const Cluster& c_;
    Layout found_;
    const RankPart has_;
    double slot_s_ = 0;  // a micro-batch's forward and backward on the slowest stage
    bool gradients_stored_ = false;
    double in_bytes_ = 0, out_bytes_ = 0;  // copied to the device, and from it
};

}  // namespace

double mean_rate(int64_t ranks, int64_t here, double inside_host, double outside) {
    if (ranks == here) return inside_host;
    const double away = static_cast<double>(ranks - here) / static_cast<double>(ranks - 1);
    return 1 / (away / outside + (1 - away) / inside_host);
}

double waiting_visits(const Passing& of) {
    // Of a group in a virtual stage, which it goes through layer by layer; and of these the ones
    // until the next stage has something to do.
    const auto all = static_cast<double>(of.blocks * of.group_size),
               first = static_cast<double>((of.blocks - 1) * of.group_size + 1);
    const auto hops = static_cast<double>(of.stages - 1);
    switch (of.order) {
        case Order::one_f_one_b:  // Narayanan et al., PipeDream, 2019
        case Order::interleaved:  // virtual stages are V times as short (the same, 2021)
            return hops * first;
        case Order::zero_bubble: {
            // From stage to stage a forward and a backward of inputs are waited for. Of each
            // further group that is left behind weights' gradients fill one hop, but for its first
            // forward (Qi et al., Zero Bubble Pipeline Parallelism, 2023).
            constexpr double kForward = 1 / kPasses, kWeights = 1 / kPasses;
            const double hop = (1 - kWeights) * first;
            const double filled = std::min(hops, static_cast<double>(of.groups - 1));
            return filled * std::max(kForward * first, hop - kWeights * all) +
                   (hops - filled) * hop;
        }
        case Order::round_robin: {
            // The first stage begins its next virtual stage when the last one has passed something
            // on (Lamy-Poirier, Breadth-First Pipeline Parallelism, 2022).
            const double late =
                static_cast<double>(of.stages) * first - static_cast<double>(of.groups) * all;
            return hops * first + static_cast<double>(of.virtual_stages - 1) * std::max(0.0, late);
        }
    }
    bug("no such order");
}

Weighed weigh(const ModelSizes& model, const Cluster& cluster, Layout layout) {
    return Weigher(model, cluster, layout).weigh();
}

}  // namespace ferry::cost
