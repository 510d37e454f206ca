// A trained model as a directory that transformers loads: weights, config.json and, where the model
// came from a directory, its tokenizer's files.
//
// The directory is claimed before the training starts. So two runs cannot write to one place, and a
// place that takes no files is refused at once. config.json is written last. Without it the
// directory is not taken for a model. An engine of several ranks exports together, and its first
// rank writes.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "ferry/config.h"
#include "ferry/dtype.h"
#include "ferry/error.h"

namespace ferry::train {

class Engine;

// The error that kept the weights out of their file, and whether all of them are in another one,
// which it names.
struct NotWritten {
    Error why;
    bool whole_elsewhere = false;
};

// Where a model goes, as transformers saves one.
struct ExportOptions {
    std::string directory{};      // new or empty
    std::optional<DType> type{};  // type of the weights; none: the type the run computes in
    int64_t shard_bytes = 5'000'000'000;
};
// The place of an export, claimed before the training, and a copy of what comes along from the
// model's directory. That directory may hold another model at the end, or be gone.
class ExportDirectory {
public:
    // Makes the directory where there is none. Throws usage where it is not empty, cannot be
    // written to, or is claimed by another export.
    ExportDirectory(std::string path, const Config& config);
    // A directory that was made and is still empty goes again.
    ~ExportDirectory();
    ExportDirectory(const ExportDirectory&) = delete;
    ExportDirectory& operator=(const ExportDirectory&) = delete;

    const std::string& path() const { return path_; }
    // The text of the model's config.json; empty where the configuration describes the model.
    const std::string& description() const { return description_; }
    // The tokenizer's files and their like, as they were at that time.
    struct Companion {
        std::string name{}, text{};
    };
    const std::vector<Companion>& companions() const { return companions_; }
    // Where the export goes by now.
    struct Destination {
        std::string path{};
        std::optional<Error> instead_of{};  // why it is not path() that the files may go to
    };
    // path(), or a new directory beside it: where path() leads elsewhere by now, holds files of
    // another model, or takes none. What was trained must not end with its place. Throws io where
    // no directory can be made.
    Destination place() const;

private:
    void claim();
    void remove_leftovers() const;
    void give_back();
    void check_still_claimed() const;

    std::string path_, description_{};
    std::vector<Companion> companions_{};
    bool made_ = false;
    int lock_ = -1;
};
// Hears of bytes of weights that were written, and of how many there are.
using ExportProgress = std::function<void(int64_t bytes, int64_t of)>;
// Weights, config.json and, where the model came from a directory, its tokenizer's files.
// config.json is written last: without it the directory is not taken for a model. A tokenizer's
// file that cannot be written is a warning. Of several ranks the first one has the directory, and
// writes; what keeps it from writing comes back, and the engine goes on. What the engine throws is
// thrown.
[[nodiscard]] std::optional<NotWritten> export_model(Engine& engine, const Config& config,
                                                     const ExportOptions& options,
                                                     const ExportDirectory* directory,
                                                     const ExportProgress& progress = {});
// Claims options.directory first: what it is refused for comes back as well, and on all ranks.
[[nodiscard]] std::optional<Error> export_to(Engine& engine, const Config& config,
                                             const ExportOptions& options,
                                             const ExportProgress& progress = {});
// The same of weights that `ferry train --weights-out` wrote, of the model that `config` describes.
void export_weights(const std::string& weights, const Config& config, const ExportOptions& options,
                    const ExportDirectory& directory, const ExportProgress& progress = {});

}  // namespace ferry::train
