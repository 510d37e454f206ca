// Whether the files that `ferry train` is to write can be written, asked before the training.
#pragma once

#include <string>

#include "ferry/config.h"
#include "train_options.h"

namespace ferry::tools {

// Those of the first rank. Throws usage, naming the option.
void check_result_files(const TrainOptions& options, const Config& config);
// A rank's trace. The same.
void check_trace_file(const std::string& file, const TrainOptions& options, const Config& config);

}  // namespace ferry::tools
