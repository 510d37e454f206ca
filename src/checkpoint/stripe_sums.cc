#include "stripe_sums.h"

#include <algorithm>
#include <utility>

namespace ferry::checkpoint {

void StripeSums::add(std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
        const auto part =
            bytes.first(static_cast<size_t>(std::min(kStripeBytes - held_, std::ssize(bytes))));
        if (!stripe_) stripe_.emplace();
        stripe_->add(part);
        held_ += std::ssize(part);
        bytes = bytes.subspan(part.size());
        if (held_ == kStripeBytes) end_stripe();
    }
}

void StripeSums::end_stripe() {
    sums_.push_back(stripe_->value());
    stripe_.reset();
    held_ = 0;
}

std::vector<uint64_t> StripeSums::finish() {
    if (held_ > 0) end_stripe();
    return std::exchange(sums_, {});
}

uint64_t sum_of(std::span<const uint64_t> stripes) { return checksum(std::as_bytes(stripes)); }

}  // namespace ferry::checkpoint
