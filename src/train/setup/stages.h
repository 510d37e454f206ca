// The layers of each stage of a pipeline.
#pragma once

#include <string>
#include <vector>

#include "ferry/config.h"
#include "model/model.h"
#include "planner/planner.h"
#include "zero/zero.h"

namespace ferry::train {

// Cuts the model into stages of whole blocks. The first also has the embedding, and the last the
// head. The slowest stage is as fast as it can be, by what a micro-batch's kernels multiply and
// move. The time model's assumed machine decides, so the cut is the same on every machine. `whole`:
// the model's layers. Throws usage where there are more stages than blocks. Where ferry is to
// choose the schedule or the number of virtual stages, the stages are those of 1f1b with one
// virtual stage. Whoever chooses asks again with the keys set
// (src/train/prediction/schedule_choice.h).
std::vector<zero::Stage> stages_of(const Config& config, const model::Shape& shape,
                                   const std::vector<model::Layer>& whole);
// Warns where the weights of a stage are gathered again for each of its groups, with the bytes.
void warn_of_gathers(const planner::Plan& plan);
// The stage that computes with a layer.
int stage_with(const std::vector<zero::Stage>& stages, int64_t layer);
// The share of a step that a stage waits, where all stages take equally long. Each stage has so
// many blocks. A micro-batch of a group passes on as soon as the last block is done with it. Where
// backward is split, gradients of weights fill a part of the waiting. They are taken as a fourth of
// a visit, like forward, forward again and the gradients of inputs. All virtual stages take equally
// long. The next one waits until the first group has come back to the first stage.
double bubble_of(int64_t groups, int stages, int64_t group_size, int64_t blocks,
                 bool splits_backward = false, int64_t virtual_stages = 1);

// "embedding and blocks 0 to 3; blocks 4 to 6 and head"
std::string text_of(const std::vector<zero::Stage>& stages, int64_t layers);
// "blocks 0 to 1, 4 to 5"
std::string blocks_text(const zero::Stage& stage, int64_t layers);

}  // namespace ferry::train
