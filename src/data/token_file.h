// A token file, mapped and checked.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "data/tokens.h"

namespace ferry {

// Read-only; every method may be called from any thread.
class TokenFile {
public:
    // Checks the whole file, see tokens.h. `model_vocab` 0: the file's own vocabulary.
    TokenFile(const std::string& path, int64_t model_vocab);
    ~TokenFile();
    TokenFile(const TokenFile&) = delete;
    TokenFile& operator=(const TokenFile&) = delete;

    const TokenFileInfo& info() const { return info_; }
    // Tokens [first, first + out.size()).
    void copy_tokens(uint64_t first, std::span<int32_t> out) const;
    bool is_target(uint64_t index) const { return mask_.empty() || mask_[index] == std::byte{0}; }

private:
    void map(const std::string& path);
    void read_header(const std::string& path);
    void check_tokens(const std::string& path, int64_t model_vocab) const;

    std::span<const std::byte> bytes_{};  // of the whole file
    std::span<const std::byte> tokens_{}, mask_{};
    TokenFileInfo info_{};
};

}  // namespace ferry
