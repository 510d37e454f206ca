#include "data/fed_batches.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/checksum.h"
#include "ferry/error.h"

namespace ferry {

FedBatches::FedBatches(Options options)
    : options_(std::move(options)),
      info_{.vocabulary = static_cast<uint64_t>(options_.vocab), .token_bytes = 4} {
    FERRY_CHECK(options_.sequence > 0 && options_.micro_batch > 0 && options_.micro_batches > 0);
    FERRY_CHECK(options_.vocab > 0 && options_.sequence % options_.parts == 0);
}

int64_t FedBatches::sequences_of(int64_t step) const {
    const Options& o = options_;
    return o.micro_batch * (step > 0 ? o.micro_batches * o.ranks : o.evaluation_micro_batches);
}

void FedBatches::load(int64_t step) {
    const auto count = static_cast<size_t>(sequences_of(step) * options_.sequence);
    if (count == 0) return;
    // What the program leaves as it is, is no token and no target.
    next_.tokens.assign(count, -1);
    next_.targets.assign(count, -1);
    options_.load(step, next_.tokens, next_.targets);
    check(next_, step);
    next_.real = std::ranges::count_if(next_.targets, [](int32_t target) { return target >= 0; });
    std::swap(step > 0 ? step_batch_ : evaluation_, next_);
    if (step > 0) step_ = step;
    loaded_ = step;
}

void FedBatches::check(const Batch& batch, int64_t step) const {
    const auto refuse = [&](const char* what, size_t at, int32_t value, const char* least) {
        const auto index = static_cast<int64_t>(at);
        throw Error(
            Trouble::usage,
            {.what = std::string("a fed ") + what + " is outside the vocabulary",
             .where = (step > 0 ? "step " + std::to_string(step) : "evaluation") + ", sequence " +
                      std::to_string(index / options_.sequence) + ", position " +
                      std::to_string(index % options_.sequence),
             .measured = std::to_string(value),
             .limit = std::string(least) + ", below model.vocab, " + std::to_string(options_.vocab),
             .remedy = "feed a whole batch of the model's own token ids"});
    };
    const auto vocab = static_cast<int32_t>(options_.vocab);
    for (size_t i = 0; i < batch.tokens.size(); ++i) {
        const int32_t token = batch.tokens[i], target = batch.targets[i];
        if (token < 0 || token >= vocab) refuse("token", i, token, "from 0 on");
        if (target < -1 || target >= vocab)
            refuse("target", i, target, "-1 (not a target) or from 0 on");
    }
}

uint64_t FedBatches::loaded_sum() const {
    if (loaded_ < 0) return 0;
    const Batch& last = loaded_ > 0 ? step_batch_ : evaluation_;
    return checksum(std::as_bytes(std::span(last.tokens))) ^
           (checksum(std::as_bytes(std::span(last.targets))) * 3);
}

int64_t FedBatches::count_targets(int64_t step) const {
    FERRY_CHECK(step == step_, "the step's batch was loaded");
    return step_batch_.real;
}

// Sequences from `first` on, of the loaded batch; behind its end they repeat without targets.
void FedBatches::copy_rows(const Batch& batch, int64_t first, const MicroBatch& out) const {
    FERRY_CHECK(out.document_start.empty(), "fed batches know no documents");
    const auto whole = static_cast<size_t>(options_.sequence);
    const size_t length = whole / static_cast<size_t>(options_.parts);
    const size_t rows = batch.tokens.size() / whole;
    FERRY_CHECK(rows > 0 &&
                out.tokens.size() == static_cast<size_t>(options_.micro_batch) * length);
    for (size_t row = 0; row < static_cast<size_t>(options_.micro_batch); ++row) {
        const size_t number = static_cast<size_t>(first) + row;
        const size_t from = number % rows * whole + static_cast<size_t>(options_.part) * length;
        const std::span<int32_t> targets = out.targets.subspan(row * length, length);
        std::copy_n(batch.tokens.data() + from, length, out.tokens.data() + row * length);
        std::copy_n(batch.targets.data() + from, length, targets.data());
        if (number >= rows) std::ranges::fill(targets, -1);
    }
}

void FedBatches::fill(int64_t step, int64_t micro_batch_index, MicroBatch out) const {
    const Options& o = options_;
    FERRY_CHECK(step == step_ && micro_batch_index >= 0 && micro_batch_index < o.micro_batches);
    copy_rows(step_batch_, (o.rank * o.micro_batches + micro_batch_index) * o.micro_batch, out);
}

void FedBatches::fill_evaluation(int64_t micro_batch_index, MicroBatch out) const {
    copy_rows(evaluation_, micro_batch_index * options_.micro_batch, out);
}

}  // namespace ferry
