// The lower bound of a step, from budgets, link speeds and kernel times: every link
// busy without a pause, everything overlapped, the best admissible placement. It knows nothing of
// the planner's choices; the two are compared.
#pragma once

#include <cstdint>
#include <limits>
#include <string_view>

#include "cost/measurements.h"
#include "cost/traffic.h"

namespace ferry::cost {

// A link of a step: something that moves or computes beside the others.
enum class Link : uint8_t { compute, host_to_device, device_to_host, nvme, dram, cores, comm };
std::string_view name_of(Link link);  // "host to device"

struct BoundInput {
    double kernel_seconds = 0;  // a step's, each call measured alone, everything recomputed
    // The seconds that backward saves where every block saves this activation, and the bytes of
    // that on the device.
    struct Saving {
        double seconds = 0, bytes = 0;
    };
    model::OfSaved<Saving> saving{};
    double parameters = 0;   // trainable, that this rank updates
    ElementBytes element{};  // bytes of each such parameter
    // Where the state has several formats, a part of it may differ from the mean. Its elements, and
    // the bytes that an update of it moves, are at most and at least so many times its share of the
    // bytes of state and gradient.
    struct Parts {
        double most_elements = 1, least_elements = 1, most_updated = 1, least_updated = 1;
    };
    Parts parts{};
    WeightTraffic weights{};
    double input_bytes = 0;  // block inputs of a group: on the device, or away until backward
    // Groups of a step's micro-batches. Each visits the weights; between two of them the
    // accumulators of all that trains go to the host and back.
    double groups = 1, accumulator_bytes = 0;
    CommTraffic comm{};  // that must reach this rank from the others
    double device_bytes = 0, host_bytes = 0,
           nvme_bytes = 0;    // left for weights, state and inputs; may be infinite
    Measurements measured{};  // as this rank shares the machine
};

struct Bound {
    double seconds = 0;
    Link binding = Link::compute;  // the one that sets it
    // Shares of the best placement; gradients lie where their state does.
    double state_in_host = 0, weights_on_nvme = 0, weights_on_device = 0, state_on_device = 0;
    model::OfSaved<double> saved{};
};

// `below`: of placements that take less; if there are none, no more is known than these seconds.
Bound lower_bound(const BoundInput& input, double below = std::numeric_limits<double>::infinity());

}  // namespace ferry::cost
