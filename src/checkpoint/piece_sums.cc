#include "piece_sums.h"

#include <algorithm>
#include <utility>

namespace ferry::checkpoint {

void PieceSums::add(std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
        const auto part =
            bytes.first(static_cast<size_t>(std::min(kSummedBytes - held_, std::ssize(bytes))));
        if (!piece_) piece_.emplace();
        piece_->add(part);
        held_ += std::ssize(part);
        bytes = bytes.subspan(part.size());
        if (held_ == kSummedBytes) end_piece();
    }
}

void PieceSums::end_piece() {
    sums_.push_back(piece_->value());
    piece_.reset();
    held_ = 0;
}

std::vector<uint64_t> PieceSums::finish() {
    if (held_ > 0) end_piece();
    return std::exchange(sums_, {});
}

uint64_t sum_of(std::span<const uint64_t> pieces) { return checksum(std::as_bytes(pieces)); }

}  // namespace ferry::checkpoint
