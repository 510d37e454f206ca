#include "cost/layouts.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <numeric>
#include <tuple>

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
// A shard is a multiple of so many elements.
constexpr int64_t kShardUnit = 4096;
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

// Of the largest virtual stage.
int64_t blocks_of_one(const ModelSizes& model, const Layout& layout) {
    return ceil_div(model.blocks, layout.pipeline * layout.virtual_stages);
}

class Weigher {
public:
    Weigher(const ModelSizes& model, const Cluster& cluster, const Layout& layout)
        : m_(model), c_(cluster), found_(layout) {}

    Weighed weigh() {
        count_elements();
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
    double stages() const { return static_cast<double>(found_.pipeline); }
    double slices() const { return static_cast<double>(found_.tensor); }
    // Of a slice: all of a stage share state and gradients.
    int64_t sharer_count() const { return found_.replicas * found_.sequence; }
    double sharers() const { return static_cast<double>(sharer_count()); }
    double micro_batches() const { return static_cast<double>(found_.micro_batches); }
    double groups() const { return static_cast<double>(found_.groups); }
    double virtual_stages() const { return static_cast<double>(found_.virtual_stages); }
    double group_size() const { return micro_batches() / groups(); }
    bool shares_weights() const { return found_.zero_stage == 3; }
    // Of a rank's part of a sequence.
    int64_t tokens() const { return found_.micro_batch * m_.sequence / found_.sequence; }
    double blocks() const {
        return static_cast<double>(blocks_of_one(m_, found_) * found_.virtual_stages);
    }
    double width() const { return static_cast<double>(m_.element.weight); }
    // Of a micro-batch: what a rank has of the residual stream, and one way of its rows.
    double stream_bytes() const { return static_cast<double>(tokens() * m_.hidden * m_.residual); }
    double input_bytes() const { return stream_bytes() / (m_.shares_rows ? slices() : 1); }
    double one_way(int64_t width) const {
        const int64_t rows = ceil_div(tokens(), found_.tensor);
        return static_cast<double>((found_.tensor - 1) * rows * m_.hidden * width);
    }
    double bytes_of(const OneWays& ways) const {
        return ways.residual * one_way(m_.residual) + ways.compute * one_way(m_.element.weight);
    }

    // Cut into shards, one a rank.
    int64_t padded(int64_t elements) const {
        return round_up(elements, kShardUnit * sharer_count());
    }
    // Heads of keys that a rank has, those that are zeros counted; and its columns of the MLP.
    int64_t own_keys() const { return ceil_div(m_.kv_heads, found_.tensor); }
    int64_t own_inner() const { return ceil_div(m_.intermediate, found_.tensor); }
    // Of a rank: of what queries have, of what keys and values have, of what the MLP has. Heads of
    // keys that several ranks have are whole on each, and their queries divided.
    int64_t of_queries(int64_t elements) const {
        return found_.tensor > m_.kv_heads ? ceil_div(elements, found_.tensor) : of_keys(elements);
    }
    int64_t of_keys(int64_t elements) const { return ceil_div(elements, m_.kv_heads) * own_keys(); }
    int64_t of_inner(int64_t elements) const {
        return m_.intermediate == 0 ? ceil_div(elements, found_.tensor)
                                    : elements / m_.intermediate * own_inner();
    }
    double head_share() const {
        const auto keys = static_cast<double>(m_.kv_heads);
        return found_.tensor > m_.kv_heads ? 1 / slices() : static_cast<double>(own_keys()) / keys;
    }
    int64_t on_a_rank(const LayerElements& layer) const {
        const int64_t keys = of_keys(layer.of_keys),
                      divided = of_inner(layer.inner) + of_queries(layer.of_queries);
        // What several ranks have is a segment of its own.
        const bool apart = found_.tensor > m_.kv_heads;
        return (apart ? padded(divided) + padded(keys) : padded(divided + keys)) +
               padded(layer.whole);
    }

    // A rank's, of the stage with a table. A tied one's state is on the first stage.
    void count_elements() {
        table_ = ceil_div(m_.vocab, found_.tensor) * m_.hidden;
        block_ = on_a_rank(m_.block);
        const int64_t embedding = padded(table_) + padded(m_.embedding_whole),
                      head = (m_.tied ? 0 : padded(table_)) + padded(m_.head_whole);
        const int64_t edges = found_.pipeline == 1 ? embedding + head : std::max(embedding, head);
        edge_ = std::max(embedding, head);
        in_blocks_ = blocks_of_one(m_, found_) * found_.virtual_stages * block_;
        elements_ = in_blocks_ + edges;
    }
    double elements() const { return static_cast<double>(elements_); }
    // Of these, what a rank updates, and whose weights it keeps.
    int64_t own_count() const {
        return found_.zero_stage >= 1 ? elements_ / sharer_count() : elements_;
    }
    double own() const { return static_cast<double>(own_count()); }
    double kept() const { return shares_weights() ? elements() / sharers() : elements(); }

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

    // Of a block and a token, forward.
    double block_flops() const {
        const int64_t elements =
            of_inner(m_.block.inner) + of_queries(m_.block.of_queries) + of_keys(m_.block.of_keys);
        return 2 * static_cast<double>(elements) + m_.attention_flops * head_share();
    }

    // What the slowest stage takes of these: the cut evens a head out as far as whole blocks allow.
    double slowest(double block, double embedding, double head) const {
        const double each = static_cast<double>(m_.blocks);
        return std::max(
            {(each * block + embedding + head) / stages(), blocks() * block, head + block});
    }

    // Of a micro-batch on the slowest stage, with what its kernels send from within.
    void time_slots() {
        const auto all = static_cast<double>(tokens());
        const double rate = c_.measured.assumed_flops_per_s;
        const double block = kPasses * all * block_flops() / rate;
        const double head = kPassesOfHead * 2 * all * static_cast<double>(table_) / rate;
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
        found_.tensor_bytes = micro_batches() * (blocks() * sums + edges);
        found_.sequence_bytes = micro_batches() * blocks() * of_sequences;
        if (const int64_t here = slices_here(); here < found_.tensor)
            found_.across_hosts_bytes += found_.tensor_bytes *
                                         static_cast<double>(found_.tensor - here) /
                                         static_cast<double>(found_.tensor - 1);
        found_.across_hosts_bytes += across(found_.sequence_bytes, found_.sequence, found_.tensor);
        found_.compute_seconds = micro_batches() * computed;
        found_.exchange_seconds = micro_batches() * (slot_s_ - computed);
    }
    // Gradients of a head of keys that several have.
    double of_few_keys() const {
        if (found_.tensor <= m_.kv_heads) return 0;
        return static_cast<double>((found_.tensor - 1) * tokens() * found_.sequence * 2 *
                                   m_.head_dim) *
               width();
    }
    // Queries, keys and values to the ranks that have their heads, and the output back; backward
    // twice that (Jacobs et al., DeepSpeed Ulysses, 2023).
    double of_heads() const {
        const int64_t keys = std::max<int64_t>(m_.kv_heads / found_.tensor, 1),
                      queries = m_.heads / found_.tensor / keys;
        const int64_t columns = ceil_div(keys, found_.sequence) * m_.head_dim * (2 * queries + 2);
        return 3 * static_cast<double>((found_.sequence - 1) * tokens() * columns) * width();
    }

    // ------------------------------------------------------------ memory

    // Of a block and a micro-batch: what zero bubble keeps for the gradients of weights.
    double factor_bytes() const {
        const auto keys = static_cast<double>(own_keys() * m_.head_dim),
                   queries = static_cast<double>(m_.heads * m_.head_dim) * head_share(),
                   inner = static_cast<double>(of_inner(m_.mlp_columns));
        return static_cast<double>(tokens()) * width() *
               (4 * static_cast<double>(m_.hidden) + 2 * queries + 2 * keys + inner);
    }

    // Block inputs of groups between their forward and their backward, of the stage that has most.
    double input_groups() const {
        switch (found_.order) {
            case Order::one_f_one_b:
            case Order::zero_bubble:
                return std::min(stages(), groups());
            case Order::interleaved:
                // Of P V virtual stages as many as 1F1B has of stages, and P - 1 more until the
                // first comes back (Narayanan et al., Efficient Large-Scale Language Model
                // Training, 2021).
                return std::min(stages() + (stages() - 1) / virtual_stages(), groups());
            case Order::round_robin:
                return groups();
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
        const double inputs = blocks() * group_size() * input_bytes();
        UnderWay most{.inputs = input_groups() * inputs};
        most.both = most.inputs;
        if (found_.order != Order::zero_bubble) return most;
        const int64_t last = found_.pipeline - 1;
        const double factors = blocks() * group_size() * factor_bytes();
        for (const int64_t s : {int64_t{0}, last, std::min(found_.groups - 1, last),
                                std::max<int64_t>(found_.pipeline - found_.groups, 0)}) {
            const auto forward = static_cast<double>(std::min(found_.pipeline - s, found_.groups)),
                       left = static_cast<double>(std::min(s + 1, found_.groups));
            const double kept = s == 0 ? factors / blocks() : left * factors;
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
        const double of_block = 2 * static_cast<double>(block_), edge = static_cast<double>(edge_);
        found_.device_bytes = (kWorkingWhole + kWorkingDivided / slices()) * stream_bytes() +
                              (of_block + edge) * (width() + 4);
        // A group's at the layer where it is; between stages what arrives and what leaves.
        found_.device_bytes += (found_.pipeline > 1 ? 2 : 1) * group_size() * input_bytes();
        const double state = own() * m_.element.state_and_gradient();
        found_.state_bytes = static_cast<int64_t>(state);
        home(found_.state) += state;
        (found_.weights_stay ? found_.device_bytes : found_.host_bytes) += kept() * width();
        // Accumulators are in the host between two groups, whole on every rank.
        if (found_.groups > 1) found_.host_bytes += elements() * 4;
        const UnderWay most = under_way();
        if (most.both <= c_.device_bytes - found_.device_bytes) {
            found_.device_bytes += most.both;
        } else {
            found_.device_bytes += most.factors;
            found_.host_bytes += most.inputs;
            const double all = micro_batches() * blocks() * input_bytes();
            out_bytes_ += all;
            in_bytes_ += all;
        }
    }

    // ------------------------------------------------------------ time

    // All micro-batches through all stages.
    double pass_through() {
        if (found_.pipeline == 1) return micro_batches() * slot_s_;
        const int64_t of_a_stage = found_.tensor * sharer_count();
        const bool crosses = crosses_hosts(c_.ranks);
        const int64_t at_once = std::min(of_a_stage, c_.on_a_host);
        const double rate =
            crosses ? c_.network_bytes_per_s / static_cast<double>(at_once) : link();
        const double passed_s = input_bytes() / rate + (crosses ? c_.latency_s : 0);
        found_.pipeline_bytes = 2 * virtual_stages() * micro_batches() * input_bytes();
        // A tied table's gradient comes back from the last stage, once.
        const double table =
            m_.tied ? static_cast<double>(padded(table_)) * width() / sharers() : 0;
        found_.pipeline_bytes += table;
        if (crosses) found_.across_hosts_bytes += found_.pipeline_bytes;
        found_.exchange_seconds += table / rate;
        // A slot is no shorter than what it passes, each way on its own.
        const double slot = std::max(slot_s_, 2 * virtual_stages() * passed_s);
        found_.exchange_seconds += micro_batches() * (slot - slot_s_);
        const Passing passing{.order = found_.order,
                              .stages = found_.pipeline,
                              .groups = found_.groups,
                              .group_size = found_.micro_batches / found_.groups,
                              .virtual_stages = found_.virtual_stages,
                              .blocks = blocks_of_one(m_, found_)};
        const double waits = waiting_visits(passing) / passing.visits() * micro_batches();
        found_.bubble_seconds = waits * slot + (stages() - 1) * 2 * passed_s;
        return micro_batches() * slot + found_.bubble_seconds + table / rate;
    }

    // State, gradients and weights among the ranks of a slice: what the pass that records them does
    // not hide. Of a pipeline the last group alone hides gradients, else all micro-batches do,
    // layer by layer. Stage 3 gathers weights at each visit of a group, the head's and the
    // embedding's at one of both. 1 and 2 gather once, at the first visit after the update, so
    // beside the first group's forward (Recorder::fetch_updated_weights). At 0 the sums come back
    // to all as soon as they are made, so beside backward (Recorder::receive_oldest; Rajbhandari et
    // al., ZeRO, 2020).
    double exchange() {
        if (sharer_count() == 1) return 0;
        const double part = (sharers() - 1) / sharers();
        const double sums = found_.zero_stage == 0 ? 2 : 1;
        const double gradient = sums * part * elements() * static_cast<double>(m_.element.wire),
                     up = found_.zero_stage == 0 ? 0 : part * elements() * width(),
                     again =
                         shares_weights() ? part * static_cast<double>(in_blocks_) * width() : 0;
        const double rate = group_rate(sharer_count(), found_.tensor);
        const double forward = group_size() * slot_s_ / kPasses,
                     backward = kPassesBackward * forward;
        const double gathers = shares_weights() ? groups() : 1;
        found_.zero_bytes = gathers * (up + again) + gradient;
        found_.across_hosts_bytes += across(found_.zero_bytes, sharer_count(), found_.tensor);
        const double operations =
            static_cast<double>(m_.blocks) / stages() *
            (crosses_hosts(found_.tensor * sharer_count()) ? c_.latency_s : 0);
        const auto shows = [&](double bytes, double hides) {
            return std::max(0.0, bytes / rate + operations - hides);
        };
        const double last = shows(gradient + again, backward);
        if (!shares_weights()) return shows(up, forward) + last;
        return gathers * shows(up, forward) + (gathers - 1) * shows(again, backward) + last;
    }

    // What is copied and updated beside the products.
    double update() {
        const double wire = static_cast<double>(m_.element.wire);
        const double moved = update_bytes(own(), m_.element);
        const Measurements& rates = c_.measured;
        if (!found_.weights_stay) in_bytes_ += 2 * groups() * kept() * width();
        // Each further group moves the accumulators.
        in_bytes_ += (groups() - 1) * elements() * 4;
        out_bytes_ += (groups() - 1) * elements() * 4;
        if (found_.state != StateOn::device) {
            out_bytes_ += own() * wire;
            if (found_.weights_stay) in_bytes_ += own() * width();
        }
        if (found_.state == StateOn::nvme) found_.stored_bytes = 2 * own() * m_.element.state;
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
    // Of a rank: of a table and a block, of the larger edge, of all blocks, of all.
    int64_t table_ = 0, block_ = 0, edge_ = 0, in_blocks_ = 0, elements_ = 0;
    double slot_s_ = 0;  // a micro-batch's forward and backward on the slowest stage
    double in_bytes_ = 0, out_bytes_ = 0;  // copied to the device, and from it
};

template <class Body>
void for_divisors(int64_t of, int64_t most, const Body& body) {
    for (int64_t d = 1; d <= std::min(of, most); ++d)
        if (of % d == 0) body(d);
}

// Of the heads, the MLP and the vocabulary.
std::string heads_refusal(const ModelSizes& m, int64_t tensor) {
    const std::string heads = fmt::format("{} heads over {} of keys", m.heads, m.kv_heads);
    if (tensor > m.heads) return fmt::format("it has {} heads", m.heads);
    const bool shares_keys = tensor > m.kv_heads;
    if (shares_keys && (tensor % m.kv_heads != 0 || m.heads % tensor != 0))
        return heads + " cannot be divided so";
    if (m.has_patterns && !shares_keys && m.kv_heads % tensor != 0)
        return "a pattern's " + heads + " cannot be divided so";
    if (m.intermediate > 0 && tensor > m.intermediate) return "its MLP is not as wide";
    if (tensor > m.vocab) return "it has fewer tokens";
    return {};
}

class Search {
public:
    Search(const ModelSizes& model, const Cluster& cluster, const FixedLayout& fixed)
        : m_(model), c_(cluster), fixed_(fixed) {}

    FoundLayouts find(size_t most) {
        // A group that the user has chosen may span hosts; it is priced so.
        const int64_t widest = fixed_.tensor ? c_.ranks : c_.on_a_host;
        for_choices(fixed_.tensor, c_.ranks, widest, [&](int64_t tensor) {
            if (!may_slice(tensor)) return;
            const int64_t left = c_.ranks / tensor;
            for_choices(fixed_.sequence, left, left, [&](int64_t sequence) {
                if (!may_share_sequences(tensor, sequence)) return;
                for_choices(fixed_.pipeline, left / sequence, m_.blocks, [&](int64_t pipeline) {
                    const int64_t replicas = left / sequence / pipeline;
                    if (m_.sequences % replicas != 0) return;
                    find_of({.tensor = tensor,
                             .sequence = sequence,
                             .pipeline = pipeline,
                             .replicas = replicas});
                });
            });
        });
        // Of equally fast ones the simpler.
        std::ranges::sort(found_.best, {}, [](const Layout& l) {
            return std::tuple(l.seconds, l.pipeline, l.tensor, l.sequence);
        });
        if (found_.best.size() > most) found_.best.resize(most);
        if (found_.set_aside && found_.best.front().seconds <= found_.set_aside->seconds)
            found_.set_aside.reset();
        return std::move(found_);
    }

private:
    // The chosen one, where it divides `of`; else each divisor.
    template <class Body>
    static void for_choices(const std::optional<int64_t>& chosen, int64_t of, int64_t most,
                            const Body& body) {
        for_divisors(of, most, [&](int64_t d) {
            if (!chosen || d == *chosen) body(d);
        });
    }
    bool may_slice(int64_t tensor) const {
        if (fixed_.tensor) return heads_refusal(m_, tensor).empty();
        return refusal_of_tensor(m_, c_, tensor).empty();
    }
    bool may_share_sequences(int64_t tensor, int64_t sequence) const {
        if (sequence == 1) return true;
        return m_.sequence % sequence == 0 && m_.kv_heads % (tensor * sequence) == 0;
    }

    // The best of one way to divide the ranks.
    void find_of(Layout layout) {
        if (layout.pipeline == 1 && fixed_.needs_stages()) return;
        fastest_ = fastest_of_whole_state_ = {};
        const int64_t each = m_.sequences / layout.replicas;
        for_divisors(each, kMostSequences, [&](int64_t micro_batch) {
            layout.micro_batch = micro_batch;
            layout.micro_batches = each / micro_batch;
            if (layout.pipeline == 1) return weigh_tiers(layout);
            for (const Order order : fixed_.orders) {
                layout.order = order;
                layout.virtual_stages = 1;
                weigh_virtual_stages(layout);
            }
        });
        const Layout& whole = fastest_of_whole_state_;
        const bool others = fastest_.seconds > 0;
        if (whole.seconds > 0 && (!others || kArithmeticErrs * whole.seconds < fastest_.seconds))
            return found_.best.push_back(whole);
        if (!others) return;
        found_.best.push_back(fastest_);
        std::optional<Layout>& aside = found_.set_aside;
        if (whole.seconds > 0 && (!aside || whole.seconds < aside->seconds)) aside = whole;
    }

    // Several virtual stages have as many blocks each.
    void weigh_virtual_stages(Layout layout) {
        const bool interleaved = layout.order == Order::interleaved,
                   robin = layout.order == Order::round_robin;
        if (!interleaved && !robin) {
            if (fixed_.virtual_stages.value_or(1) == 1) weigh_groups(layout);
            return;
        }
        if (m_.blocks % layout.pipeline != 0) return;
        const int64_t of_a_stage = m_.blocks / layout.pipeline;
        for_choices(fixed_.virtual_stages, of_a_stage, of_a_stage, [&](int64_t count) {
            layout.virtual_stages = count;
            if (robin || count > 1) weigh_groups(layout);
        });
    }
    void weigh_groups(Layout layout) {
        const auto weigh = [&](int64_t size) {
            layout.groups = layout.micro_batches / size;
            // Sets of interleaved groups are as many as there are stages.
            if (layout.order == Order::interleaved && layout.groups < layout.pipeline) return;
            weigh_tiers(layout);
        };
        for_divisors(layout.micro_batches, kMostOfAGroup, weigh);
        if (layout.micro_batches > kMostOfAGroup) weigh(layout.micro_batches);
    }
    // Ranks that share nothing out are alike at every stage.
    bool differs(const Layout& layout, int64_t stage) const {
        return stage == 1 || layout.replicas * layout.sequence > 1;
    }
    void weigh_tiers(Layout layout) {
        if (fixed_.zero_stage) return weigh_stage(layout, *fixed_.zero_stage);
        for (const int64_t stage : {1, 3, 0})
            if (differs(layout, stage)) weigh_stage(layout, stage);
    }
    void weigh_stage(Layout layout, int64_t stage) {
        layout.zero_stage = stage;
        for (const StateOn state : kStateOn) {
            // Sums come back to the hosts of all.
            if (stage == 0 && state == StateOn::device && differs(layout, stage)) continue;
            layout.state = state;
            for (const bool stay : {true, false}) {
                if (!stay && state == StateOn::device) continue;
                layout.weights_stay = stay;
                keep(weigh(m_, c_, layout));
            }
        }
    }
    void keep(const Weighed& weighed) {
        ++found_.weighed;
        const bool whole = weighed.layout.zero_stage == 0 && !fixed_.zero_stage;
        Layout& fastest = whole ? fastest_of_whole_state_ : fastest_;
        if (weighed.fits && (fastest.seconds == 0 || weighed.layout.seconds < fastest.seconds))
            fastest = weighed.layout;
    }

    const ModelSizes& m_;
    const Cluster& c_;
    const FixedLayout& fixed_;
    Layout fastest_{}, fastest_of_whole_state_{};  // of stages above 0, or as chosen; of stage 0
    FoundLayouts found_{};
};

}  // namespace

const char* name_of(StateOn tier) {
    switch (tier) {
        case StateOn::device:
            return "device";
        case StateOn::host:
            return "host";
        case StateOn::nvme:
            return "NVMe";
    }
    bug("no such tier");
}

const char* name_of(Order order) {
    switch (order) {
        case Order::one_f_one_b:
            return "1f1b";
        case Order::zero_bubble:
            return "zero_bubble";
        case Order::interleaved:
            return "interleaved";
        case Order::round_robin:
            return "round_robin";
    }
    bug("no such order");
}

double ModelSizes::parameters() const {
    return static_cast<double>(blocks * block.all() + (tied ? 1 : 2) * vocab * hidden +
                               embedding_whole + head_whole);
}

bool FixedLayout::needs_stages() const {
    if (pipeline == 1) return false;
    return virtual_stages.value_or(1) > 1 ||
           std::ranges::find(orders, Order::one_f_one_b) == orders.end();
}

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

std::string refusal_of_tensor(const ModelSizes& model, const Cluster& cluster, int64_t tensor) {
    if (cluster.ranks % tensor != 0) return fmt::format("{} ranks", cluster.ranks);
    if (cluster.on_a_host % tensor != 0)
        return fmt::format("a group would span hosts of {}", cluster.on_a_host);
    return heads_refusal(model, tensor);
}

AtBound at_bound(const Layout& of) {
    const int64_t sequences = of.micro_batches * of.micro_batch,
                  size = of.micro_batches / of.groups;
    // Whether `of` has a divisor in (`above`, `most`], but for itself.
    const auto divides = [](int64_t number, int64_t above, int64_t most) {
        for (int64_t d = above + 1; d <= std::min(most, number / 2); ++d)
            if (number % d == 0) return true;
        return false;
    };
    AtBound found;
    found.sequences = sequences > kMostSequences && of.micro_batch <= kMostSequences &&
                      !divides(sequences, of.micro_batch, kMostSequences);
    found.group = of.pipeline > 1 && size < of.micro_batches &&
                  !divides(of.micro_batches, size, kMostOfAGroup) &&
                  divides(of.micro_batches, kMostOfAGroup, of.micro_batches);
    return found;
}

Weighed weigh(const ModelSizes& model, const Cluster& cluster, Layout layout) {
    return Weigher(model, cluster, layout).weigh();
}

FoundLayouts best_layouts(const ModelSizes& model, const Cluster& cluster, size_t most,
                          const FixedLayout& fixed) {
    return Search(model, cluster, fixed).find(most);
}

}  // namespace ferry::cost
