#include "loss_scale.h"

#include <string>

#include "ferry/error.h"

namespace ferry::train {

void LossScale::good_step() noexcept {
    skipped_ = 0;
    if (!scales_ || ++good_ < kGoodSteps) return;
    good_ = 0;
    value_ *= 2;
}

void LossScale::overflow(int64_t step) {
    FERRY_CHECK(scales_);
    good_ = 0;
    ++skipped_;
    value_ /= 2;
    if (value_ >= 1 && skipped_ < kSkipsMost) return;
    throw Error(Trouble::diverged,
                {.what = "fp16 gradients overflow at every loss scale",
                 .where = "step " + std::to_string(step),
                 .measured = std::to_string(skipped_) + " steps skipped in a row, loss scale " +
                             std::to_string(value_),
                 .limit = "a loss scale of 1, or " + std::to_string(kSkipsMost) + " steps",
                 .remedy = "lower optimizer.lr, set precision to bf16 where the GPU has it, or to "
                           "fp32"});
}

}  // namespace ferry::train
