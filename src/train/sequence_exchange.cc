#include "sequence_exchange.h"

namespace ferry::train {

void SequenceExchange::exchange(const std::byte* to, std::byte* from, int64_t bytes,
                                int64_t block) {
    if (step_ == kAlone) return;
    ++calls_;
    bytes_ += (ranks_.size() - 1) * bytes;
    // Layers are numbered from the embedding on.
    ranks_.exchange({to, from, bytes}, {.of = "heads", .layer = block + 1, .step = step_});
}

CollectiveReport SequenceExchange::sent() const {
    return {
        .collective = "exchange heads", .calls = calls_, .raw_bytes = bytes_, .sent_bytes = bytes_};
}

}  // namespace ferry::train
