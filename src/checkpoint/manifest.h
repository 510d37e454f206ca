// A checkpoint's manifest beside its arrays: DIR/step-00000100/manifest.json (docs/checkpoints.md).
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace ferry::checkpoint {

inline constexpr int64_t kManifestVersion = 2, kOldestManifestVersion = 1;
inline constexpr const char* kManifestName = "manifest.json";

struct ArraySum {
    std::string name{};
    int64_t bytes = 0;
    uint64_t checksum = 0;
    // XXH3 of its stripes (stripe_sums.h), of which `checksum` is one. None in version 1, where
    // that is of all its bytes.
    std::vector<uint64_t> stripes{};
};

// A file of a checkpoint. The arrays of a safetensors file stand in their order; they end it.
struct Shard {
    std::string file{};
    int64_t bytes = 0;
    // XXH3 of what comes before the arrays; where there are none, and in version 1, of the whole
    // file.
    uint64_t checksum = 0;
    std::vector<ArraySum> arrays{};
    // An array of no bytes has no stripes, in any version.
    bool in_stripes() const {
        return std::ranges::any_of(arrays,
                                   [](const ArraySum& one) { return !one.stripes.empty(); });
    }
};

// The figures that the run printed for the step.
struct LastStep {
    double loss = 0, gradient_norm = 0, clip_factor = 1, lr = 0, loss_scale = 1, seconds = 0;
    int64_t targets = 0, tokens = 0;
    bool skipped = false, speculative = false, committed = false;
};

struct HeldBackLoss {
    int64_t step = 0;
    double loss = 0;
};

struct Manifest {
    int64_t version = kManifestVersion;
    int64_t step = 0, steps = 0;              // steps: that the run was to take
    int64_t updates = 0, moment_updates = 0;  // of the weights, and that moments took in
    int64_t tokens = 0, sequences = 0;        // seen by now: the place in the data's order
    double loss_scale = 1;
    int64_t scale_good = 0, scale_skipped = 0;  // steps in a row
    int64_t skipped_in_a_row = 0, unclipped_in_a_row = 0;
    std::optional<HeldBackLoss> held_back{};  // the last before it
    LastStep last{};
    std::string ferry{};     // the version that wrote it
    std::string model{};     // the directory that the run started from; may be empty
    std::string training{};  // all that decides the run's numbers, a line each
    std::string numerics{};  // what orders and rounds the run's operations
    uint64_t numerics_hash = 0;
    int ranks = 1;
    std::vector<Shard> shards{};

    bool finished() const { return step == steps; }
    int64_t bytes() const;  // all shards'
};

std::string write_manifest(const Manifest& manifest);
// Throws io, naming `where`, for a text that is damaged, and usage for one of a newer version.
Manifest read_manifest(std::string_view text, const std::string& where);

}  // namespace ferry::checkpoint
