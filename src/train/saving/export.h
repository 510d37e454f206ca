// Weights of a run or of a checkpoint, for what writes them to a file or a directory.
#pragma once

#include <cstddef>
#include <functional>
#include <optional>

#include "checkpoint/saved.h"
#include "ferry/export.h"
#include "train/inside.h"

namespace ferry::train {

// Gives the values of the i-th of all layers' tensors.
using TensorSource = std::function<void(size_t i, const ValueSink& sink)>;
// Runs write(source), which asks for every tensor once and in order, on the first rank. Where it
// fails the rest is read all the same, as the other ranks give all of it, and its error comes back.
// Errors of the engine are thrown.
[[nodiscard]] std::optional<NotWritten> write_weights(
    Engine& engine, const std::function<void(const TensorSource&)>& write);
// Every other rank calls this meanwhile.
void give_weights(Engine& engine);

// export_model() of a checkpoint; `progress` hears of bytes written, and of how many there are.
// What is copied is checked: throws io where a byte of it is not as it was written, and leaves no
// file.
void export_checkpoint(const checkpoint::Saved& saved, const ExportOptions& options,
                       const ExportDirectory& directory, const ExportProgress& progress);

}  // namespace ferry::train
