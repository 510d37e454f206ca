#include "bound.h"

#include <algorithm>
#include <array>
#include <functional>
#include <limits>

namespace ferry::train {
namespace {

// What an update reads and writes, of each parameter.
double update_bytes(const BoundInput& in) {
    return 2 * in.state_bytes + in.wire_bytes + (in.split ? 2 : 1) * in.weight_bytes;
}

struct Fractions {
    double weights_on_nvme = 0, weights_on_device = 0, state_on_device = 0;
    double inputs_away = 0;  // of the block inputs: not on the device until backward
};

// Of state and gradients, which wait for the outcome with it; a byte of either that is stored is
// read once and written once.
double saved_bytes(const BoundInput& in) {
    return (in.state_bytes + in.wire_bytes) * in.parameters;
}

// Host memory is for weights, then for inputs, which travel in every group, then for state.
struct OnHost {
    double state = 0;          // a fraction; below 0: the weights alone do not fit
    double inputs_stored = 0;  // bytes that do not fit, and go on to NVMe
};
OnHost on_host(const BoundInput& in, const Fractions& f) {
    const double weights = std::max(0.0, 1 - f.weights_on_nvme - f.weights_on_device);
    const double inputs = f.inputs_away * in.input_bytes;
    const double left = in.host_bytes - weights * in.weights.bytes;
    if (left < 0) return {.state = -1};
    return {
        .state = std::min(1 - f.state_on_device, std::max(0.0, left - inputs) / saved_bytes(in)),
        .inputs_stored = std::max(0.0, inputs - left)};
}

// Weights that the host trains, of a part of them kept somewhere: what is frozen goes there first.
double trained(const WeightTraffic& w, double kept) {
    return std::max(0.0, kept * w.bytes - w.frozen_bytes);
}

double bytes_on_device(const BoundInput& in, const Fractions& f) {
    return f.weights_on_device * in.weights.bytes + f.state_on_device * saved_bytes(in) +
           (1 - f.inputs_away) * in.input_bytes;
}

// Of what blocks may keep for backward, in the device memory that is left, first what saves most
// for its bytes: nothing else there makes the kernels' time shorter.
struct Savings {
    model::OfSaved<double> kept{};
    double seconds = 0;
};
Savings savings(const BoundInput& in, const Fractions& f) {
    model::OfSaved<model::Saved> order = model::kAllKept;
    const auto of_a_byte = [&in](model::Saved what) {
        const BoundInput::Keeping& all = in.keeping[at(what)];
        return all.bytes > 0 ? all.seconds / all.bytes : 0;
    };
    std::ranges::sort(order, std::greater(), of_a_byte);
    double left = in.device_bytes - bytes_on_device(in, f);
    Savings found;
    for (const model::Saved what : order) {
        const BoundInput::Keeping& all = in.keeping[at(what)];
        if (all.bytes <= 0) continue;
        const double kept = std::clamp(left / all.bytes, 0.0, 1.0);
        left -= kept * all.bytes;
        found.kept[at(what)] = kept;
        found.seconds += kept * all.seconds;
    }
    return found;
}

bool admissible(const BoundInput& in, const Fractions& f) {
    const double n = in.parameters, weights = in.weights.bytes;
    const OnHost host = on_host(in, f);
    const double on_nvme = (1 - host.state - f.state_on_device) * saved_bytes(in) +
                           f.weights_on_nvme * weights + host.inputs_stored;
    // Whose state is on the device has its weights there.
    const bool beside_weights =
        f.state_on_device * in.weight_bytes * n <= f.weights_on_device * weights * (1 + 1e-9);
    return host.state >= 0 && beside_weights &&
           bytes_on_device(in, f) <= in.device_bytes * (1 + 1e-9) && on_nvme <= in.nvme_bytes;
}

struct Term {
    double seconds;
    const char* link;
};

Term compute(const BoundInput& in, const Fractions& f) {
    const double on_device = update_bytes(in) * in.parameters * f.state_on_device;
    return {in.kernel_seconds - savings(in, f).seconds +
                (on_device > 0 ? on_device / in.speeds.device_bytes_per_s : 0),
            "compute"};
}

// Of all others.
Term slowest_link(const BoundInput& in, const Fractions& f) {
    const double n = in.parameters, by_host = 1 - f.state_on_device;
    const WeightTraffic& w = in.weights;
    const OnHost host = on_host(in, f);
    // The best choice of that size: what is visited twice stays near.
    const auto reads_without = [&](double kept) {
        return in.groups * std::max(0.0, w.read_bytes - 2 * kept * w.bytes);
    };
    // Weights on the device that the host updates: they come back, and where they are half of p
    // they are fetched before.
    const double returning =
        std::max(0.0, trained(w, f.weights_on_device) - f.state_on_device * in.weight_bytes * n);
    const double reads = in.split ? 1 : 0, inputs = f.inputs_away * in.groups * in.input_bytes;
    const double between_groups = inputs + (in.groups - 1) * in.accumulator_bytes;
    const double up = reads_without(f.weights_on_device) + returning + between_groups;
    const double down = in.wire_bytes * n * by_host + between_groups + reads * returning;
    const double stored = 2 * saved_bytes(in) * std::max(0.0, by_host - host.state) +
                          2 * in.groups * host.inputs_stored +
                          reads_without(1 - f.weights_on_nvme) +
                          (1 + reads) * trained(w, f.weights_on_nvme);
    const LinkSpeeds& s = in.speeds;
    const double dram = update_bytes(in) * n * (in.device_is_host ? 1 : by_host) + up + down +
                        s.dram_per_nvme_byte * stored;
    const std::array<Term, 5> terms{{{up / s.copy_bytes_per_s, "host to device"},
                                     {down / s.copy_bytes_per_s, "device to host"},
                                     {stored > 0 ? stored / s.nvme_bytes_per_s : 0, "nvme"},
                                     {dram / s.dram_bytes_per_s, "dram"},
                                     {comm_seconds(in.comm_bytes, 0, s), "comm"}}};
    return *std::ranges::max_element(terms, {}, &Term::seconds);
}

Term slowest(const BoundInput& in, const Fractions& f) {
    return std::ranges::max(compute(in, f), slowest_link(in, f), {}, &Term::seconds);
}

// With as few of the inputs away as must be, and with as many as make kernels as short as copies
// are long: fewer have longer kernels, more longer copies. The latter only where a step could take
// less than `seconds` for it.
std::vector<Fractions> with_inputs_away(const BoundInput& in, Fractions f, double seconds) {
    f.inputs_away = 1;
    const double left = in.device_bytes - bytes_on_device(in, f);
    if (left < 0) return {};
    const double shortest = compute(in, f).seconds;
    double least = in.input_bytes > 0 ? std::clamp(1 - left / in.input_bytes, 0.0, 1.0) : 0;
    f.inputs_away = least;
    std::vector<Fractions> found{f};
    if (shortest >= std::min(seconds, compute(in, f).seconds)) return found;
    const auto computes_longer = [&](double away) {
        f.inputs_away = away;
        return compute(in, f).seconds > slowest_link(in, f).seconds;
    };
    double most = 1;
    for (int halvings = 0; !computes_longer(most) && halvings < 20; ++halvings) {
        const double middle = (least + most) / 2;
        (computes_longer(middle) ? least : most) = middle;
    }
    f.inputs_away = most;
    found.push_back(f);
    return found;
}

}  // namespace

WeightTraffic weight_traffic(const std::vector<model::Layer>& layers, const model::Shape& shape,
                             int64_t step_tokens, DType type) {
    WeightTraffic found;
    const auto bytes_of = [type](int64_t elements) { return double(elements * size_of(type)); };
    bool trains_below = false;
    for (const model::Layer& layer : layers) {
        const double bytes = bytes_of(layer.elements);
        const bool trains = layer.trainable_elements > 0;
        found.bytes += bytes;
        found.frozen_bytes += bytes_of(layer.elements - layer.trainable_elements);
        if (layer.kind == model::LayerKind::embedding) {
            found.read_bytes += bytes_of(std::min(step_tokens, shape.vocab) * shape.hidden);
            if (shape.tie_embeddings) found.read_bytes += bytes;
        } else {
            const bool backward = layer.kind == model::LayerKind::block && (trains || trains_below);
            found.read_bytes += bytes * (backward ? 2 : 1);
        }
        trains_below = trains_below || trains;
    }
    return found;
}

double comm_traffic(const std::vector<model::Layer>& layers, const zero::Partition& partition,
                    DType compute, DType wire) {
    if (partition.alone()) return 0;
    int64_t bytes = 0;
    bool trains_below = false;
    for (const model::Layer& layer : layers) {
        const bool trains = layer.trainable_elements > 0;
        const bool backward = layer.kind == model::LayerKind::block && (trains || trains_below);
        const int64_t gathered = zero::gathered_bytes(partition, layer, compute);
        if (partition.sharding.weights) bytes += gathered * (backward ? 2 : 1);
        if (partition.shares_updates()) bytes += gathered;
        const int64_t shard = layer.trainable_elements / partition.ranks;
        const int64_t exchanged = zero::exchanged_bytes(partition, shard * size_of(wire));
        bytes += exchanged * (partition.sharding.state ? 1 : 2);  // sums come back to all ranks
        trains_below = trains_below || trains;
    }
    return static_cast<double>(bytes);
}

double comm_rate(const LinkSpeeds& speeds) {
    return speeds.comm_bytes_per_s > 0 ? speeds.comm_bytes_per_s : speeds.copy_bytes_per_s;
}

double comm_seconds(double bytes, int64_t operations, const LinkSpeeds& speeds) {
    return static_cast<double>(operations) * speeds.comm_overhead_s +
           (bytes > 0 ? bytes / comm_rate(speeds) : 0);
}

double keys_seen(const model::Shape& shape, int64_t sequence, int64_t block) {
    const double s = double(sequence), window = double(shape.window_of(block));
    const double w = window > 0 ? std::min(window, s) : s;
    return w - w * w / (2 * s);
}

double model_flops(const std::vector<model::Layer>& layers, const model::Shape& shape,
                   int64_t sequence, int64_t step_tokens) {
    double per_token = 0;
    bool trains_below = false;
    for (const model::Layer& layer : layers) {
        const bool trains = layer.trainable_elements > 0;
        const double passes = trains || trains_below ? 4 : 2;  // forward, and its input's gradient
        for (const model::Tensor& t : layer.tensors) {
            const bool multiplies = t.shape.size() > 1 && layer.kind != model::LayerKind::embedding;
            if (multiplies) per_token += double(t.count) * (passes + (t.trainable ? 2 : 0));
        }
        if (layer.kind == model::LayerKind::head && shape.tie_embeddings) {
            const double table = double(shape.vocab * shape.hidden);
            per_token +=
                table *
                (passes + (layers.front().find(model::Role::token_table)->trainable ? 2 : 0));
        }
        if (layer.kind == model::LayerKind::block) {
            const double keys = keys_seen(shape, sequence, layer.index);
            // Two products forward, four backward, each of 2 operations a key and element.
            per_token += (passes > 2 ? 12 : 4) * keys * double(shape.heads * shape.head_dim);
        }
        trains_below = trains_below || trains;
    }
    return per_token * double(step_tokens);
}

Bound lower_bound(const BoundInput& input, double below) {
    constexpr int kSteps = 64;
    const auto part = [](int i) { return static_cast<double>(i) / kSteps; };
    Bound best{.seconds = below};
    for (int x = 0; x <= kSteps; ++x) {
        for (int g = 0; g + x <= kSteps; ++g) {
            for (int s = 0; s <= kSteps; ++s) {
                const Fractions near{part(x), part(g), part(s)};
                for (const Fractions& f : with_inputs_away(input, near, best.seconds)) {
                    if (!admissible(input, f)) continue;
                    const Term term = slowest(input, f);
                    if (term.seconds >= best.seconds) continue;
                    best = {term.seconds,          term.link,           on_host(input, f).state,
                            f.weights_on_nvme,     f.weights_on_device, f.state_on_device,
                            savings(input, f).kept};
                }
            }
        }
    }
    return best;
}

}  // namespace ferry::train
