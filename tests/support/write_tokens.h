// A file of tokens that fit into memory.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "data/tokens.h"

namespace ferry {

// `mask` is empty or as long as the tokens.
inline void write_tokens(const std::string& path, std::span<const uint32_t> tokens,
                         uint64_t vocabulary, std::span<const uint8_t> mask,
                         std::span<const uint64_t> documents = {}) {
    TokenWriter file(path, vocabulary);
    file.add_tokens(tokens);
    file.add_marks(mask);
    file.add_documents(documents);
    file.finish();
}

}  // namespace ferry
