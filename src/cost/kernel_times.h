// Seconds of a step's compute kernels.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <string>

#include "cost/operation_table.h"
#include "model/saved_activations.h"
#include "swap/schedule.h"

namespace ferry::cost {

// Gives the sizes of one of a plan's kernels: planner::work_of().
using WorkOf = std::function<Work(const swap::Task& kernel)>;

// A kernel of the compute lane that can be timed alone. An update cannot: it would change the
// state.
bool is_timed(const swap::Task& task);
// An update of the optimizer, on the host or, on the compute lane, on the device.
bool is_update(const swap::Task& task);
// Between the stages of a pipeline, at either end.
bool passes(const swap::Task& task);
// Bytes that an update reads and writes in the memory it runs on; 0 for any other task.
double bytes_of_update(const swap::Task& task, const WorkOf& work_of);

// Each kind measured alone once it is warm.
struct KernelTimes {
    // Op, model::LayerKind, and bytes, elements or flags, whatever the Op has. Blocks are alike;
    // edge layers and chunks of different sizes are not.
    using Kind = std::array<int64_t, 3>;
    static Kind kind_of(const swap::Task& task, const WorkOf& work_of);
    static std::string name_of(const Kind& kind);  // "backward, block", "zero, head, 1.06 MiB"
    std::map<Kind, double> seconds{};
    // Seconds of the kernels that compute each activation that a block may save for backward. 0:
    // not known.
    model::OfSaved<double> saved_s{};
    // Seconds of a kernel. One of a size that was not measured, as with other chunks, takes as long
    // a byte as the nearest size. A block's backward that saves other activations takes as long as
    // a measured one, and what computes those activations. A kind that was not measured is a bug:
    // see covers().
    double of(const swap::Task& task, const WorkOf& work_of) const;
    bool covers(const swap::Schedule& step, const WorkOf& work_of) const;
    double sum(const swap::Schedule& step, const WorkOf& work_of) const;
    // The part of a block's backward that saving this activation spares, or has spared.
    double saved_by(model::Saved what, const swap::Task& backward, const WorkOf& work_of) const;
    // The longest time of all sizes that were timed. It may have one more gradient than another
    // layer of its kind needs, and recomputes everything. 0: none was timed.
    double longest(Op op, model::LayerKind layer) const;
};

// Rates of products, and of bytes that move beside them.
struct Rates {
    double flops_per_s = 0, bytes_per_s = 0;
};
constexpr double kAssumedDeviceBytesPerS = 2e12;
// Times of every kernel of the step, from what it multiplies and moves instead of measurements.
// saved_flops: operations that give each activation that a block may save.
KernelTimes assumed_times(const swap::Schedule& step, const WorkOf& work_of, int64_t tokens,
                          const model::OfSaved<double>& saved_flops, const Rates& rates);

}  // namespace ferry::cost
