// A record says what the slots of a volume hold. It is kept in two copies, each over the older one
// of the two, so that one of them is whole whenever the machine stops.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

namespace ferry::aio {

constexpr int64_t kRecordOffset = 64;  // the record begins behind what proves it

struct RecordCopy {
    uint64_t sequence = 0;  // the larger is the newer
    int64_t bytes = 0;      // of the record
};

// Completes a copy whose first `made.bytes` from kRecordOffset on are the record. `key` is its
// volume's: a copy of another volume, or of another layout of this one, proves nothing.
void seal_record(std::span<std::byte> copy, uint64_t key, const RecordCopy& made) noexcept;
// None unless every byte is as it was sealed.
std::optional<RecordCopy> check_record(std::span<const std::byte> copy, uint64_t key) noexcept;

}  // namespace ferry::aio
