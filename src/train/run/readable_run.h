// Reading a run's state.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "ferry/train.h"
#include "started_run.h"
#include "train/inside.h"
#include "train/saving/background_save.h"
#include "train/saving/save.h"
#include "train/state/saving.h"
#include "train/state/shared_values.h"
#include "train/state/state_arrays.h"

namespace ferry::train {

// A started run whose state can be read, tensor by tensor: this rank's part of it, or all ranks'.
class ReadableRun : protected StartedRun {
protected:
    ReadableRun(const Config& config, const Runtime& runtime,
                std::shared_ptr<ComputeContext> context)
        : StartedRun(config, runtime, std::move(context)) {}
    ~ReadableRun() = default;

    // Who has a layer, of any stage, as this rank has its own: the same slice of it.
    comm::Communicator& of_all_stages() const;
    // Of these, the first of the stage that updates a layer.
    int first_rank_with(int64_t layer) const;

    // A tensor's values: this rank's, or its owners'; of slices, the whole tensor's.
    void read(int64_t layer, const model::Tensor& tensor, const ValueSink& sink,
              const Source& mine);

    // Also of a layer that another stage updates.
    std::vector<Width> widths_of(int64_t layer, const model::Tensor& tensor) const;

    // The same of all arrays of its state.
    void read_arrays(int64_t layer, const model::Tensor& tensor, const ArraySink& sink);
    ReadArrays reader();

    // Whether each rank reads its part alone, and a thread of it sends that to the first rank's: of
    // all ranks alike.
    bool saves_beside() const { return setup_.context->saving && reads_own_part(plan()); }
    ReadArrays own_reader();
    JoinParts joiner();
};

}  // namespace ferry::train
