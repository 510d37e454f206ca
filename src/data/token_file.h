// A token file, checked whole at the start and again wherever it is read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "data/tokens.h"

namespace ferry {

// Any thread may call any method. Nothing is mapped: what is read was read by pread and has the
// checksum that its token block had at the start. Else, and where it cannot be read, they throw io.
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
    // Their marks: 1, it is no target. All 0 in a file without a mask.
    void copy_marks(uint64_t first, std::span<uint8_t> out) const;
    // Where documents [first, first + out.size()) begin.
    void copy_documents(uint64_t first, std::span<uint64_t> out) const;
    // The document that a token is of; the file knows them.
    uint64_t document_of(uint64_t token) const;

private:
    friend TokenFileInfo read_token_info(const std::string& path);
    explicit TokenFile(const std::string& path);
    void open();
    void read_header();
    void check_contents(int64_t model_vocab);
    void check_documents() const;
    [[noreturn]] void refuse_token(uint64_t index, uint64_t model_vocab) const;
    [[noreturn]] void refuse_changed(uint64_t offset, uint64_t bytes) const;
    // Reads bytes of the file, not yet proved.
    void read_raw(uint64_t offset, std::span<std::byte> out) const;
    void read(uint64_t offset, std::span<std::byte> out) const;

    const std::string path_;
    int file_ = -1;
    uint64_t size_ = 0;
    int64_t modified_ns_ = 0;
    uint64_t block_bytes_ = 0;
    std::vector<uint64_t> sums_{};  // by token block
    TokenFileInfo info_{};
};

}  // namespace ferry
