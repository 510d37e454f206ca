// Layouts of many ranks: how many share tensors, layers and state, and what a step then takes. By
// arithmetic alone, so that thousands of ranks are weighed in no time; no schedule is recorded.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "cost/measurements.h"
#include "cost/traffic.h"

namespace ferry::cost {

// A model and a step's batch, whole.
struct ModelSizes {
    int64_t hidden = 0, blocks = 0, heads = 0, kv_heads = 0;
    double block_elements = 0;  // of one block; all of them train
    double table_elements = 0;  // of the embedding, and as many of a head
    bool tied = false;
    double attention_flops = 0;           // of a block and a token, forward
    int64_t sequence = 0, sequences = 0;  // tokens of one; of a step, on all ranks together
    ElementBytes element{};
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

// A rank's, of the stage that has most.
struct Layout {
    int64_t tensor = 1, pipeline = 1, replicas = 1;
    int64_t zero_stage = 1;
    int64_t micro_batch = 1, micro_batches = 1;  // sequences of one; of a replica
    StateOn state = StateOn::device;
    double seconds = 0;  // of a step
    // Of them: with nothing but products; waiting for other stages; exchanges and updates that
    // nothing hides.
    double compute_seconds = 0, bubble_seconds = 0, exchange_seconds = 0, update_seconds = 0;
    double device_bytes = 0, host_bytes = 0, nvme_bytes = 0;
    // That a rank sends in a step: sums of tensors, block inputs and their gradients, state and
    // gradients; and what it copies and stores.
    double tensor_bytes = 0, pipeline_bytes = 0, zero_bytes = 0, copied_bytes = 0, stored_bytes = 0;
    double bubble() const { return seconds > 0 ? bubble_seconds / seconds : 0; }
};

// The arithmetic's seconds of recorded steps of GPUs over those that they took: the least and the
// most of them (bench/results/layouts.json). None of these shared tensors or layers.
inline constexpr double kArithmeticLeast = 0.8845, kArithmeticMost = 1.2352;

// Bytes a second that reach one of so many ranks, of which its host has `here`: from those one
// after the other at the one rate, from all others at the other.
double mean_rate(int64_t ranks, int64_t here, double inside_host, double outside);

// What a step takes in this layout, and the memory of it; `fits`: whether there is as much.
struct Weighed {
    Layout layout{};
    bool fits = false;
};
Weighed weigh(const ModelSizes& model, const Cluster& cluster, Layout layout);

// The fastest that fit, at most so many, the fastest first; of each (tensor, pipeline, replicas)
// the best one alone. Groups that share tensors stay inside a host. None: nothing fits.
std::vector<Layout> best_layouts(const ModelSizes& model, const Cluster& cluster, size_t most);

}  // namespace ferry::cost
