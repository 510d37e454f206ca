// A checkpoint that is there: its arrays, and whether its bytes are those that were written.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "checkpoint/manifest.h"
#include "checkpoint/tensors_ahead.h"
#include "ferry/error.h"

namespace ferry::checkpoint {

class Saved {
public:
    // Reads the manifest, the headers of the shards and what is no shard. Throws usage where there
    // is none or it is of a newer version, and io where it is damaged, a shard is missing or is
    // another one than the manifest says. Throws usage too where its directory has the name of
    // another step.
    explicit Saved(std::string path);

    struct Array {
        const StoredTensor* stored = nullptr;
        const Weights* shard = nullptr;
        int64_t bytes = 0;
        uint64_t checksum = 0;                // as it was written
        std::span<const uint64_t> stripes{};  // none: the manifest is of version 1

        TensorSource source() const { return {shard, stored, bytes, stripes}; }
    };
    const std::string& path() const { return path_; }
    const Manifest& manifest() const { return manifest_; }
    // Whether TensorsAhead proves the arrays as it reads them; else check_shard() is to do it.
    bool in_stripes() const { return manifest_.version > kOldestManifestVersion; }
    const std::map<std::string, Array, std::less<>>& arrays() const { return arrays_; }
    const Array* find(std::string_view name) const;  // null: none of that name
    // Bytes [first, first + out.size()) of an array, as they lie in the file. Any thread.
    void read(const Array& array, int64_t first, std::span<std::byte> out) const;

private:
    void open(const Shard& shard);

    std::string path_;
    Manifest manifest_;
    std::vector<std::unique_ptr<Weights>> shards_{};
    std::map<std::string, Array, std::less<>> arrays_{};
};

// The files that a model is read from, as the manifest of their checkpoint has them.
struct ModelFiles {
    std::string checkpoint{};
    std::vector<Shard> files{};  // none: they are of no checkpoint
};
// `weights` names a model's directory or one file of it. Throws what manifest_of() throws.
ModelFiles files_of_model(const std::string& weights);

// Where `weights` are a checkpoint's: throws io unless the model's files are there, with their
// sizes, and config.json and what comes before the weights have their bytes. Reads no weights.
void require_model_files(const std::string& weights);
// The error with a remedy for who changed one of the model's files on purpose.
Error of_model(const Error& damage);
// The error with another remedy.
Error with_remedy(const Error& damage, std::string remedy);

// Reads a shard once, whole. Throws io, naming the file and the first tensor that is wrong. `read`
// hears of bytes that were read; any thread.
void check_shard(const std::string& checkpoint, const Shard& shard,
                 const std::function<void(int64_t bytes)>& read);

// The newest checkpoint beside this one, older than it, whose every byte is right: reads them.
std::optional<std::string> whole_before(const std::string& checkpoint);

}  // namespace ferry::checkpoint
