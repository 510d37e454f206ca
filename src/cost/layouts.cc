#include "cost/layouts.h"

#include <algorithm>
#include <tuple>

#include "ferry/error.h"
#include "ferry/units.h"

namespace ferry::cost {
namespace {

// As ferry's blocks do: two sums forward, three backward, of which one is computed again.
constexpr double kSumsForward = 2, kSumsBackward = 3;
// Backward computes forward again, then two products for each of forward's.
constexpr double kPassesBackward = 3;
// What a block's kernels hold beside its input, in block inputs: queries, keys, values, the MLP's
// width and their gradients.
constexpr double kWorkingInputs = 24;

class Weigher {
public:
    Weigher(const ModelSizes& model, const Cluster& cluster, const Layout& layout)
        : m_(model), c_(cluster), found_(layout) {}

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
    double stages() const { return static_cast<double>(found_.pipeline); }
    double slices() const { return static_cast<double>(found_.tensor); }
    double sharers() const { return static_cast<double>(found_.replicas); }
    double micro_batches() const { return static_cast<double>(found_.micro_batches); }
    double tokens() const { return static_cast<double>(found_.micro_batch * m_.sequence); }
    double blocks() const { return static_cast<double>(ceil_div(m_.blocks, found_.pipeline)); }
    double width() const { return static_cast<double>(m_.element.weight); }
    double input_bytes() const { return tokens() * static_cast<double>(m_.hidden) * width(); }
    // Weights of a rank: of the stage with a table. A tied one is on the first stage and the last.
    double elements() const {
        const double tables = found_.pipeline > 1 || m_.tied ? 1 : 2;
        return blocks() * m_.block_elements / slices() + tables * m_.table_elements;
    }
    // Of these, what a rank updates.
    double owned() const { return elements() / (found_.zero_stage >= 1 ? sharers() : 1); }
    double link() const { return comm_rate(c_.measured); }
    bool crosses_hosts(int64_t ranks) const { return ranks > c_.on_a_host; }

    // Between so many ranks, each `apart` from the next.
    double group_rate(int64_t ranks, int64_t apart) const {
        const int64_t here = std::clamp<int64_t>(c_.on_a_host / apart, 1, ranks);
        return mean_rate(ranks, here, link(),
                         c_.network_bytes_per_s / static_cast<double>(c_.on_a_host));
    }

    // Of a micro-batch on the slowest stage: its blocks, and the head where that is more.
    void time_slots() {
        const double flops = 2 * m_.block_elements / slices() + m_.attention_flops / slices();
        const double block = tokens() * flops / c_.measured.assumed_flops_per_s;
        const double head = 2 * tokens() * m_.table_elements / c_.measured.assumed_flops_per_s;
        const double each = static_cast<double>(m_.blocks);
        // The cut evens the head out as far as whole blocks allow. Head: forward, and both
        // gradients in the same visit.
        const double even = ((1 + kPassesBackward) * each * block + 3 * head) / stages();
        const double computed = std::max({even, (1 + kPassesBackward) * blocks() * block,
                                          3 * head + (1 + kPassesBackward) * block});
        const double sum = 2 * (slices() - 1) / slices() * input_bytes();
        const double sums = blocks() * (kSumsForward + kSumsBackward);
        const double between = found_.tensor == 1 ? 0 : sums * (sum / group_rate(found_.tensor, 1));
        found_.tensor_bytes = micro_batches() * sums * sum;
        slot_s_ = computed + between;
        found_.compute_seconds = micro_batches() * computed;
        found_.exchange_seconds = micro_batches() * between;
    }

    // Weights live on the device, but for those of a rank that has all layers: they may stream.
    bool streams() const { return found_.pipeline == 1 && found_.state != StateOn::device; }

    void count_memory() {
        const double own = owned();
        const double weights = found_.zero_stage == 3 ? elements() / sharers() : elements();
        const double state = own * m_.element.state_and_gradient();
        const double under_way =
            found_.pipeline > 1 ? std::min(stages(), micro_batches()) : micro_batches();
        const double inputs = under_way * blocks() * input_bytes();
        const double working = kWorkingInputs * input_bytes() +
                               2 * m_.block_elements / slices() * (width() + 4) +
                               m_.table_elements * (width() + 4);
        found_.device_bytes = working;
        double& home = found_.state == StateOn::device ? found_.device_bytes
                       : found_.state == StateOn::host ? found_.host_bytes
                                                       : found_.nvme_bytes;
        home += state;
        (streams() ? found_.host_bytes : found_.device_bytes) += weights * width();
        // Between groups a stage's accumulators stay; with all layers a layer's goes once.
        if (found_.pipeline > 1) found_.device_bytes += elements() * 4;
        const double left = c_.device_bytes - found_.device_bytes;
        if (inputs <= left) {
            found_.device_bytes += inputs;
        } else {
            found_.host_bytes += inputs;
            found_.copied_bytes += 2 * micro_batches() * blocks() * input_bytes();
        }
    }

    // All micro-batches through all stages.
    double pass_through() {
        double passed_s = 0;
        if (found_.pipeline > 1) {
            const int64_t of_a_stage = found_.tensor * found_.replicas;
            const bool crosses = crosses_hosts(c_.ranks);
            const int64_t at_once = std::min(of_a_stage, c_.on_a_host);
            const double rate =
                crosses ? c_.network_bytes_per_s / static_cast<double>(at_once) : link();
            passed_s = input_bytes() / rate + (crosses ? c_.latency_s : 0);
            found_.pipeline_bytes = 2 * micro_batches() * input_bytes();
        }
        // A slot is no shorter than what it passes, each way on its own.
        const double slot = std::max(slot_s_, 2 * passed_s);
        found_.exchange_seconds += micro_batches() * (slot - slot_s_);
        found_.bubble_seconds = (stages() - 1) * (slot + 2 * passed_s);
        return micro_batches() * slot + found_.bubble_seconds;
    }

    // State, gradients and weights among the ranks of a slice: what forward and backward do not
    // hide. Of a pipeline the last micro-batch alone hides it, else all of them do, layer by layer.
    double exchange() {
        if (found_.replicas == 1) return 0;
        const double part = (sharers() - 1) / sharers();
        const double gradient = part * elements() * static_cast<double>(m_.element.wire),
                     weights = part * elements() * width();
        const double rate = group_rate(found_.replicas, found_.tensor);
        const double forward = slot_s_ / (1 + kPassesBackward) *
                               (found_.pipeline > 1 ? 1 : micro_batches()),
                     backward = kPassesBackward * forward;
        // Stage 3 gathers weights at each visit, 1 and 2 once after the update, 0 the sums.
        const double up = weights, down = gradient + (found_.zero_stage == 3 ? weights : 0);
        found_.zero_bytes = up + down;
        const double operations =
            static_cast<double>(m_.blocks) / stages() *
            (crosses_hosts(found_.tensor * found_.replicas) ? c_.latency_s : 0);
        return std::max(0.0, up / rate + operations - forward) +
               std::max(0.0, down / rate + operations - backward);
    }

    double update() {
        const double own = owned();
        const double moved = update_bytes(own, m_.element);
        const Measurements& rates = c_.measured;
        if (found_.state == StateOn::device)
            return std::max(moved / rates.device_bytes_per_s,
                            found_.copied_bytes / rates.copy_bytes_per_s);
        double copied = found_.copied_bytes + own * static_cast<double>(m_.element.wire);
        copied += streams() ? 2 * elements() / (found_.zero_stage == 3 ? sharers() : 1) * width()
                            : own * width();
        found_.copied_bytes = copied;
        if (found_.state == StateOn::nvme) found_.stored_bytes = 2 * own * m_.element.state;
        const double stored = found_.stored_bytes;
        return std::max({copied / rates.copy_bytes_per_s,
                         dram_bytes(moved, copied, stored, rates) / rates.dram_bytes_per_s,
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
    double slot_s_ = 0;  // a micro-batch's forward and backward on the slowest stage
};

// Whether ranks may share tensors so: heads divide, and a group stays inside a host.
bool may_slice(const ModelSizes& model, const Cluster& cluster, int64_t tensor) {
    if (cluster.on_a_host % tensor != 0 || model.heads % tensor != 0) return false;
    return model.kv_heads % tensor == 0 || tensor % model.kv_heads == 0;
}

template <class Body>
void for_divisors(int64_t of, int64_t most, const Body& body) {
    for (int64_t d = 1; d <= std::min(of, most); ++d)
        if (of % d == 0) body(d);
}

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

double mean_rate(int64_t ranks, int64_t here, double inside_host, double outside) {
    if (ranks == here) return inside_host;
    const double away = static_cast<double>(ranks - here) / static_cast<double>(ranks - 1);
    return 1 / (away / outside + (1 - away) / inside_host);
}

Weighed weigh(const ModelSizes& model, const Cluster& cluster, Layout layout) {
    return Weigher(model, cluster, layout).weigh();
}

std::vector<Layout> best_layouts(const ModelSizes& model, const Cluster& cluster, size_t most) {
    std::vector<Layout> best;
    const auto weigh_all = [&](Layout layout) {
        Layout fastest{};
        const auto keep = [&](const Weighed& weighed) {
            if (weighed.fits && (fastest.seconds == 0 || weighed.layout.seconds < fastest.seconds))
                fastest = weighed.layout;
        };
        const int64_t each = model.sequences / layout.replicas;
        for_divisors(each, 16, [&](int64_t micro_batch) {
            layout.micro_batch = micro_batch;
            layout.micro_batches = each / micro_batch;
            for (const int64_t stage : {1, 3}) {
                // A pipeline would gather weights for every micro-batch.
                if (stage == 3 && (layout.pipeline > 1 || layout.replicas == 1)) continue;
                layout.zero_stage = stage;
                for (const StateOn state : kStateOn) {
                    layout.state = state;
                    keep(weigh(model, cluster, layout));
                }
            }
        });
        if (fastest.seconds > 0) best.push_back(fastest);
    };
    for_divisors(cluster.ranks, cluster.on_a_host, [&](int64_t tensor) {
        if (!may_slice(model, cluster, tensor)) return;
        for_divisors(cluster.ranks / tensor, model.blocks, [&](int64_t pipeline) {
            const int64_t replicas = cluster.ranks / tensor / pipeline;
            if (model.sequences % replicas != 0) return;
            weigh_all({.tensor = tensor, .pipeline = pipeline, .replicas = replicas});
        });
    });
    // Of equally fast ones the simpler.
    std::ranges::sort(best, {},
                      [](const Layout& l) { return std::tuple(l.seconds, l.pipeline, l.tensor); });
    if (best.size() > most) best.resize(most);
    return best;
}

}  // namespace ferry::cost
