// Checksums of pieces. The version seeds the hash. So old contents of the same slot (a lost write)
// do not match, even when they are what an earlier version rightly held.
#include <algorithm>

#include "ferry/aio.h"
#include "xxh3.h"

namespace ferry::aio {
namespace {

uint64_t sum_of_piece(std::span<const std::byte> bytes, int64_t piece, uint64_t version) {
    const auto begin = static_cast<size_t>(piece * kPieceBytes);
    const size_t size = std::min(bytes.size() - begin, static_cast<size_t>(kPieceBytes));
    static const Xxh3 kHash = best_xxh3();
    return kHash(bytes.data() + begin, size, version);
}

}  // namespace

void seal(std::span<const std::byte> bytes, uint64_t version, std::span<uint64_t> sums) noexcept {
    const int64_t pieces = pieces_of(static_cast<int64_t>(bytes.size()));
    FERRY_CHECK(static_cast<int64_t>(sums.size()) == pieces);
    for (int64_t piece = 0; piece < pieces; ++piece)
        sums[static_cast<size_t>(piece)] = sum_of_piece(bytes, piece, version);
}

int64_t verify(std::span<const std::byte> bytes, uint64_t version,
               std::span<const uint64_t> sums) noexcept {
    const int64_t pieces = pieces_of(static_cast<int64_t>(bytes.size()));
    FERRY_CHECK(static_cast<int64_t>(sums.size()) == pieces);
    for (int64_t piece = 0; piece < pieces; ++piece)
        if (sums[static_cast<size_t>(piece)] != sum_of_piece(bytes, piece, version)) return piece;
    return -1;
}

}  // namespace ferry::aio
