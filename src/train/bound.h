// The lower bound of a step, from budgets and link speeds alone: every link
// busy without a pause, everything overlapped, the best admissible placement. It knows nothing of
// the planner's choices; the two are compared.
#pragma once

#include <cstdint>
#include <limits>
#include <string>

#include "model/model.h"
#include "train/forecast.h"
#include "zero/zero.h"

namespace ferry::train {

// The weights in the compute type, frozen ones included.
struct WeightTraffic {
    double bytes = 0;
    double frozen_bytes = 0;
    double read_bytes = 0;  // that a step needs on the device, a layer counted at each visit
};
// Blocks are visited forward, and backward where a gradient passes through them. The head is
// visited once. Of the embedding only the rows of a step's tokens are, and all of it when it is
// tied.
WeightTraffic weight_traffic(const std::vector<model::Layer>& layers, const model::Shape& shape,
                             int64_t step_tokens, DType type);

// Bytes that must reach a rank from the others in a step, wherever its state and weights lie. Stage
// 3 sends a layer's weights at each visit, stages 1 and 2 those that were updated, once. Gradients
// go to the rank that updates by them.
double comm_traffic(const std::vector<model::Layer>& layers, const zero::Partition& partition,
                    DType compute, DType wire);
double comm_rate(const LinkSpeeds& speeds);  // bytes a second that reach a rank from the others
// Of so many operations that bring these bytes.
double comm_seconds(double bytes, int64_t operations, const LinkSpeeds& speeds);

// Of a query of a block, on average over a sequence.
double keys_seen(const model::Shape& shape, int64_t sequence, int64_t block);

// Floating-point operations that the model asks for in a step, without recomputation. A matrix
// takes 2 a token and element forward, 2 for its input's gradient where there is one, and 2 for its
// own where it trains: 6 N T in all. Attention takes the scores and the weighted sums over the keys
// that a query sees: 6 s d a token and block without a window.
double model_flops(const std::vector<model::Layer>& layers, const model::Shape& shape,
                   int64_t sequence, int64_t step_tokens);

struct BoundInput {
    double kernel_seconds = 0;  // of one step, each call measured alone, everything recomputed
    // Of them, those that keeping all of such a result saves, and the device memory that it takes.
    struct Keeping {
        double seconds = 0, bytes = 0;
    };
    model::OfSaved<Keeping> keeping{};
    double parameters = 0;                    // trainable
    double weight_bytes = 4, wire_bytes = 4;  // of each
    double state_bytes = 12;                  // of each: p and the optimizer's moments
    bool split = false;                       // the update reads the weights too
    WeightTraffic weights{};
    double input_bytes = 0;  // block inputs of a group: on the device, or away until backward
    // Of micro-batches, in a step. Each visits the weights, and between them the accumulators of
    // all that trains go to the host and back.
    double groups = 1, accumulator_bytes = 0;
    double comm_bytes = 0;  // that must reach this rank from the others
    double device_bytes = 0, host_bytes = 0,
           nvme_bytes = 0;        // left for weights, state and inputs; may be infinite
    bool device_is_host = false;  // its memory is DRAM as well
    LinkSpeeds speeds{};
};

struct Bound {
    double seconds = 0;
    std::string binding{};  // the link that sets it
    // Of the best placement; gradients lie where their state does.
    double state_in_host = 0, weights_on_nvme = 0, weights_on_device = 0, state_on_device = 0;
    model::OfSaved<double> kept{};
};

// `below`: of placements that take less; if there are none, no more is known than these seconds.
Bound lower_bound(const BoundInput& input, double below = std::numeric_limits<double>::infinity());

}  // namespace ferry::train
