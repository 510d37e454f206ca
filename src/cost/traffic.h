// Bytes and floating-point operations of a step: what is the same in every placement.
#pragma once

#include <cstdint>
#include <vector>

#include "ferry/dtype.h"
#include "model/model.h"
#include "zero/zero.h"

namespace ferry::cost {

// Bytes of a trainable element: its state, and its gradient and weight as they travel.
struct ElementBytes {
    double state = 12;  // the mean where there are several formats
    int64_t wire = 4, weight = 4;
    bool split = false;       // the update reads the weight too
    double updated() const {  // an update's reads and writes
        return 2 * state + static_cast<double>(wire + (split ? 2 : 1) * weight);
    }
    // State and gradient on one tier, until the outcome.
    double state_and_gradient() const { return state + static_cast<double>(wire); }
};
ElementBytes element_bytes(const StateFormat& state, DType compute, DType wire);
// Of memory, that an update of so many elements reads and writes.
inline double update_bytes(double elements, const ElementBytes& each) {
    return elements * each.updated();
}
// Of the gradients' accumulators, in fp32.
inline double accumulator_bytes(double elements) { return elements * 4; }

// An update by the host: the bytes of what it touches, and where these lie if not in its memory.
struct HostUpdate {
    double state = 0, gradient = 0, weight = 0;
    bool reads_weight = false;  // beside writing it
    bool state_stored = false, gradient_stored = false, weight_stored = false;
    bool weight_on_device = false;
};
// Bytes that go to the device, from it, and to and from storage.
struct MovedBytes {
    double up = 0, down = 0, stored = 0;
};
// The gradient comes from the device. What is stored is read once and written once; a weight that
// the update does not read is written alone.
MovedBytes moved_by(const HostUpdate& update);

// The weights in the compute type, frozen ones included.
struct WeightTraffic {
    double bytes = 0;
    double frozen_bytes = 0;
    double read_bytes = 0;  // that a step needs on the device, a layer counted at each visit
};
// Blocks are visited forward, and backward where a gradient passes through them. The head is
// visited once. Of the embedding only the rows of a step's tokens are, and all of it when it is
// tied. Where every rank keeps all weights, forward takes what others updated as it comes from
// them. A stage of a pipeline multiplies by a tied table where it has the head, and a copy of the
// table comes from the stage that updates it.
WeightTraffic weight_traffic(const std::vector<model::Layer>& layers, const model::Shape& shape,
                             int64_t step_tokens, DType type,
                             const zero::Partition& partition = {});

// The ranks that an exchange is among: all that share what travels, those of a host, or those that
// stand alike in their hosts.
enum class Among : uint8_t { all, host, hosts };

// Bytes that reach a rank, by that.
struct CommTraffic {
    double among_all = 0, in_host = 0, across_hosts = 0;
    double bytes() const { return among_all + in_host + across_hosts; }
    CommTraffic& operator+=(const CommTraffic& more);
    double& of(Among ranks) {
        return ranks == Among::all ? among_all : ranks == Among::host ? in_host : across_hosts;
    }
};

// Bytes of one rank's shard as they travel: its weights, as all gather them; its gradient or
// momentum, from one rank to another; its gradient added, from its owner to the others.
struct ShardBytes {
    int64_t weights = 0, part = 0, sum = 0;
};
// Bytes that reach a rank because weights and updates are shared, by when they do.
struct SharedTraffic {
    // At stage 3 before each visit of a layer; at stages 1 and 2 once, what the others updated.
    CommTraffic weights{};
    CommTraffic again{};   // at stage 3 before backward's visit of a block
    CommTraffic update{};  // of gradients, or of momentum to its owner and back
};
SharedTraffic shared_traffic(const zero::Partition& partition, const ShardBytes& shard,
                             zero::Exchanged what);

// Bytes that must reach a rank from the others in a step, wherever its state and weights lie. Stage
// 3 sends a layer's weights at each visit, stages 1 and 2 those that were updated, once. Gradients
// go to the rank that updates by them, or momentum to its owner and back. What passes between the
// stages of a pipeline is left out.
CommTraffic comm_traffic(const std::vector<model::Layer>& layers, const zero::Partition& partition,
                         DType compute, DType wire, zero::Exchanged what);

// Keys that a query of this block sees, on average over a sequence.
double keys_seen(const model::Shape& shape, int64_t sequence, int64_t block);

// Floating-point operations of a layer's products for one token, each multiplication and addition.
// Backward computes the gradients of inputs that something asks for, and those of what trains.
struct LayerFlops {
    double forward = 0;
    double again = 0;      // of forward's, what backward computes again where nothing is saved
    double gradients = 0;  // of inputs and weights
    double weights = 0;    // of these, a block's weights
    // Whether backward passes through attention, whose own products are not among these: two
    // forward, of 2 operations a token, key and element each, and four backward.
    bool through_attention = false;
    double attention_passes() const { return through_attention ? 2 : 0; }  // forward's, backward
};
// `table`: the embedding, where the head multiplies by it. `needs_dx`: the layer below asks for the
// gradient of its output.
LayerFlops layer_flops(const model::Layer& layer, const model::Layer* table, bool needs_dx);

// Floating-point operations that the model asks for in a step, without recomputation: 6 N T where
// all of it trains, and of attention 6 s d a token and block without a window.
double model_flops(const std::vector<model::Layer>& layers, const model::Shape& shape,
                   int64_t sequence, int64_t step_tokens);

}  // namespace ferry::cost
