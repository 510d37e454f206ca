// The layers of each stage of a pipeline.
#pragma once

#include <string>
#include <vector>

#include "ferry/config.h"
#include "model/model.h"
#include "planner/planner.h"
#include "zero/zero.h"

namespace ferry::train {

// Every stage has whole blocks, the first the embedding too and the last the head. They are cut so
// that the slowest one is as fast as it can be, by what a micro-batch's kernels multiply and move
// on a machine as the time model assumes it: the same cut on every machine. `whole`: the model's
// layers. Throws usage where there are more stages than blocks. Where the schedule or the
// number of virtual stages is ferry's choice they are those of 1f1b, with one: who chooses asks
// with the keys set
// (src/train/prediction/schedule_choice.h).
std::vector<zero::Stage> stages_of(const Config& config, const model::Shape& shape,
                                   const std::vector<model::Layer>& whole);
// Warns where the weights of a stage are gathered again for each of its groups, with the bytes.
void warn_of_gathers(const planner::Plan& plan);
// The stage that computes with a layer.
int stage_with(const std::vector<zero::Stage>& stages, int64_t layer);
// The part of a step that a stage waits, where all take as long. Each stage has so many blocks. A
// micro-batch of a group passes on as soon as the last block is done with it.
// Where backward is split, weights' gradients fill a part of it: a fourth of a visit, as much as
// forward, as forward again and as the gradients of inputs. Virtual stages are as long as each
// other; the next one waits where the first group has not come back to the first stage yet.
double bubble_of(int64_t groups, int stages, int64_t group_size, int64_t blocks,
                 bool splits_backward = false, int64_t virtual_stages = 1);

// "embedding and blocks 0 to 3; blocks 4 to 6 and head"
std::string text_of(const std::vector<zero::Stage>& stages, int64_t layers);
// "blocks 0 to 1, 4 to 5"
std::string blocks_text(const zero::Stage& stage, int64_t layers);

}  // namespace ferry::train
