// What a block's kernels send to the ranks that share its sequences.
#pragma once

#include <atomic>

#include "comm/comm.h"
#include "ferry/train.h"
#include "model/model.h"

namespace ferry::train {

class SequenceExchange final : public model::SequenceRanks {
public:
    explicit SequenceExchange(comm::StreamExchange& ranks) : ranks_(ranks) {}

    // Before a kernel of this step, on its thread. kAlone: nobody else runs it, as where kernels
    // are timed, and nothing is sent.
    static constexpr int64_t kAlone = -1;
    void begin(int64_t step) { step_ = step; }
    void exchange(const std::byte* to, std::byte* from, int64_t bytes, int64_t block) override;

    // What this rank has sent since it counts.
    CollectiveReport sent() const;
    void count_anew() { calls_ = bytes_ = 0; }

private:
    comm::StreamExchange& ranks_;
    int64_t step_ = kAlone;
    std::atomic<int64_t> calls_ = 0, bytes_ = 0;
};

}  // namespace ferry::train
