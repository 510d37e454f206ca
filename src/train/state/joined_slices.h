// A tensor of which several ranks have slices, put together.
#pragma once

#include <functional>

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

}  // namespace ferry::train
