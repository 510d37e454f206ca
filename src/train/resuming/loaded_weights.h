// The weights of a Hugging Face directory, as a model's layers want them.
#pragma once

#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "checkpoint/saved.h"
#include "checkpoint/tensors_ahead.h"
#include "ferry/config.h"
#include "ferry/team.h"
#include "model/model.h"
#include "planner/planner.h"
#include "train/stack/start_up.h"
#include "train/state/state_io.h"

namespace ferry::train {

class LoadedWeights {
public:
    // The weights of the configuration's directory; null where it names none or loads nothing.
    static std::unique_ptr<LoadedWeights> of(const ModelConfig& config, const model::Shape& shape,
                                             const std::vector<model::Layer>& layers);
    // Opens the files and compares them with the layers. Throws usage for a tensor that is missing,
    // unknown, of another shape than the configuration says or of a type that ferry does not read.
    // So does a head of its own beside tied embeddings.
    LoadedWeights(const std::string& path, const model::Shape& shape,
                  const std::vector<model::Layer>& layers);
    // Reads ahead what fill() will be asked for, part after part of these layers: next() comes
    // before each part. Throws io where a byte is not the one that a checkpoint's manifest names.
    void begin(const planner::Plan& plan, std::span<const StateIo::ChunkRun> parts, Team& team,
               int64_t memory);
    void next();
    checkpoint::TensorSource source_of(const model::Tensor& tensor) const;
    // fp32 values of elements [first, first + out.size()) of a layer's flat buffer, padding zero.
    // Any thread.
    void fill(const model::Layer& layer, int64_t first, std::span<float> out) const;
    // Equal weights have equal digests; other weights almost certainly have another. It is of all
    // names and types, and of each tensor's first and last values and some in between.
    uint64_t digest() const;
    void log_rate(double seconds) const;  // logs the rate at which all were filled
    // Where the directory is a checkpoint that can only be proved whole, compares what its manifest
    // says of the model's files: reads part `part` of `parts`. Throws io, naming file and tensor.
    void prove(Team& team, int part, int parts, StartUp& start_up) const;

private:
    void check(const model::Tensor& tensor, const checkpoint::StoredTensor& stored) const;
    void check_unknown(const model::Shape& shape) const;
    void check_copy(const model::Tensor& table) const;

    checkpoint::TensorSource source_of(const checkpoint::StoredTensor& stored) const;

    std::string path_;
    checkpoint::Weights weights_;
    checkpoint::ModelFiles proof_{};  // where they are a checkpoint's
    std::map<std::string_view, std::span<const uint64_t>> stripes_{};  // of its arrays, by name
    std::unique_ptr<checkpoint::TensorsAhead> ahead_{};
    int64_t bytes_ = 0;  // what the model's tensors take in the files
    std::map<std::string, const checkpoint::StoredTensor*, std::less<>>
        stored_{};  // by ferry's name
};

// A run's weights before its first step, as text to compare. `loaded` may be null: random.
std::string first_weights(const LoadedWeights* loaded, const model::Shape& shape);

}  // namespace ferry::train
