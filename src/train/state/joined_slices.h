// A tensor of which several ranks have slices, put together.
#pragma once

#include <span>

#include "comm/comm.h"
#include "model/model.h"
#include "shared_values.h"

namespace ferry::train {

struct SlicedModel {
    const model::Shape& whole;
    model::Slicing slicing{};  // this rank's
};

// `mine` gives the values of a run of the layer's elements, here of this rank's slice. `sink` gets
// the whole tensor's, in order, some rows at a time, on every rank. Blocking; all ranks alike.
void join_slices(comm::Communicator& ranks, Executor& executor, const SlicedModel& model,
                 const model::Tensor& tensor, const Source& mine, const Sink& sink);
// The same of several arrays at once, of such widths each, an element apart.
void join_arrays(comm::Communicator& ranks, Executor& executor, const SlicedModel& model,
                 const model::Tensor& tensor, std::span<const Width> widths,
                 const ArraySource& mine, const ArraySink& sink);

}  // namespace ferry::train
