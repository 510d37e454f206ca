#include "feed.h"

#include <algorithm>
#include <string>

namespace ferry::capi {
namespace {

std::string place_of(int64_t step) {
    return step > 0 ? "step " + std::to_string(step) : std::string("evaluation");
}

}  // namespace

Feed::Feed(const BatchConfig& batch, int64_t evaluation_micro_batches, ferry_load_callback callback,
           void* context)
    : sequence_(batch.sequence),
      of_step_(batch.micro_batches * batch.micro_batch),
      of_evaluation_(evaluation_micro_batches * batch.micro_batch),
      load_(callback),
      context_(context) {}

int64_t Feed::sequences(bool evaluation) const { return evaluation ? of_evaluation_ : of_step_; }

void Feed::feed(const ferry_batch& batch) {
    if (load_)
        refuse_argument("the engine has a callback for its batches", "a fed batch",
                        "options.load, or options.fed and ferry_engine_feed");
    check_choice("batch->evaluation", batch.evaluation, 1);
    const bool evaluation = batch.evaluation == 1;
    const int64_t wanted = sequences(evaluation);
    if (batch.sequences != wanted || batch.sequence != sequence_)
        refuse_argument(evaluation ? "the evaluation's batch has another shape"
                                   : "the batch has another shape than a step's",
                        std::to_string(batch.sequences) + " sequences of " +
                            std::to_string(batch.sequence) + " tokens",
                        std::to_string(wanted) + " of " + std::to_string(sequence_));
    if (wanted == 0)
        refuse_argument("the configuration asks for no evaluation", "evaluate.micro_batches: 0",
                        "1 or more");
    check_given("batch->tokens", batch.tokens);
    check_given("batch->targets", batch.targets);
    const int64_t count = wanted * sequence_;
    Batch made{{batch.tokens, batch.tokens + count}, {batch.targets, batch.targets + count}};
    (evaluation ? evaluation_ : step_) = std::move(made);
}

void Feed::load(const train::FedBatch& wanted) const {
    if (load_) return ask(wanted);
    const Batch& batch = wanted.step > 0 ? step_ : evaluation_;
    if (batch.tokens.empty())
        throw Error(Trouble::usage, {.what = "no batch was fed",
                                     .where = place_of(wanted.step),
                                     .remedy = "call ferry_engine_feed, and then this again"});
    std::ranges::copy(batch.tokens, wanted.tokens.begin());
    std::ranges::copy(batch.targets, wanted.targets.begin());
}

void Feed::ask(const train::FedBatch& wanted) const {
    const int64_t sequences = this->sequences(wanted.step == 0);
    const int64_t written = load_(context_, wanted.step, sequences, sequence_, wanted.tokens.data(),
                                  wanted.targets.data());
    if (written == sequences) return;
    const bool failed = written < 0;
    throw Error(Trouble::usage,
                {.what = failed ? "the callback for batches failed"
                                : "the callback for batches wrote another number of sequences",
                 .where = place_of(wanted.step),
                 .measured = failed ? "it returned " + std::to_string(written)
                                    : std::to_string(written) + " sequences",
                 .limit = std::to_string(sequences) + " sequences of " + std::to_string(sequence_) +
                          " tokens",
                 .remedy = "the engine is as it was: the next call asks for this batch again"});
}

}  // namespace ferry::capi
