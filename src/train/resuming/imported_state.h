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
#include "train/stack/start_up.h"
#include "train/state/state_io.h"

namespace ferry::train {

// A Hugging Face directory. Files beside the weights may hold, in fp32, bf16 or fp16, NAME.master,
// NAME.exp_avg and NAME.exp_avg_sq of its tensors, as a checkpoint of ferry's does
// (docs/checkpoints.md). Moments may be ferry's codes, with NAME.exp_avg_scales and
// NAME.exp_avg_sq_scales.
class ImportedState {
public:
    // Throws usage where there are no weights of this model, or state of another shape or of
    // tensors that it does not have, and io where a file is damaged.
    ImportedState(const std::string& path, const model::Shape& shape,
                  const std::vector<model::Layer>& layers);
    // Throws usage where masters, or a moment that the run keeps, are there of some tensors that
    // train and not of others, or are of a type that is not read.
    void require(const planner::Plan& plan) const;
    bool has_moments() const { return has_moments_; }
    // Where the directory is a checkpoint, compares all its checksums. Throws io.
    void prove(Team& team, StartUp& start_up) const;
    // Values are rounded once to the type that the run keeps; codes stay codes, bit for bit. What
    // is not there begins as in a new run: the master is the weight, and the moments are those
    // before the first step.
    StateIo::Contents contents(StateIo::FirstMoment first) const;

private:
    struct Array {
        const checkpoint::Weights* file = nullptr;
        const checkpoint::StoredTensor* stored = nullptr;
    };
    using Arrays = std::map<std::string, Array, std::less<>>;
    void bind(Arrays found, std::string_view prefix, const std::vector<model::Layer>& layers);
    [[noreturn]] void refuse(std::string what, const std::string& name, std::string measured,
                             std::string limit, std::string remedy) const;
    const Array* find(const model::Tensor& tensor, std::string_view suffix) const;
    void require_array(const model::Tensor& tensor, std::string_view suffix, bool wanted) const;
    void require_codes(const model::Tensor& tensor, std::string_view suffix) const;
    // Whether the array is one of codes or scales, and the file has it so.
    bool has_as_kept(const model::Tensor& tensor, const StateArray& array) const;
    // Elements of a tensor's moment from `first` on; what the file lacks stays as it is.
    void read_values(const model::Tensor& tensor, std::string_view suffix, optim::Map map,
                     int64_t first, std::span<float> out) const;
    void read_moments(const model::Layer& layer, const StateArray& array, int64_t first,
                      std::span<std::byte> out, const StateIo::FirstMoment& of_first) const;

    std::string path_;
    LoadedWeights weights_;
    std::vector<std::unique_ptr<checkpoint::Weights>> files_{};
    Arrays arrays_{};  // by ferry's name
    bool has_masters_ = false, has_moments_ = false;
};

}  // namespace ferry::train
