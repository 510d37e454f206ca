// What both halves of a placement use: the request, and what is placed so far.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "place.h"
#include "planner/chunks.h"

namespace ferry::planner {

// What is to be placed: place()'s arguments.
struct ToPlace {
    const PlanRequest& request;
    const Workload& work;
    const std::vector<Chunk>& chunks;
    const std::vector<AccumulatorSpill>& spills;
    const cost::Measurements& machine;
    const ToSave& to_save;
    size_t yielded = 0;
};

// The base of both halves.
class Placing {
protected:
    Placing(const ToPlace& what, Placement& result)
        : request_(what.request),
          work_(what.work),
          chunks_(what.chunks),
          spills_(what.spills),
          to_save_(what.to_save),
          yielded_(what.yielded),
          micro_batches_(what.request.micro_batches),
          tied_(what.work.partition.ties(what.work.layers)),
          machine_(what.machine),
          result_(result) {}
    ~Placing() = default;

    bool has_feedback() const { return work_.partition.codecs.momentum.on(); }
    bool has_nvme() const { return !request_.budgets.nvme.empty(); }
    int64_t bytes_of(Class c) const { return buffer_bytes(c, work_); }
    static RowName state_row() { return {RowKind::state, "optimizer state"}; }

    // Whether weights must lie on NVMe: with a split master the weight is half of a version, and
    // durable versions lie there.
    bool stores_weights() const { return work_.state.split && request_.durable; }
    // The share of the state that is on NVMe at least. None: the budget decides.
    std::optional<double> given_fraction() const {
        return request_.durable ? 1 : request_.swap.state_on_nvme;
    }

    const PlanRequest& request_;
    const Workload& work_;
    const std::vector<Chunk>& chunks_;
    const std::vector<AccumulatorSpill>& spills_;
    const ToSave& to_save_;
    const size_t yielded_;
    const int64_t micro_batches_;
    const bool tied_;
    const cost::Measurements& machine_;
    Placement& result_;
};

// The device's budget buys buffers, then whatever shortens the step most: block inputs, saved
// activations or whole layers.
void place_on_device(const ToPlace& what, Placement& result);
// Behind it: host memory goes where a byte saves most traffic, the rest is on NVMe.
void place_behind_device(const ToPlace& what, Placement& result);

}  // namespace ferry::planner
