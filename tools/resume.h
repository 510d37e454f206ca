// What `ferry train --resume` goes on from, and what a run finds where it writes its checkpoints.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "checkpoint/steps.h"
#include "ferry/config.h"

namespace ferry::tools {

struct ResumeFrom {
    bool durable = false;      // durable steps, on the paths of budgets.nvme
    std::string checkpoint{};  // DIR/step-00000100; empty: none
    bool any() const { return durable || !checkpoint.empty(); }
};
// `option`: none where it was not given, "" where nothing stands behind it, "latest", a checkpoint,
// a directory of them or one that holds durable steps. Throws usage where that is not there.
ResumeFrom resume_from(const std::optional<std::string>& option, const Config& config);
// Whether a checkpoint is one of those in a directory.
bool is_in(const std::string& saved, const std::string& directory);

// The directory that checkpoint.dir names; null: there is none. Of a run that came to its end,
// checkpoints are moved aside; of another one, which is not resumed, they are refused: usage.
std::unique_ptr<checkpoint::Steps> claim_checkpoints(const Config& config, const ResumeFrom& from);

}  // namespace ferry::tools
