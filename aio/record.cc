#include "record.h"

#include <cstring>

#include "base/checksum.h"

namespace ferry::aio {
namespace {

constexpr char kMagic[8] = {'f', 'e', 'r', 'r', 'y', 'r', 'e', 'c'};

struct Proof {
    char magic[8];
    uint64_t key;
    uint64_t sequence;
    int64_t bytes;
    uint64_t record_sum;  // checksum of the record
    uint64_t proof_sum;   // checksum of the fields above
};
static_assert(sizeof(Proof) <= kRecordOffset);

uint64_t sum_of(const Proof& proof) noexcept {
    return checksum(std::as_bytes(std::span(&proof, 1)).first(offsetof(Proof, proof_sum)));
}

}  // namespace

void seal_record(std::span<std::byte> copy, uint64_t key, const RecordCopy& made) noexcept {
    const auto record = copy.subspan(kRecordOffset, static_cast<size_t>(made.bytes));
    Proof proof{.magic = {},
                .key = key,
                .sequence = made.sequence,
                .bytes = made.bytes,
                .record_sum = checksum(record),
                .proof_sum = 0};
    memcpy(proof.magic, kMagic, sizeof kMagic);
    proof.proof_sum = sum_of(proof);
    memset(copy.data(), 0, kRecordOffset);
    memcpy(copy.data(), &proof, sizeof proof);
}

std::optional<RecordCopy> check_record(std::span<const std::byte> copy, uint64_t key) noexcept {
    Proof proof{};
    if (copy.size() < static_cast<size_t>(kRecordOffset)) return std::nullopt;
    memcpy(&proof, copy.data(), sizeof proof);
    const auto room = static_cast<int64_t>(copy.size()) - kRecordOffset;
    if (memcmp(proof.magic, kMagic, sizeof kMagic) != 0 || proof.proof_sum != sum_of(proof) ||
        proof.key != key || proof.bytes < 0 || proof.bytes > room)
        return std::nullopt;
    const auto record = copy.subspan(kRecordOffset, static_cast<size_t>(proof.bytes));
    if (proof.record_sum != checksum(record)) return std::nullopt;
    return RecordCopy{proof.sequence, proof.bytes};
}

}  // namespace ferry::aio
