// State that another program left, or a run with other settings: where an imported run goes on.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "ferry/team.h"
#include "loaded_weights.h"
#include "model/model.h"
#include "planner/planner.h"
#include "state_io.h"
#include "train/stack/start_up.h"

namespace ferry::train {

// A Hugging Face directory. Files beside the weights may hold, in fp32, bf16 or fp16, NAME.master,
// NAME.exp_avg and NAME.exp_avg_sq of its tensors, as a checkpoint of ferry's does
// (docs/checkpoints.md).
class ImportedState {
public:
    // Throws usage where there are no weights of this model, and io where a file is damaged.
    ImportedState(const std::string& path, const model::Shape& shape,
                  const std::vector<model::Layer>& layers);
    // Throws usage where a moment that the run keeps is there of some tensors and not of others, or
    // has another shape or a type that is not read.
    void require(const planner::Plan& plan) const;
    // Where the directory is a checkpoint, compares all its checksums. Throws io.
    void prove(Team& team, StartUp& start_up) const;
    bool has_moments() const { return has_moments_; }
    // Values are rounded once to the type that the run keeps. What is not there begins as in a new
    // run: the master is the weight, and the moments are those before the first step.
    StateIo::Contents contents(StateIo::FirstMoment first) const;

private:
    struct Array {
        const checkpoint::Weights* file = nullptr;
        const checkpoint::StoredTensor* stored = nullptr;
    };
    const Array* find(const model::Tensor& tensor, std::string_view suffix) const;
    void read_moments(const model::Layer& layer, const StateArray& array, int64_t first,
                      std::span<std::byte> out, const StateIo::FirstMoment& of_first) const;

    std::string path_;
    LoadedWeights weights_;
    std::vector<std::unique_ptr<checkpoint::Weights>> files_{};
    std::map<std::string, Array, std::less<>> arrays_{};
    bool has_moments_ = false;
};

}  // namespace ferry::train
