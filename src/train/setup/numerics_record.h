// The numerics record of a run: everything that orders or rounds a number (docs/numerics.md).
#pragma once

#include <cstdint>
#include <string>

#include "ferry/config.h"
#include "ferry/device.h"
#include "model/model.h"
#include "ops/product_table.h"

namespace ferry::train {

// The record as text; numerics_hash() is its hash. `machine`: what the device adds, see
// machine_text.
std::string numerics_text(const Config& config, const model::Shape& shape,
                          const std::string& machine, int ranks);
// The model alone: what of it decides the numbers.
std::string shape_text(const model::Shape& shape);
// The same of what a kernel knows, without the machine: one micro-batch, the default optimizer.
std::string model_text(const Config& config, const model::Shape& shape, int ranks);
uint64_t numerics_hash(const Config& config, const model::Shape& shape, const std::string& machine,
                       int ranks);
// Both, as a manifest has them.
struct NumericsRecord {
    uint64_t hash = 0;
    std::string text{};  // the hash, and behind it in brackets numerics_text()
};
NumericsRecord numerics_record_of(const Config& config, const model::Shape& shape,
                                  const std::string& machine, int ranks);
// The device's part: its operations and libraries, and the same behind its name. `products`: the
// table that its operations go by, null where there is none.
std::string library_text(const Device& device, const Config& config,
                         const ops::ProductTable* products);
std::string machine_text(const Device& device, const Config& config,
                         const ops::ProductTable* products);
// The CPU device's, with OpenBLAS's kernels of that core.
std::string machine_text_with(const Device& cpu, const std::string& blas_core);

}  // namespace ferry::train
