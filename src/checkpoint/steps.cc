#include "checkpoint/steps.h"

#include <fcntl.h>
#include <spdlog/fmt/fmt.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <set>

#include "base/log.h"
#include "base/process_limits.h"
#include "base/text.h"
#include "checkpoint/array_file.h"
#include "ferry/error.h"

namespace ferry::checkpoint {
namespace {

constexpr int64_t kManifestMost = 256 * kMiB;
constexpr TextFile kManifestFile{.name = "the checkpoint's manifest",
                                 .remedy =
                                     "name a checkpoint, such as DIR/step-00000100: "
                                     "ferry ckpt ls DIR lists them",
                                 .most_bytes = kManifestMost};

constexpr std::string_view kStep = "step-", kBefore = "before-";
constexpr size_t kDigits = 8;

[[noreturn]] void refuse(const std::string& directory, std::string what, std::string measured,
                         std::string remedy) {
    throw Error(Trouble::usage, {.what = std::move(what),
                                 .where = directory,
                                 .measured = std::move(measured),
                                 .remedy = std::move(remedy)});
}

[[noreturn]] void refuse_for_limit(const std::string& directory, int error, std::string limit) {
    throw Error(Trouble::does_not_fit, {.what = "the directory of checkpoints cannot be opened",
                                        .where = directory,
                                        .measured = std::strerror(error),
                                        .limit = std::move(limit),
                                        .remedy = "raise that limit"});
}

std::vector<std::string> names_in(const std::string& directory) {
    std::error_code reason;
    std::filesystem::directory_iterator entries(directory, reason);
    if (reason == std::errc::no_such_file_or_directory) return {};
    if (std::string limit = limit_behind(reason.value()); reason && !limit.empty())
        refuse_for_limit(directory, reason.value(), std::move(limit));
    std::vector<std::string> names;
    for (; !reason && entries != std::filesystem::directory_iterator(); entries.increment(reason))
        names.push_back(entries->path().filename());
    if (reason)
        refuse(directory, "the directory of checkpoints cannot be read", reason.message(),
               "name a directory that you may read");
    return names;
}

// Files that ferry writes into a checkpoint: of one shard, or of several.
bool is_own_name(std::string_view name) {
    constexpr std::string_view kEnd = ".safetensors", kNumbers = "-00001-of-00001";
    if (name == kManifestName || name == "config.json" || name == "model.safetensors.index.json")
        return true;
    if (!name.ends_with(kEnd)) return false;
    name.remove_suffix(kEnd.size());
    if (name.size() > kNumbers.size()) {
        const std::string_view numbers = name.substr(name.size() - kNumbers.size());
        const auto alike = [](char one, char other) {
            return one == other || (one >= '0' && one <= '9' && other >= '0' && other <= '9');
        };
        if (std::ranges::equal(numbers, kNumbers, alike)) name.remove_suffix(kNumbers.size());
    }
    for (const std::string_view of_a_rank :
         {"error_of_rank_", "momentum_of_rank_", "moved_of_rank_"}) {
        if (name.starts_with(of_a_rank) && name.size() > of_a_rank.size())
            return name.find_first_not_of("0123456789", of_a_rank.size()) == std::string_view::npos;
    }
    constexpr std::array<std::string_view, 7> kFiles{
        "model",      "master", "exp_avg", "exp_avg_sq", "exp_avg_scales", "exp_avg_sq_scales",
        "owner_error"};
    return std::ranges::find(kFiles, name) != kFiles.end();
}

bool holds_own_files(const std::string& path) {
    if (kind_of(path) != FileKind::directory) return false;
    const std::vector<std::string> names = names_in(path);
    return std::ranges::any_of(names, is_own_name);
}

}  // namespace

std::string name_of_step(int64_t step) { return fmt::format("{}{:0{}}", kStep, step, kDigits); }

std::optional<int64_t> step_of_name(std::string_view name) {
    int64_t step = -1;
    if (!name.starts_with(kStep)) return {};
    const std::string_view digits = name.substr(kStep.size());
    const auto read = std::from_chars(digits.data(), digits.data() + digits.size(), step);
    const bool whole = read.ec == std::errc() && read.ptr == digits.data() + digits.size();
    return whole && step >= 0 && name_of_step(step) == name ? std::optional(step) : std::nullopt;
}

std::vector<Step> steps_in(const std::string& directory) {
    std::vector<Step> steps;
    for (const std::string& name : names_in(directory)) {
        if (const auto step = step_of_name(name))
            steps.push_back({*step, std::filesystem::path(directory) / name});
    }
    std::ranges::sort(steps, {}, &Step::step);
    return steps;
}

Manifest manifest_of(const std::string& path) {
    const std::filesystem::path name = std::filesystem::path(path) / kManifestName;
    const auto damage = [&](const char* what, std::string measured) {
        return Error(Trouble::io, {.what = what,
                                   .where = name,
                                   .measured = std::move(measured),
                                   .remedy = "use another checkpoint: ferry ckpt ls lists them"});
    };
    if (kind_of(name) == FileKind::none && holds_own_files(path))
        throw damage("the checkpoint has no manifest", "");
    try {
        return read_manifest(read_text_file(name, kManifestFile), name);
    } catch (const Error& error) {
        std::error_code unknown;
        const auto status = std::filesystem::status(name, unknown);
        const bool no_file = std::filesystem::exists(status) && !is_regular_file(status);
        const bool too_large = std::filesystem::is_regular_file(status) &&
                               std::filesystem::file_size(name, unknown) > kManifestMost;
        if (error.trouble() != Trouble::usage || !(no_file || too_large)) throw;
        throw damage("the checkpoint's manifest is damaged", error.problem().measured);
    }
}

std::optional<Problem> misnamed(const std::string& path, const Manifest& manifest) {
    const std::filesystem::path plain = without_end(path);
    const auto step = step_of_name(plain.filename().string());
    if (!step || *step == manifest.step) return {};
    const std::filesystem::path right = plain.parent_path() / name_of_step(manifest.step);
    return Problem{
        .what = "the checkpoint has the name of another step",
        .where = path,
        .measured = fmt::format("its manifest is of step {}", manifest.step),
        .limit = fmt::format("step {}, as its directory is called", *step),
        .remedy = fmt::format("give it its own name: mv {} {}", plain.string(), right.string())};
}

std::string foreign_at(const std::string& path) {
    std::error_code reason;
    const auto status = std::filesystem::symlink_status(path, reason);
    if (std::filesystem::is_symlink(status)) return "a link";
    if (!std::filesystem::is_directory(status)) return "no directory";
    std::filesystem::directory_iterator entries(path, reason);
    for (; !reason && entries != std::filesystem::directory_iterator(); entries.increment(reason)) {
        std::string name = entries->path().filename();
        const bool plain = entries->is_regular_file(reason) && !entries->is_symlink(reason);
        if (!plain || !is_own_name(name)) return name;
    }
    return reason ? reason.message() : "";
}

std::vector<std::string> moved_aside_in(const std::string& directory) {
    std::vector<std::string> found;
    for (const std::string& name : names_in(directory)) {
        const std::string path = std::filesystem::path(directory) / name;
        if (name.starts_with(kBefore) && kind_of(path) == FileKind::directory &&
            !steps_in(path).empty())
            found.push_back(path);
    }
    std::ranges::sort(found);
    return found;
}

std::string without_end(const std::string& given) {
    std::filesystem::path path(given);
    while (path.has_parent_path() && path != path.root_path() &&
           (!path.has_filename() || path.filename() == "."))
        path = path.parent_path();
    return path;
}

bool is_checkpoint(const std::string& directory) {
    const std::filesystem::path path(directory);
    return kind_of(path / kManifestName) != FileKind::none ||
           step_of_name(path.filename().string()).has_value();
}

std::optional<Manifest> manifest_of_model(const std::string& directory) {
    const std::filesystem::path path(directory);
    const std::string name = path / kManifestName;
    if (kind_of(name) == FileKind::none) return {};
    const std::string text = read_text_file(name, kManifestFile);
    // Either word: one of them may be what is damaged.
    const bool is_ours = step_of_name(path.filename().string()) ||
                         text.find("\"numerics_hash\"") != std::string::npos ||
                         text.find("\"shards\"") != std::string::npos;
    if (!is_ours) return {};
    return read_manifest(text, name);
}

std::vector<int64_t> steps_to_remove(std::span<const Candidate> all, const Keep& keep) {
    std::set<int64_t> kept;
    std::vector<Candidate> best;
    for (size_t i = 0; i < all.size(); ++i) {
        const auto behind = static_cast<int64_t>(all.size() - 1 - i);
        if (behind < std::max<int64_t>(1, keep.last)) kept.insert(all[i].step);
        if (keep.every > 0 && all[i].step % keep.every == 0) kept.insert(all[i].step);
        if (all[i].loss && !std::isnan(*all[i].loss)) best.push_back(all[i]);
    }
    std::ranges::stable_sort(best, {}, [](const Candidate& one) { return *one.loss; });
    for (size_t i = 0; i < best.size() && static_cast<int64_t>(i) < keep.best; ++i)
        kept.insert(best[i].step);
    std::vector<int64_t> gone;
    for (const Candidate& one : all)
        if (!kept.contains(one.step)) gone.push_back(one.step);
    return gone;
}

Steps::Steps(std::string directory, NamedBy named_by)
    : directory_(std::move(directory)), named_by_(named_by) {
    const auto with_another = [&](const std::string& one) {
        return (named_by_ == NamedBy::call ? "call it with " : "set checkpoint.dir to ") + one;
    };
    std::error_code reason;
    std::filesystem::create_directories(directory_, reason);
    if (kind_of(directory_) != FileKind::directory)
        refuse(directory_, "the directory of checkpoints cannot be made",
               reason ? reason.message() : "", with_another("another directory"));
    if (::access(directory_.c_str(), W_OK | X_OK) != 0)
        refuse(directory_, "no checkpoint can be written there", std::strerror(errno),
               with_another("a directory that you may write to"));
    lock_ = open_above_standard(directory_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (std::string limit = lock_ < 0 ? limit_behind(errno) : ""; !limit.empty())
        refuse_for_limit(directory_, errno, std::move(limit));
    // Where nothing can be locked, two runs may meet.
    if (lock_ >= 0 && ::flock(lock_, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
        ::close(lock_);
        refuse(directory_, "another run writes its checkpoints there", "the directory is locked",
               with_another("a directory of its own, or wait for the other run to end"));
    }
    for (const std::string& name : names_in(directory_)) {
        if (!is_leftover(name) || !step_of_name(name.substr(0, kStep.size() + kDigits))) continue;
        const std::filesystem::path left = std::filesystem::path(directory_) / name;
        log_info("removing " + left.string() + ", which a run left that was killed");
        std::filesystem::remove_all(left, reason);
        if (reason) log_warn(left.string() + " cannot be removed: " + reason.message());
    }
}

Steps::~Steps() {
    if (lock_ >= 0) ::close(lock_);
}

void Steps::check_there() const {
    struct stat then {
    }, now{};
    const bool there = ::stat(directory_.c_str(), &now) == 0;
    const int error = errno;
    const bool same = lock_ < 0 || ::fstat(lock_, &then) != 0 ||
                      (then.st_dev == now.st_dev && then.st_ino == now.st_ino);
    if (there && same) return;
    throw Error(Trouble::io,
                {.what = "the directory of checkpoints was removed or replaced during the run",
                 .where = directory_,
                 .measured = there ? "another one is there" : std::strerror(error),
                 .remedy = "put it back; a new run makes it anew"});
}

void Steps::require_replaceable(const std::string& path) {
    std::error_code unknown;
    if (!std::filesystem::exists(std::filesystem::symlink_status(path, unknown))) return;
    const std::string foreign = foreign_at(path);
    if (foreign.empty()) return;
    throw Error(Trouble::io, {.what = "the checkpoint's name is taken by what is no checkpoint, or "
                                      "not only one: it stays",
                              .where = path,
                              .measured = foreign,
                              .limit = "a checkpoint and nothing else, which is replaced",
                              .remedy = "move it away"});
}

void Steps::add(Manifest manifest,
                const std::function<std::vector<Shard>(const std::string&)>& write) {
    check_there();
    const std::filesystem::path path =
        std::filesystem::path(directory_) / name_of_step(manifest.step);
    require_replaceable(path);
    DraftDirectory draft(path);
    manifest.shards = write(draft.draft());
    write_text_shard(draft.draft(), kManifestName, write_manifest(manifest));
    check_there();
    require_replaceable(path);
    draft.publish();
}

int64_t Steps::free_bytes() const {
    struct statvfs found {};
    if (::statvfs(directory_.c_str(), &found) != 0) return -1;
    return static_cast<int64_t>(found.f_bavail) * static_cast<int64_t>(found.f_frsize);
}

std::string Steps::move_aside() {
    const std::filesystem::path all(directory_);
    for (int number = 1;; ++number) {
        const std::filesystem::path aside = all / fmt::format("{}{}", kBefore, number);
        std::error_code reason;
        if (!std::filesystem::create_directory(aside, reason) && !reason) continue;
        for (const Step& step : steps_in(directory_)) {
            if (!reason)
                std::filesystem::rename(step.path, aside / name_of_step(step.step), reason);
        }
        if (reason)
            refuse(aside, "the checkpoints of the run before cannot be moved aside",
                   reason.message(), "move them away, or set checkpoint.dir to another directory");
        flush_directory(aside);
        flush_directory(directory_);
        return aside;
    }
}

void Steps::retain(const Keep& keep) {
    std::vector<Candidate> all;
    for (const Step& step : steps_in(directory_)) {
        Candidate candidate{.step = step.step};
        if (keep.best > 0) {
            try {
                // The loss of its own step, or none: at other steps the weights were others.
                const Manifest manifest = manifest_of(step.path);
                if (manifest.held_back && manifest.held_back->step == step.step &&
                    std::isfinite(manifest.held_back->loss))
                    candidate.loss = manifest.held_back->loss;
            } catch (const Error& error) {
                log_warn(error.what());
            }
        }
        all.push_back(candidate);
    }
    for (const int64_t step : steps_to_remove(all, keep)) {
        const std::filesystem::path path = std::filesystem::path(directory_) / name_of_step(step);
        if (const std::string foreign = foreign_at(path); foreign.empty())
            remove_directory(path);
        else
            log_warn(fmt::format("{} stays, for it is no checkpoint, or not only one: {}",
                                 path.string(), foreign));
    }
}

}  // namespace ferry::checkpoint
