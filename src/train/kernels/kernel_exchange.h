// The exchanges that layers' kernels make from within, with the ranks that share the sequences or
// the tensors.
#pragma once

#include <atomic>
#include <string>
#include <vector>

#include "comm/comm.h"
#include "ferry/train.h"
#include "model/model.h"

namespace ferry::train {

class KernelExchange final : public model::KernelRanks {
public:
    // `of`: what is sent, for errors and reports; a literal.
    KernelExchange(comm::StreamExchange& ranks, const char* of) : ranks_(ranks), of_(of) {}

    // Before a kernel of this step, on its thread. kAlone: nobody else runs it, as where kernels
    // are timed, and nothing is sent.
    static constexpr int64_t kAlone = -1;
    void begin(int64_t step) { step_ = step; }
    void exchange(const std::byte* to, std::byte* from, int64_t bytes, int64_t block) override;
    void gather(const std::byte* mine, std::byte* all, int64_t bytes, int64_t block) override;
    void shift(const model::Shift& parts, int64_t block) override;

    // What this rank has sent since count_anew(), by kind of call. Kinds that it has not called are
    // left out.
    std::vector<CollectiveReport> sent() const;
    void count_anew();

private:
    struct Sent {
        std::atomic<int64_t> calls = 0, bytes = 0;
    };
    void count(Sent& sent, int64_t bytes);
    // Layers are numbered from the embedding on.
    comm::Topic topic(int64_t block) const { return {of_, block + 1, step_}; }

    comm::StreamExchange& ranks_;
    const char* const of_;
    int64_t step_ = kAlone;
    Sent exchanged_{}, gathered_{}, shifted_{};
};

// Of the ranks that share sequences and of those that share tensors; null where there are none.
struct KernelExchanges {
    KernelExchange *sequence = nullptr, *slices = nullptr;

    void begin(int64_t step) const {
        for (KernelExchange* one : {sequence, slices})
            if (one) one->begin(step);
    }
    model::Neighbours ranks() const { return {sequence, slices}; }
    bool any() const { return sequence || slices; }
};

}  // namespace ferry::train
