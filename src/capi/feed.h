// Batches of an engine that a program feeds, or that its callback writes.
#pragma once

#include <cstdint>
#include <vector>

#include "ferry/config.h"
#include "ferry/train.h"
#include "structs.h"

namespace ferry::capi {

class Feed {
public:
    Feed(const BatchConfig& batch, int64_t evaluation_micro_batches, ferry_load_callback callback,
         void* context);
    // What a step takes, or an evaluation.
    int64_t sequences(bool evaluation) const;
    int64_t sequence() const { return sequence_; }
    // Throws usage for another shape, or where there is a callback.
    void feed(const ferry_batch& batch);
    // The engine's train::LoadBatch. A step's batch is the feed's until taken() is called.
    void load(const train::FedBatch& wanted) const;
    void taken() { step_ = {}; }

private:
    struct Batch {
        std::vector<int32_t> tokens{}, targets{};
    };
    void ask(const train::FedBatch& wanted) const;

    const int64_t sequence_, of_step_, of_evaluation_;
    const ferry_load_callback load_;
    void* const context_;
    Batch step_{}, evaluation_{};
};

}  // namespace ferry::capi
