#include "bound.h"

#include <algorithm>
#include <array>
#include <limits>

namespace ferry::train {
namespace {

struct Fractions {
    double state_in_host = 0, weights_on_nvme = 0, weights_on_device = 0;
};

bool admissible(const BoundInput& in, const Fractions& f) {
    const double weights = in.weights.bytes, state = in.state_bytes * in.parameters;
    const double in_host = 1 - f.weights_on_nvme - f.weights_on_device;
    if (in_host < -1e-9) return false;
    return f.weights_on_device * weights <= in.device_bytes &&
           f.state_in_host * state + in_host * weights <= in.host_bytes &&
           (1 - f.state_in_host) * state + f.weights_on_nvme * weights <= in.nvme_bytes;
}

struct Term {
    double seconds;
    const char* link;
};

Term slowest(const BoundInput& in, const Fractions& f) {
    const double n = in.parameters;
    const WeightTraffic& w = in.weights;
    // The best choice of that size: what is visited twice stays near, what is frozen goes far.
    const auto reads_without = [&w](double kept) {
        return std::max(0.0, w.read_bytes - 2 * kept * w.bytes);
    };
    const double up = reads_without(f.weights_on_device) + in.input_bytes;
    // What an update writes of weights that live elsewhere, and reads where they are half of p.
    const auto trained = [&w](double kept) {
        return std::max(0.0, kept * w.bytes - w.frozen_bytes);
    };
    const double reads = in.split ? 1 : 0;
    const double down = in.wire_bytes * n + in.input_bytes + reads * trained(f.weights_on_device);
    const double stored = 2 * in.state_bytes * (1 - f.state_in_host) * n +
                          reads_without(1 - f.weights_on_nvme) +
                          (1 + reads) * trained(f.weights_on_nvme);
    const double update = (2 * in.state_bytes + in.wire_bytes + (1 + reads) * in.weight_bytes) * n;
    const LinkSpeeds& s = in.speeds;
    const double dram = update + up + down + s.dram_per_nvme_byte * stored;
    const std::array<Term, 5> terms{{{in.kernel_seconds, "compute"},
                                     {up / s.copy_bytes_per_s, "host to device"},
                                     {down / s.copy_bytes_per_s, "device to host"},
                                     {stored > 0 ? stored / s.nvme_bytes_per_s : 0, "nvme"},
                                     {dram / s.dram_bytes_per_s, "dram"}}};
    return *std::max_element(terms.begin(), terms.end(),
                             [](const Term& a, const Term& b) { return a.seconds < b.seconds; });
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
            const double s = double(sequence), window = double(shape.window_of(layer.index));
            const double w = window > 0 ? std::min(window, s) : s;
            const double keys = w - w * w / (2 * s);  // of a query, on average
            // Two products forward, four backward, each of 2 operations a key and element.
            per_token += (passes > 2 ? 12 : 4) * keys * double(shape.heads * shape.head_dim);
        }
        trains_below = trains_below || trains;
    }
    return per_token * double(step_tokens);
}

Bound lower_bound(const BoundInput& input) {
    constexpr int kSteps = 64;
    Bound best{.seconds = std::numeric_limits<double>::infinity()};
    for (int r = 0; r <= kSteps; ++r) {
        for (int x = 0; x <= kSteps; ++x) {
            for (int g = 0; g + x <= kSteps; ++g) {
                const Fractions f{double(r) / kSteps, double(x) / kSteps, double(g) / kSteps};
                if (!admissible(input, f)) continue;
                const Term term = slowest(input, f);
                if (term.seconds >= best.seconds) continue;
                best = {term.seconds, term.link, f.state_in_host, f.weights_on_nvme,
                        f.weights_on_device};
            }
        }
    }
    return best;
}

}  // namespace ferry::train
