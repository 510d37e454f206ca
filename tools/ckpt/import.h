// `ferry ckpt import`: a checkpoint of what another program, or a run with other settings, left.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "tools/options/override_options.h"

namespace ferry::tools {

struct ImportOptions {
    std::string config{}, source{};
    Overrides overrides{};
    std::optional<int64_t> step{};  // that it is of; none: as its files say
    bool json = false;
};
// Writes the checkpoint into checkpoint.dir. The source may be the directory of the configuration's
// own durable steps, which stay as they are. Throws usage where the source is of another model or
// does not say its step, and io where it is damaged or the checkpoint cannot be written.
void import_checkpoint(const ImportOptions& options);

}  // namespace ferry::tools
