// The header of a token file (data/tokens.h).
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

namespace ferry {

static_assert(std::endian::native == std::endian::little, "token files are read as they lie");

constexpr char kTokenMagic[8] = {'F', 'E', 'R', 'R', 'Y', 'T', 'O', 'K'};
constexpr uint32_t kTokenVersion = 1, kTokenVersionOfDocuments = 2;
constexpr uint64_t kTokenMaskFollows = 1, kDocumentsFollow = 2;

struct TokenHeader {
    char magic[8]{};
    uint32_t version = kTokenVersion, token_bytes = 0;
    uint64_t vocabulary = 0, count = 0, flags = 0, checksum = 0;
    uint64_t documents = 0;  // version 2
    std::byte padding[8]{};
};
static_assert(sizeof(TokenHeader) == 64);

}  // namespace ferry
