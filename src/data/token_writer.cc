#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/checksum.h"
#include "data/tokens.h"
#include "ferry/error.h"
#include "token_header.h"

namespace ferry {
namespace {

template <class Token>
void narrow(std::span<const uint32_t> tokens, std::vector<std::byte>& to) {
    to.resize(tokens.size() * sizeof(Token));
    for (size_t i = 0; i < tokens.size(); ++i) {
        const auto token = static_cast<Token>(tokens[i]);
        std::memcpy(to.data() + i * sizeof(Token), &token, sizeof(Token));
    }
}

uint32_t width_for(uint64_t vocabulary) {
    return vocabulary <= 256 ? 1 : vocabulary <= 65536 ? 2 : 4;
}

}  // namespace

TokenWriter::TokenWriter(std::string path, uint64_t vocabulary)
    : path_(std::move(path)),
      partial_(path_ + ".partial." + std::to_string(::getpid())),
      info_{.vocabulary = vocabulary, .token_bytes = width_for(vocabulary)},
      written_(sizeof(TokenHeader)) {
    constexpr mode_t kMode = 0666;
    file_ = ::open(partial_.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, kMode);
    if (file_ < 0 || ::lseek(file_, written_, SEEK_SET) < 0) fail(errno);
}

TokenWriter::~TokenWriter() {
    if (file_ < 0) return;
    ::close(file_);
    ::unlink(partial_.c_str());
}

void TokenWriter::add_tokens(std::span<const uint32_t> tokens) {
    FERRY_CHECK(marks_ == 0, "tokens come before marks");
    const auto bad =
        std::ranges::find_if(tokens, [this](uint32_t token) { return token >= info_.vocabulary; });
    if (bad != tokens.end()) {
        const uint64_t index = info_.count + static_cast<uint64_t>(bad - tokens.begin());
        throw Error(Trouble::usage,
                    {.what = "a token outside the vocabulary",
                     .where = path_,
                     .measured = std::to_string(*bad) + " at " + std::to_string(index),
                     .limit = "below " + std::to_string(info_.vocabulary),
                     .remedy = "give the vocabulary of the tokenizer that made them"});
    }
    if (info_.token_bytes == 1) narrow<uint8_t>(tokens, narrow_);
    if (info_.token_bytes == 2) narrow<uint16_t>(tokens, narrow_);
    if (info_.token_bytes == 4) narrow<uint32_t>(tokens, narrow_);
    write(narrow_);
    info_.count += tokens.size();
}

void TokenWriter::add_marks(std::span<const uint8_t> marks) {
    narrow_.resize(marks.size());
    std::ranges::transform(marks, narrow_.begin(),
                           [](uint8_t masked) { return std::byte{masked != 0}; });
    write(narrow_);
    marks_ += marks.size();
}

void TokenWriter::finish() {
    const auto refuse = [this](const char* what, std::string measured, std::string limit,
                               const char* remedy) {
        throw Error(Trouble::usage, {.what = what,
                                     .where = path_,
                                     .measured = std::move(measured),
                                     .limit = std::move(limit),
                                     .remedy = remedy});
    };
    if (info_.count == 0) refuse("no tokens to write", "", "", "give some text");
    if (marks_ != 0 && marks_ != info_.count)
        refuse("the mask is not as long as the tokens", std::to_string(marks_),
               std::to_string(info_.count), "give a mark for each token");
    const auto size = static_cast<size_t>(written_);
    void* const whole = ::mmap(nullptr, size, PROT_READ, MAP_SHARED, file_, 0);
    if (whole == MAP_FAILED) fail(errno);
    const std::span bytes(static_cast<const std::byte*>(whole), size);
    TokenHeader header{.token_bytes = info_.token_bytes,
                       .vocabulary = info_.vocabulary,
                       .count = info_.count,
                       .flags = marks_ == 0 ? 0 : kTokenMaskFollows,
                       .checksum = checksum(bytes.subspan(sizeof(TokenHeader)))};
    ::munmap(whole, size);
    std::memcpy(header.magic, kTokenMagic, sizeof kTokenMagic);
    const bool written = ::pwrite(file_, &header, sizeof header, 0) == ssize_t{sizeof header} &&
                         ::fsync(file_) == 0 && ::rename(partial_.c_str(), path_.c_str()) == 0;
    if (!written) fail(errno);
    ::close(std::exchange(file_, -1));
}

void TokenWriter::write(std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
        const ssize_t wrote = ::write(file_, bytes.data(), bytes.size());
        if (wrote < 0 && errno != EINTR) fail(errno);
        if (wrote <= 0) continue;
        bytes = bytes.subspan(static_cast<size_t>(wrote));
        written_ += wrote;
    }
}

void TokenWriter::fail(int reason) const {
    throw Error(Trouble::io,
                {.what = "cannot write the token file",
                 .where = path_,
                 .measured = std::string(std::strerror(reason)) + ", after " +
                             std::to_string(written_) + " bytes",
                 .remedy = reason == ENOENT   ? "make the directory first"
                           : reason == ENOSPC ? "free more than that there, or write elsewhere (-o)"
                                              : "write elsewhere (-o)"});
}

void write_tokens(const std::string& path, std::span<const uint32_t> tokens, uint64_t vocabulary,
                  std::span<const uint8_t> mask) {
    TokenWriter file(path, vocabulary);
    file.add_tokens(tokens);
    file.add_marks(mask);
    file.finish();
}

}  // namespace ferry
