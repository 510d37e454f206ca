// A directory of checkpoints: DIR/step-00000100, one a step. What is not complete has no such name.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/files.h"
#include "checkpoint/manifest.h"
#include "ferry/error.h"

namespace ferry::checkpoint {

std::string name_of_step(int64_t step);
std::optional<int64_t> step_of_name(std::string_view name);

struct Step {
    int64_t step = 0;
    std::string path{};
};
// Sorted by number; none where the directory is not there. Throws usage for one that cannot be
// read.
std::vector<Step> steps_in(const std::string& directory);
// Throws usage where there is no checkpoint, io where its manifest is missing or cannot be one, and
// what read_manifest() throws.
Manifest manifest_of(const std::string& path);
// Where a checkpoint's directory has the name of another step than the manifest's: what is wrong.
std::optional<Problem> misnamed(const std::string& path, const Manifest& manifest);
// The first thing at this path that is not a checkpoint's: no directory, or a file in it that ferry
// does not write there. "": all of it is.
std::string foreign_at(const std::string& path);
// Directories of checkpoints that another run's checkpoints were moved into (move_aside()).
std::vector<std::string> moved_aside_in(const std::string& directory);

// A path as it was given, without a last "/" or "/.".
std::string without_end(const std::string& given);
// Whether a directory is a checkpoint, perhaps a damaged one: it has the name of a step or a
// manifest.
bool is_checkpoint(const std::string& directory);
// The manifest of a model's directory that is a checkpoint too; none where it is no checkpoint, as
// a manifest.json of another program's. Throws what manifest_of() throws.
std::optional<Manifest> manifest_of_model(const std::string& directory);

// Which checkpoints stay.
struct Keep {
    int64_t last = 2;   // the newest
    int64_t every = 0;  // those of steps that it divides
    int64_t best = 0;   // checkpoints with the lowest held-back loss
};
struct Candidate {
    int64_t step = 0;
    std::optional<double> loss{};  // held-back
};
// Steps that go; `all` by their number. The last one always stays.
std::vector<int64_t> steps_to_remove(std::span<const Candidate> all, const Keep& keep);

// Where the directory's name comes from: what errors tell their reader to change.
enum class NamedBy : uint8_t { configuration, call };

// The directory as the one run has it that writes there.
class Steps {
public:
    // Makes the directory where it is missing, locks it and removes what a kill left. Throws usage
    // where another run has it or it cannot be written to.
    explicit Steps(std::string directory, NamedBy named_by = NamedBy::configuration);
    ~Steps();
    Steps(const Steps&) = delete;
    Steps& operator=(const Steps&) = delete;

    const std::string& directory() const { return directory_; }
    NamedBy named_by() const { return named_by_; }
    // Writes the checkpoint of the manifest's step, durably: `write` makes its files in a directory
    // and returns them. It is there whole at return, or not at all; one of that step before is
    // replaced. Throws what `write` throws, and io, also where the directory was removed since.
    void add(Manifest manifest,
             const std::function<std::vector<Shard>(const std::string& directory)>& write);
    // Bytes that are free there; -1: not known.
    int64_t free_bytes() const;
    // Moves all checkpoints to a new directory in it and returns that one's name.
    std::string move_aside();
    // Removes those that `keep` does not name; a kill leaves each of them whole or gone.
    void retain(const Keep& keep);

private:
    void check_there() const;
    // What is not ferry's is not replaced.
    static void require_replaceable(const std::string& path);

    std::string directory_;
    const NamedBy named_by_;
    int lock_ = -1;
};

}  // namespace ferry::checkpoint
