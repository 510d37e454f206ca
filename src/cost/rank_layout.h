// Layouts of many ranks: how many share tensors, sequences, layers and state, of which model and on
// which machines.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "cost/measurements.h"
#include "cost/traffic.h"

namespace ferry::cost {

// Whether ranks that share tensors also divide the rows of the residual stream: norms, block inputs
// and what passes between stages are then of a part of the tokens. Here alone it is said.
inline constexpr bool kSharesRows = true;

// Elements of a layer, by how ranks that share tensors divide them.
struct LayerElements {
    int64_t inner = 0;       // by columns of the MLP's inner width
    int64_t of_queries = 0;  // by heads of keys with their queries; more ranks divide one head's
    int64_t of_keys = 0;     // by heads of keys; each rank has at least one
    int64_t whole = 0;       // not at all: each rank has them
    int64_t all() const { return inner + of_queries + of_keys + whole; }
};

// A model and a step's batch, whole. All of it trains.
struct ModelSizes {
    int64_t hidden = 0, blocks = 0, heads = 0, kv_heads = 0, head_dim = 0;
    int64_t intermediate = 0;   // the MLP's inner width
    int64_t mlp_columns = 0;    // outputs of gate and up, and inputs of down
    bool has_patterns = false;  // of attention: their heads divide evenly or not at all
    LayerElements block{};
    int64_t vocab = 0;  // rows of the embedding, and of a head
    int64_t embedding_whole = 0,
            head_whole = 0;  // elements beside these: positions, the final norm
    bool tied = false;
    double attention_flops = 0;           // of a block and a token, forward
    int64_t sequence = 0, sequences = 0;  // tokens of one; of a step, on all ranks together
    int64_t residual = 4;                 // bytes of an element of the residual stream
    ElementBytes element{};
    bool shares_rows = kSharesRows;
    double parameters() const;
};

// 0: there is none. Bytes a second go each way.
struct Cluster {
    int64_t ranks = 1, on_a_host = 1;
    Measurements measured{};                        // of a rank (of_rank()); no kernels
    double device_bytes = 0;                        // a rank's, beside its context
    double host_bytes = 0, nvme_bytes = 0;          // a host's, all its ranks'
    double network_bytes_per_s = 0, latency_s = 0;  // of a host, and of an operation
    int64_t here() const { return ranks < on_a_host ? ranks : on_a_host; }
};

enum class StateOn : uint8_t { device, host, nvme };
inline constexpr std::array kStateOn{StateOn::device, StateOn::host, StateOn::nvme};
const char* name_of(StateOn tier);

// How stages take groups of micro-batches. Interleaved: each has several virtual stages, runs of
// blocks, and takes groups through them in turn. Round robin: all groups go through one virtual
// stage before the next one, so that with one group its weights come once forward and once back.
enum class Order : uint8_t { one_f_one_b, zero_bubble, interleaved, round_robin };
inline constexpr std::array kOrders{Order::one_f_one_b, Order::zero_bubble, Order::interleaved,
                                    Order::round_robin};
const char* name_of(Order order);  // as parallel.schedule has it

// A rank's, of the stage that has most.
struct Layout {
    int64_t tensor = 1, sequence = 1, pipeline = 1, replicas = 1;
    Order order = Order::one_f_one_b;
    int64_t virtual_stages = 1;  // of a stage, runs of blocks
    int64_t zero_stage = 1;
    int64_t micro_batch = 1, micro_batches = 1;  // sequences of one; of a replica
    int64_t groups = 1;                          // of these, that pass through the stages
    StateOn state = StateOn::device;
    bool weights_stay = true;  // on the device; else they come from the host at each visit
    double seconds = 0;        // of a step
    // Of them: with nothing but products; waiting for other stages; exchanges and updates that
    // nothing hides.
    double compute_seconds = 0, bubble_seconds = 0, exchange_seconds = 0, update_seconds = 0;
    double device_bytes = 0, host_bytes = 0, nvme_bytes = 0;
    int64_t state_bytes = 0;  // of these, of state and of gradients that wait for the update
    // That a rank sends in a step: sums of tensors, heads of sequences, block inputs and their
    // gradients, state and gradients; and what it copies and stores.
    double tensor_bytes = 0, sequence_bytes = 0, pipeline_bytes = 0, zero_bytes = 0,
           copied_bytes = 0, stored_bytes = 0;
    double across_hosts_bytes = 0;  // of what it sends
    double sent_bytes() const {
        return tensor_bytes + sequence_bytes + pipeline_bytes + zero_bytes;
    }
    double in_host_bytes() const { return sent_bytes() - across_hosts_bytes; }
    double bubble() const { return seconds > 0 ? bubble_seconds / seconds : 0; }
};

// Why so many ranks cannot share tensors inside a host; "": they can. Whatever divides the heads as
// kernels do (model::require_slices) may: also where ranks have a head less, and zeros in its
// place.
std::string refusal_of_tensor(const ModelSizes& model, const Cluster& cluster, int64_t tensor);

// Whether the model divides so, wherever these ranks are; "": it does.
std::string refusal_of_heads(const ModelSizes& model, int64_t tensor);

}  // namespace ferry::cost
