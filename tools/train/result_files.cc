#include "result_files.h"

#include "checkpoint/checkpoint.h"
#include "tools/output/writable.h"

namespace ferry::tools {

void check_result_files(const TrainOptions& options, const Config& config) {
    check_writable("--weights-out", options.weights_out, checkpoint::kSafetensors);
    check_trace_file(options.trace, options, config);
    check_outside("--weights-out", options.weights_out, "the model that is trained",
                  config.model.path);
    check_outside("--weights-out", options.weights_out, "--export", options.exported.directory);
    check_no_volume("--weights-out", options.weights_out, config.budgets.nvme);
    check_no_volume("--export", options.exported.directory, config.budgets.nvme);
}

void check_trace_file(const std::string& file, const TrainOptions& options, const Config& config) {
    check_writable("--trace", file, {.beginning = "{\"displayTimeUnit\""});
    check_differ("--trace", file, "--weights-out", options.weights_out);
    check_outside("--trace", file, "the model that is trained", config.model.path);
    check_outside("--trace", file, "--export", options.exported.directory);
    check_no_volume("--trace", file, config.budgets.nvme);
}

}  // namespace ferry::tools
