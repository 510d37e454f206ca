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
// Whether the directory is a path of a run that keeps its state there.
bool holds_durable_steps(const std::string& directory);
// Whether a checkpoint is one of those in a directory.
bool is_in(const std::string& saved, const std::string& directory);

// The directory that checkpoint.dir names; null: there is none. Checkpoints of a run that did not
// come to its end, and is not resumed, are refused: usage.
std::unique_ptr<checkpoint::Steps> claim_checkpoints(const Config& config, const ResumeFrom& from);
// Moves those of a run that came to its end aside: once nothing can refuse the new one.
void make_way(checkpoint::Steps& claimed, const ResumeFrom& from);

}  // namespace ferry::tools
