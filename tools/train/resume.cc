#include "resume.h"

#include <spdlog/fmt/fmt.h>

#include <filesystem>

#include "base/files.h"
#include "base/log.h"
#include "checkpoint/manifest.h"
#include "checkpoint/saved.h"
#include "ferry/error.h"
#include "tools/options/refuse.h"
#include "train/setup/rank_share.h"

namespace ferry::tools {
namespace {

constexpr const char* kVolume = "ferry.volume";  // aio's

bool same_place(const std::filesystem::path& one, const std::filesystem::path& other) {
    std::error_code unknown;
    return std::filesystem::equivalent(one, other, unknown);
}

ResumeFrom newest_in(const std::string& directory) {
    const auto steps = checkpoint::steps_in(directory);
    if (steps.empty()) {
        const auto aside = checkpoint::moved_aside_in(directory);
        refuse("there is nothing to resume: no checkpoint is there", directory,
               aside.empty() ? "" : "those of a run that ended are in " + aside.back(),
               aside.empty() ? "start without --resume"
                             : "start without --resume, or name them: --resume " + aside.back());
    }
    return {.checkpoint = steps.back().path};
}

// Ranks have directories of their own there. Those of this host may not begin with the first.
bool a_rank_holds_some(const std::string& directory) {
    std::error_code reason;
    for (const auto& entry : std::filesystem::directory_iterator(directory, reason))
        if (train::rank_of(entry.path()) && holds_durable_steps(entry.path())) return true;
    return false;
}

ResumeFrom durable_at(const std::string& directory, const Config& config) {
    for (const NvmePath& path : config.budgets.nvme)
        if (config.checkpoint.durable_steps && same_place(path.path, directory))
            return {.durable = true};
    refuse("the directory holds durable steps, and not of this configuration", directory,
           config.checkpoint.durable_steps ? "budgets.nvme does not name it"
                                           : "checkpoint.durable_steps is false",
           "resume with the configuration that they are of");
}

}  // namespace

ResumeFrom resume_from(const std::optional<std::string>& option, const Config& config) {
    if (!option) return {};
    const std::string& dir = config.checkpoint.dir;
    if (option->empty() && (config.checkpoint.durable_steps || dir.empty()))
        return {.durable = true};
    if (option->empty() || *option == "latest") {
        if (dir.empty())
            refuse("there is nothing to resume: no directory of checkpoints is given",
                   "--resume latest", "checkpoint.dir is not set",
                   "set checkpoint.dir, or name a checkpoint: --resume DIR");
        return newest_in(dir);
    }
    const std::filesystem::path path = checkpoint::without_end(*option);
    switch (kind_of(path)) {
        case FileKind::directory:
            break;
        case FileKind::none:
            refuse("there is nothing to resume: no such directory", *option, "",
                   "name a checkpoint, such as DIR/step-00000100: ferry ckpt ls DIR lists them");
        default:
            refuse("a checkpoint is a directory", *option, "a file",
                   "name a checkpoint, such as DIR/step-00000100");
    }
    if (checkpoint::is_checkpoint(path)) return {.checkpoint = path};
    if (holds_durable_steps(path) || a_rank_holds_some(path)) return durable_at(path, config);
    return newest_in(path);
}

bool holds_durable_steps(const std::string& directory) {
    return kind_of(std::filesystem::path(directory) / kVolume) != FileKind::none;
}

bool is_in(const std::string& saved, const std::string& directory) {
    if (saved.empty() || directory.empty()) return false;
    const std::filesystem::path path = checkpoint::without_end(saved);
    const std::filesystem::path parent = path.parent_path();
    return same_place(parent.empty() ? "." : parent, directory);
}

std::unique_ptr<checkpoint::Steps> claim_checkpoints(const Config& config, const ResumeFrom& from) {
    const std::string& dir = config.checkpoint.dir;
    if (dir.empty()) return nullptr;
    auto claimed = std::make_unique<checkpoint::Steps>(dir);
    const auto steps = checkpoint::steps_in(dir);
    if (steps.empty() || from.durable || is_in(from.checkpoint, dir)) return claimed;
    std::string found = fmt::format("step {}", steps.back().step), from_newest = "latest";
    try {
        const checkpoint::Saved newest(steps.back().path);
        if (newest.manifest().finished()) return claimed;
        found += fmt::format(" of {}", newest.manifest().steps);
    } catch (const Error& error) {
        found += fmt::format(", which cannot be read ({})", error.problem().what);
        from_newest = checkpoint::whole_before(steps.back().path).value_or("");
    }
    refuse(
        "checkpoint.dir holds checkpoints of a run that did not come to its end", dir, found,
        (from_newest.empty() ? "none of them is whole: "
                             : "go on: the same command with --resume " + from_newest + "; or ") +
            "start afresh with another checkpoint.dir, or after ferry ckpt rm " + dir + " --all");
}

void make_way(checkpoint::Steps& claimed, const ResumeFrom& from) {
    const std::string& dir = claimed.directory();
    const auto steps = checkpoint::steps_in(dir);
    if (steps.empty() || from.durable || is_in(from.checkpoint, dir)) return;
    log_info(
        fmt::format("{} holds checkpoints of a run that came to its end (step {}): they are "
                    "now in {}",
                    dir, steps.back().step, claimed.move_aside()));
}

}  // namespace ferry::tools
