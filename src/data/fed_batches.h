// Batches that a program feeds, in place of a token file's.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "data/tokens.h"

namespace ferry {

// One thread loads while nobody fills; then any thread fills.
class FedBatches final : public Batches {
public:
    // The whole step's tokens and targets, [sequences, sequence] each, for the program to write;
    // target -1 is not real.
    using Load =
        std::function<void(int64_t step, std::span<int32_t> tokens, std::span<int32_t> targets)>;
    struct Options : BatchShape {
        Load load{};
    };
    explicit FedBatches(Options options);
    const TokenFileInfo& info() const override { return info_; }
    // Throws usage where a token or target is outside the vocabulary, and what the program throws.
    void load(int64_t step) override;
    uint64_t loaded_sum() const override;
    int64_t count_targets(int64_t step) const override;
    void fill(int64_t step, int64_t micro_batch_index, MicroBatch out) const override;
    void fill_evaluation(int64_t micro_batch_index, MicroBatch out) const override;

private:
    struct Batch {
        std::vector<int32_t> tokens{}, targets{};
        int64_t real = 0;  // targets
    };
    void check(const Batch& batch, int64_t step) const;
    void copy_rows(const Batch& batch, int64_t first, const MicroBatch& out) const;
    int64_t sequences_of(int64_t step) const;

    const Options options_;
    const TokenFileInfo info_;
    Batch next_{};  // in the program's hands, until it is whole
    Batch step_batch_{}, evaluation_{};
    int64_t step_ = 0, loaded_ = -1;  // whose batch there is; the last that was loaded
};

}  // namespace ferry
