#include "readable_run.h"

#include <cstdint>
#include <vector>

#include "train/inside.h"
#include "train/saving/background_save.h"
#include "train/saving/save.h"
#include "train/setup/stages.h"
#include "train/state/joined_slices.h"
#include "train/state/shared_values.h"
#include "train/state/state_arrays.h"
#include "train/state/state_io.h"

namespace ferry::train {

comm::Communicator& ReadableRun::of_all_stages() const {
    return setup_.context->of_all_stages ? *setup_.context->of_all_stages : *setup_.ranks;
}

int ReadableRun::first_rank_with(int64_t layer) const {
    return setup_.world.sharers() * stage_with(plans_->cut().stages, layer);
}

void ReadableRun::read(int64_t layer, const model::Tensor& tensor, const ValueSink& sink,
                       const Source& mine) {
    const auto of_slice = [&](const zero::Run& run, const ValueSink& to) {
        const model::Layer& shape = setup_.layers[static_cast<size_t>(layer)];
        if (setup_.world.pipeline > 1)
            return share_values(of_all_stages(), setup_.executor, plans_->cut().partition, shape,
                                run, mine, to, first_rank_with(layer));
        if (!setup_.sharers) return mine(run, to);
        share_values(*setup_.sharers, setup_.executor, plans_->cut().partition, shape, run, mine,
                     to);
    };
    if (!tensor.is_slice()) return of_slice({tensor.offset, tensor.count}, sink);
    join_slices(*setup_.ranks, setup_.executor, {setup_.shape(), setup_.world.slicing()}, tensor,
                of_slice, sink);
}

std::vector<Width> ReadableRun::widths_of(int64_t layer, const model::Tensor& tensor) const {
    std::vector<Width> widths;
    for (const StateArray& array :
         state_arrays_of(plan(), setup_.layers[static_cast<size_t>(layer)], tensor))
        widths.push_back(array.width);
    return widths;
}

void ReadableRun::read_arrays(int64_t layer, const model::Tensor& tensor, const ArraySink& sink) {
    const zero::Run whole{tensor.offset, tensor.count};
    const auto mine = [&](const zero::Run& run, const ArraySink& to) {
        state_->read_arrays(layer, run.first, run.count, to);
    };
    if (!setup_.ranks) return mine(whole, sink);
    const model::Layer& shape = setup_.layers[static_cast<size_t>(layer)];
    const std::vector<Width> widths = widths_of(layer, tensor);
    const auto of_slice = [&](const zero::Run& run, const ArraySink& to) {
        if (setup_.world.pipeline > 1)
            return share_arrays(of_all_stages(), setup_.executor, plans_->cut().partition, shape,
                                run, widths, mine, to, first_rank_with(layer));
        if (!setup_.sharers) return mine(run, to);
        share_arrays(*setup_.sharers, setup_.executor, plans_->cut().partition, shape, run, widths,
                     mine, to);
    };
    if (!tensor.is_slice()) return of_slice(whole, sink);
    join_arrays(*setup_.ranks, setup_.executor, {setup_.shape(), setup_.world.slicing()}, tensor,
                widths, of_slice, sink);
}

ReadArrays ReadableRun::reader() {
    return [this](int64_t layer, const model::Tensor& tensor, Kept what, const ArraySink& sink) {
        if (what == Kept::errors) return momentum_->read_errors(layer, tensor, sink);
        read_arrays(layer, tensor, sink);
    };
}

ReadArrays ReadableRun::own_reader() {
    return [this](int64_t layer, const model::Tensor& tensor, Kept, const ArraySink& sink) {
        const zero::Run own =
            own_run(plans_->cut().partition, plan().layers[static_cast<size_t>(layer)],
                    {tensor.offset, tensor.count});
        if (own.count > 0) state_->read_arrays(layer, own.first, own.count, sink);
    };
}

JoinParts ReadableRun::joiner() {
    if (!setup_.ranks || !saves_beside()) return {};
    return [this](int64_t layer, const model::Tensor& tensor, const ArraySource& mine,
                  const ArraySink& sink) {
        share_arrays(*setup_.context->saving, *setup_.context->saving_executor,
                     plans_->cut().partition, plan().layers[static_cast<size_t>(layer)],
                     {tensor.offset, tensor.count}, widths_of(layer, tensor), mine, sink);
    };
}

}  // namespace ferry::train
