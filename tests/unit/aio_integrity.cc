// Checksums: every width of the hash gives the library's own value, and every wrong byte is found.
#include <gtest/gtest.h>
#include <xxhash.h>

#include <random>

#include "ferry/aio.h"
#include "xxh3.h"

namespace ferry::aio {
namespace {

std::vector<std::byte> random_bytes(size_t count) {
    std::mt19937_64 numbers(count);
    std::vector<std::byte> bytes(count);
    for (std::byte& one : bytes) one = static_cast<std::byte>(numbers());
    return bytes;
}

TEST(Xxh3, EveryWidthIsTheLibrarys) {
    const std::vector<std::byte> bytes = random_bytes(kPieceBytes + 64);
    for (const size_t size : {size_t{0}, size_t{1}, size_t{240}, size_t{241}, size_t{1024},
                              size_t{4096}, size_t{65537}, static_cast<size_t>(kPieceBytes)}) {
        for (const size_t at : {size_t{0}, size_t{7}}) {
            for (const uint64_t seed : {uint64_t{0}, uint64_t{77}, ~uint64_t{0}}) {
                const uint64_t expected = XXH3_64bits_withSeed(bytes.data() + at, size, seed);
                EXPECT_EQ(xxh3_baseline(bytes.data() + at, size, seed), expected) << size;
                if (!has_avx2()) continue;
                EXPECT_EQ(xxh3_avx2(bytes.data() + at, size, seed), expected) << size;
            }
        }
    }
}

TEST(Xxh3, TheWidestThereIsIsTaken) {
    EXPECT_EQ(best_xxh3(), has_avx2() ? &xxh3_avx2 : &xxh3_baseline);
#ifdef __x86_64__
    EXPECT_EQ(has_avx2(), __builtin_cpu_supports("avx2") != 0) << "not compiled in";
#endif
}

TEST(Integrity, ThePieceWithAWrongBitIsNamed) {
    std::vector<std::byte> bytes = random_bytes(static_cast<size_t>(2 * kPieceBytes + 4096));
    std::vector<uint64_t> sums(3);
    ASSERT_EQ(pieces_of(std::ssize(bytes)), 3);
    seal(bytes, 5, sums);
    EXPECT_EQ(verify(bytes, 5, sums), -1);
    EXPECT_EQ(verify(bytes, 6, sums), 0) << "an older version's bytes";
    for (const size_t at : {size_t{0}, static_cast<size_t>(kPieceBytes) - 1,
                            static_cast<size_t>(kPieceBytes), bytes.size() - 1}) {
        bytes[at] ^= std::byte{1};
        EXPECT_EQ(verify(bytes, 5, sums), static_cast<int64_t>(at) / kPieceBytes) << at;
        bytes[at] ^= std::byte{1};
    }
}

}  // namespace
}  // namespace ferry::aio
