// Gives values that one rank has to every rank that asks.
#pragma once

#include <functional>
#include <span>

#include "comm/comm.h"
#include "model/model.h"
#include "state_arrays.h"
#include "zero/zero.h"

namespace ferry::train {

using Sink = std::function<void(std::span<const float>)>;
// Gives a sink the values of a run of elements, in order, part by part.
using Source = std::function<void(const zero::Run&, const Sink&)>;
using ArraySource = std::function<void(const zero::Run&, const ArraySink&)>;
// Values as one array of bytes, and back. The argument must outlive the result.
ArraySource as_arrays(const Source& values);
ArraySink of_arrays(const Sink& values);

// The elements of this run that lie in this rank's shard; perhaps none. The run is of one segment
// of a layer.
zero::Run own_run(const zero::Partition& partition, const model::Layer& layer,
                  const zero::Run& run);

// Elements [first, first + count) of one segment of a layer: each owner reads what lies in its
// shard by `mine`, and `sink` gets all of them on every rank. Blocking; all ranks alike. The owners
// are `first` and the ranks behind it.
void share_values(comm::Communicator& ranks, Executor& executor, const zero::Partition& partition,
                  const model::Layer& layer, const zero::Run& run, const Source& mine,
                  const Sink& sink, int first = 0);
// The same of several arrays at once, of such widths each.
void share_arrays(comm::Communicator& ranks, Executor& executor, const zero::Partition& partition,
                  const model::Layer& layer, const zero::Run& run, std::span<const Width> widths,
                  const ArraySource& mine, const ArraySink& sink, int first = 0);

}  // namespace ferry::train
