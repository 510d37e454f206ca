#include "cost/bound.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <compare>
#include <functional>
#include <limits>

namespace ferry::cost {

std::string_view name_of(Link link) {
    static constexpr std::array<std::string_view, 7> kNames{
        "compute", "host to device", "device to host", "nvme", "dram", "cores", "comm"};
    return kNames.at(static_cast<size_t>(link));
}

namespace {

// What is asked for, and what follows from it for every placement.
struct Input : BoundInput {
    explicit Input(const BoundInput& input) : BoundInput(input) {
        const auto of_a_byte = [this](model::Saved what) {
            const Saving& all = saving[at(what)];
            return all.bytes > 0 ? all.seconds / all.bytes : 0;
        };
        std::ranges::sort(by_worth, std::greater(), of_a_byte);
    }

    // Activations that spare most seconds a byte come first.
    model::OfSaved<model::Saved> by_worth = model::kAllSaved;
};

double all_update_bytes(const Input& in) { return update_bytes(in.parameters, in.element); }
double weight_bytes(const Input& in) {
    return static_cast<double>(in.element.weight) * in.parameters;
}

// Shares of state and gradients, by bytes.
struct Fractions {
    double weights_on_nvme = 0, weights_on_device = 0, state_on_device = 0;
    double inputs_away = 0;  // part of the block inputs that leave the device until backward
};

// The most and the fewest trainable elements that have their state on the device, as a fraction;
// and the same of the bytes that updates move.
double most_elements_on_device(const Input& in, const Fractions& f) {
    return std::min(1.0, f.state_on_device * in.parts.most_elements);
}
double least_elements_on_device(const Input& in, const Fractions& f) {
    return f.state_on_device * in.parts.least_elements;
}
double most_updated_on_device(const Input& in, const Fractions& f) {
    return std::min(1.0, f.state_on_device * in.parts.most_updated);
}

// State, and the gradients that wait for the outcome beside it. A stored byte of either is read
// once and written once.
double state_and_gradient_bytes(const Input& in) {
    return static_cast<double>(in.element.state_and_gradient()) * in.parameters;
}

// Host memory is for weights, then for inputs, which travel in every group, then for state.
struct OnHost {
    double state = 0;          // a fraction; below 0: the weights alone do not fit
    double inputs_stored = 0;  // bytes that do not fit, and go on to NVMe
};
OnHost on_host(const Input& in, const Fractions& f) {
    const double weights = std::max(0.0, 1 - f.weights_on_nvme - f.weights_on_device);
    const double inputs = f.inputs_away * in.input_bytes;
    const double left = in.host_bytes - weights * in.weights.bytes;
    if (left < 0) return {.state = -1};
    return {.state = std::min(1 - f.state_on_device,
                              std::max(0.0, left - inputs) / state_and_gradient_bytes(in)),
            .inputs_stored = std::max(0.0, inputs - left)};
}

// Weights that this rank's host updates, of a part of them kept somewhere: what is frozen goes
// there first, and what other ranks update where each keeps all weights.
double trained(const Input& in, double kept) {
    const WeightTraffic& w = in.weights;
    const double others = std::max(w.frozen_bytes, w.bytes - weight_bytes(in));
    return std::max(0.0, kept * w.bytes - others);
}

double bytes_on_device(const Input& in, const Fractions& f) {
    return f.weights_on_device * in.weights.bytes +
           f.state_on_device * state_and_gradient_bytes(in) + (1 - f.inputs_away) * in.input_bytes;
}

// Activations saved for backward in the device memory that is left. Those that spare most seconds a
// byte come first: nothing else there makes the kernels' time shorter.
struct Savings {
    model::OfSaved<double> saved{};
    double seconds = 0;
};
Savings savings(const Input& in, const Fractions& f) {
    double left = in.device_bytes - bytes_on_device(in, f);
    Savings found;
    for (const model::Saved what : in.by_worth) {
        const BoundInput::Saving& all = in.saving[at(what)];
        if (all.bytes <= 0) continue;
        const double kept = std::clamp(left / all.bytes, 0.0, 1.0);
        left -= kept * all.bytes;
        found.saved[at(what)] = kept;
        found.seconds += kept * all.seconds;
    }
    return found;
}

bool admissible(const Input& in, const Fractions& f) {
    const double weights = in.weights.bytes;
    const OnHost host = on_host(in, f);
    const double on_nvme = (1 - host.state - f.state_on_device) * state_and_gradient_bytes(in) +
                           f.weights_on_nvme * weights + host.inputs_stored;
    // Whose state is on the device has its weights there.
    const bool beside_weights = least_elements_on_device(in, f) * weight_bytes(in) <=
                                f.weights_on_device * weights * (1 + 1e-9);
    return host.state >= 0 && beside_weights &&
           bytes_on_device(in, f) <= in.device_bytes * (1 + 1e-9) && on_nvme <= in.nvme_bytes;
}

struct Term {
    double seconds;
    Link link;
};

Term compute(const Input& in, const Fractions& f) {
    const double on_device = all_update_bytes(in) * f.state_on_device * in.parts.least_updated;
    return {in.kernel_seconds - savings(in, f).seconds +
                (on_device > 0 ? on_device / in.measured.device_bytes_per_s : 0),
            Link::compute};
}

// The slowest of all other links.
Term slowest_link(const Input& in, const Fractions& f) {
    const double by_host = 1 - f.state_on_device;
    const WeightTraffic& w = in.weights;
    const OnHost host = on_host(in, f);
    // The best choice of that size: what is visited twice stays near.
    const auto reads_without = [&](double kept) {
        return in.groups * std::max(0.0, w.read_bytes - 2 * kept * w.bytes);
    };
    // Weights on the device that the host updates: they come back, and where they are half of p
    // they are fetched before.
    const double returning = std::max(
        0.0, trained(in, f.weights_on_device) - most_elements_on_device(in, f) * weight_bytes(in));
    const double reads = in.element.split ? 1 : 0,
                 inputs = f.inputs_away * in.groups * in.input_bytes;
    const double between_groups = inputs + (in.groups - 1) * in.accumulator_bytes;
    const double up = reads_without(f.weights_on_device) + returning + between_groups;
    const double down = static_cast<double>(in.element.wire) * in.parameters *
                            (1 - most_elements_on_device(in, f)) +
                        between_groups + reads * returning;
    const double stored = 2 * state_and_gradient_bytes(in) * std::max(0.0, by_host - host.state) +
                          2 * in.groups * host.inputs_stored +
                          reads_without(1 - f.weights_on_nvme) +
                          (1 + reads) * trained(in, f.weights_on_nvme);
    const Measurements& s = in.measured;
    const double by_updates = in.measured.computes_on_host ? 1 : 1 - most_updated_on_device(in, f);
    const double dram = dram_bytes(all_update_bytes(in) * by_updates, up + down, stored, s);
    const std::array<Term, 5> terms{{{up / s.copy_bytes_per_s, Link::host_to_device},
                                     {down / s.copy_bytes_per_s, Link::device_to_host},
                                     {stored > 0 ? stored / s.nvme_bytes_per_s : 0, Link::nvme},
                                     {dram / s.dram_bytes_per_s, Link::dram},
                                     {least_comm_seconds(in.comm, s), Link::comm}}};
    return *std::ranges::max_element(terms, {}, &Term::seconds);
}

Term slowest(const Input& in, const Fractions& f) {
    return std::ranges::max(compute(in, f), slowest_link(in, f), {}, &Term::seconds);
}

// With as few of the inputs away as must be, and with as many as make kernels as short as copies
// are long: fewer have longer kernels, more longer copies. The latter only where a step could take
// less than `seconds` for it.
std::vector<Fractions> with_inputs_away(const Input& in, Fractions f, double seconds) {
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

namespace {

Bound bound_at(const Input& in, const Fractions& f, const Term& term) {
    return {term.seconds,        term.link,         on_host(in, f).state, f.weights_on_nvme,
            f.weights_on_device, f.state_on_device, savings(in, f).saved};
}

// How far a placement is from one that the budgets allow, in bytes; then its seconds.
struct Value {
    double excess_bytes = 0, seconds = 0;
    auto operator<=>(const Value&) const = default;
};

// The best placement between those of the grid. Seconds and excess are convex in all fractions,
// being sums and maxima of linear terms, so for each fraction in turn the best choice of those that
// follow is so too: a search by golden sections finds it, one within the other.
class BetweenGridPoints {
public:
    explicit BetweenGridPoints(const Input& in) : in_(in) {}

    void improve(Bound& best) {
        const double most_on_nvme = in_.nvme_bytes > 0 ? 1 : 0;
        least(0, most_on_nvme, [&](double x) {
            return least(0, 1 - x, [&](double g) {
                return least(0, 1, [&](double s) { return at({x, g, s}); });
            });
        });
        constexpr double kWorthIt = 1 - 1e-6;
        if (best_.seconds >= best.seconds * kWorthIt) return;
        best = bound_at(in_, placement_, best_);
    }

private:
    template <class F>
    static Value least(double low, double high, const F& value) {
        constexpr int kSections = 26;
        constexpr double kGolden = 0.6180339887498949;
        Value best = std::min(value(low), value(high));
        double a = high - kGolden * (high - low), b = low + kGolden * (high - low);
        Value at_a = value(a), at_b = value(b);
        for (int i = 0; i < kSections && high > low; ++i) {
            best = std::min({best, at_a, at_b});
            if (at_a <= at_b) {
                high = b;
                b = a;
                at_b = at_a;
                a = high - kGolden * (high - low);
                at_a = value(a);
            } else {
                low = a;
                a = b;
                at_a = at_b;
                b = low + kGolden * (high - low);
                at_b = value(b);
            }
        }
        return best;
    }

    Value at(Fractions f) {
        f.inputs_away = 1;
        const OnHost host = on_host(in_, f);
        const double weights = in_.weights.bytes;
        const double excess =
            excess_of(weights * (1 - f.weights_on_nvme - f.weights_on_device), in_.host_bytes) +
            excess_of(least_elements_on_device(in_, f) * weight_bytes(in_),
                      f.weights_on_device * weights) +
            excess_of(bytes_on_device(in_, f), in_.device_bytes) +
            excess_of((1 - std::max(0.0, host.state) - f.state_on_device) *
                              state_and_gradient_bytes(in_) +
                          f.weights_on_nvme * weights + host.inputs_stored,
                      in_.nvme_bytes);
        if (excess > 0) return {excess, 0};
        Value found{0, std::numeric_limits<double>::infinity()};
        for (const Fractions& with_inputs : with_inputs_away(in_, f, found.seconds)) {
            if (!admissible(in_, with_inputs)) continue;
            const Term term = slowest(in_, with_inputs);
            found.seconds = std::min(found.seconds, term.seconds);
            if (term.seconds >= best_.seconds) continue;
            best_ = term;
            placement_ = with_inputs;
        }
        return found;
    }
    // Rounding leaves no excess.
    static double excess_of(double bytes, double limit) {
        const double excess = bytes - limit;
        return excess > 1e-9 * std::abs(bytes) ? excess : 0;
    }

    const Input& in_;
    Term best_{std::numeric_limits<double>::infinity(), Link::compute};
    Fractions placement_{};
};

}  // namespace

// A grid first: where its best placement is the best of all, that is found to the last digit.
Bound lower_bound(const BoundInput& asked, double below) {
    const Input input(asked);
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
                    if (term.seconds < best.seconds) best = bound_at(input, f, term);
                }
            }
        }
    }
    BetweenGridPoints(input).improve(best);
    return best;
}

}  // namespace ferry::cost
