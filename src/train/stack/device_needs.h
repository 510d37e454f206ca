// A model's needs on a device, and the device's memory for it.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "ferry/config.h"
#include "ferry/device.h"
#include "ferry/team.h"
#include "model/model.h"
#include "ops/ops.h"
#include "planner/planner.h"

namespace ferry::train {

// The device's operations. Reads the table of products where numerics.products names one. Throws
// usage where that file is no such table.
std::unique_ptr<ops::Ops> ops_on(Device& device, const Config& config, Team& team);
// FLOPs that compute the activations that each block can save of a micro-batch. Those of attention
// count only the keys that a query sees.
model::OfSaved<std::vector<double>> saved_flops(const model::Decoder& decoder);
model::OfSaved<double> most_saved_flops(const model::Decoder& decoder);  // the most of any block
model::OfSaved<int64_t> saved_bytes(const model::Decoder& decoder);
// Bytes that this process will hold on a GPU beside its arena: as measured now, with room for
// kernels that are loaded at their first call. 0 on the CPU device.
int64_t overhead_of(const Device& device);
// The same as the planner takes it.
planner::DeviceNeeds needs_of(const Device& device, const model::Decoder& decoder);
// The budget, or what this device can give of it. Logs it where that is less.
int64_t device_bytes_within(int64_t budget, const Device& device);
// Bytes of the buffers alone, without resident weights and without what the process holds beside
// them.
int64_t device_buffer_bytes(const planner::Plan& plan);
// How many of these bytes, from the arena's begin on, measurements may overwrite. The lists of
// attention's patterns must stay: they are read again.
int64_t overwritable_bytes(const planner::Plan& plan);

}  // namespace ferry::train
