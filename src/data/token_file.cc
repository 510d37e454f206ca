#include "token_file.h"

#include <fcntl.h>
#include <spdlog/fmt/fmt.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>

#include "base/checksum.h"
#include "base/files.h"
#include "base/process_limits.h"
#include "ferry/error.h"
#include "ferry/units.h"
#include "token_header.h"

namespace ferry {
namespace {

constexpr const char* kWriteAgain = "write the file again with `ferry data`";

// Small, as a sequence is read with all of the token blocks that it lies in; not so small that the
// sums of a large file take more than 8 MiB.
constexpr uint64_t kBlockLeast = 16 * kKiB, kBlocksMost = 1 << 20;

[[noreturn]] void corrupt(const std::string& path, std::string what, std::string measured,
                          std::string limit) {
    throw Error(Trouble::io, {.what = std::move(what),
                              .where = path,
                              .measured = std::move(measured),
                              .limit = std::move(limit),
                              .remedy = kWriteAgain});
}

std::string bytes_text(uint64_t bytes) { return std::to_string(bytes) + " bytes"; }

int64_t modified_ns(const struct stat& status) {
    return int64_t{status.st_mtim.tv_sec} * 1'000'000'000 + status.st_mtim.tv_nsec;
}

template <class Token>
uint64_t first_at_least(std::span<const std::byte> bytes, uint64_t limit) {
    const auto* tokens = reinterpret_cast<const Token*>(bytes.data());
    const auto* end = tokens + bytes.size() / sizeof(Token);
    return static_cast<uint64_t>(
        std::find_if(tokens, end, [limit](Token token) { return token >= limit; }) - tokens);
}

// Index of the first token not below the limit; the count when there is none.
uint64_t first_at_least(std::span<const std::byte> bytes, uint32_t token_bytes, uint64_t limit) {
    if (token_bytes == 1) return first_at_least<uint8_t>(bytes, limit);
    if (token_bytes == 2) return first_at_least<uint16_t>(bytes, limit);
    return first_at_least<uint32_t>(bytes, limit);
}

template <class Token>
void widen(const std::byte* from, std::span<int32_t> out) {
    const auto* tokens = reinterpret_cast<const Token*>(from);
    std::transform(tokens, tokens + out.size(), out.begin(),
                   [](Token token) { return static_cast<int32_t>(token); });
}

// The first token that is too large, of those that came past in order.
class TooLarge {
public:
    TooLarge(uint32_t token_bytes, uint64_t limit) : token_bytes_(token_bytes), limit_(limit) {}
    void look(std::span<const std::byte> tokens) {
        if (found_) return;
        const uint64_t count = tokens.size() / token_bytes_;
        const uint64_t at = first_at_least(tokens, token_bytes_, limit_);
        found_ = at < count;
        index_ += at;
    }
    bool found() const { return found_; }
    uint64_t index() const { return index_; }

private:
    uint32_t token_bytes_;
    uint64_t limit_, index_ = 0;
    bool found_ = false;
};

}  // namespace

TokenFile::TokenFile(const std::string& path, int64_t model_vocab) : TokenFile(path) {
    check_contents(model_vocab);
}

TokenFileInfo read_token_info(const std::string& path) { return TokenFile(path).info_; }

TokenFile::TokenFile(const std::string& path) : path_(path) {
    try {
        open();
        read_header();
    } catch (...) {
        if (file_ >= 0) ::close(file_);
        throw;
    }
}

TokenFile::~TokenFile() { ::close(file_); }

void TokenFile::open() {
    // Without O_NONBLOCK opening a named pipe would wait for its writer.
    file_ = open_above_standard(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    struct stat status {};
    if (file_ < 0 || ::fstat(file_, &status) != 0) {
        const int error = errno;
        const std::string limit = limit_behind(error);
        throw Error(trouble_of_reading(error),
                    {.what = "cannot open the token file",
                     .where = path_,
                     .measured = std::strerror(error),
                     .limit = limit,
                     .remedy = limit.empty() ? "write one: ferry data TEXT... -o " + path_
                                             : "raise that limit"});
    }
    size_ = static_cast<uint64_t>(status.st_size);
    modified_ns_ = modified_ns(status);
    if (!S_ISREG(status.st_mode) || size_ < sizeof(TokenHeader)) {
        throw Error(Trouble::usage,
                    {.what = "not a token file",
                     .where = path_,
                     .measured = S_ISREG(status.st_mode) ? bytes_text(size_) : "not a regular file",
                     .limit = "a header of 64 bytes",
                     .remedy = "write one: ferry data TEXT... -o " + path_});
    }
}

void TokenFile::read_header() {
    TokenHeader header{};
    read_raw(0, std::as_writable_bytes(std::span(&header, 1)));
    if (std::memcmp(header.magic, kTokenMagic, sizeof kTokenMagic) != 0) {
        throw Error(Trouble::usage,
                    {.what = "not a token file",
                     .where = path_,
                     .measured = "it does not start with FERRYTOK",
                     .remedy = "make one of your text: ferry data TEXT... -o FILE"});
    }
    const bool documents = header.version == kTokenVersionOfDocuments;
    if (header.version != kTokenVersion && !documents) {
        throw Error(Trouble::usage, {.what = "a token file of another version of ferry",
                                     .where = path_,
                                     .measured = "version " + std::to_string(header.version),
                                     .limit = "versions 1 and 2",
                                     .remedy = kWriteAgain});
    }
    const uint32_t width = header.token_bytes;
    const auto damaged = [this](std::string measured, std::string limit) {
        corrupt(path_, "the token file's header is damaged", std::move(measured), std::move(limit));
    };
    if (width != 1 && width != 2 && width != 4)
        damaged("token bytes " + std::to_string(width), "1, 2 or 4");
    if ((header.flags & ~kTokenMaskFollows) != (documents ? kDocumentsFollow : 0))
        damaged("flags " + std::to_string(header.flags), documents ? "2 or 3" : "0 or 1");
    if (documents ? header.documents == 0 || header.documents > header.count
                  : header.documents != 0)
        damaged("documents " + std::to_string(header.documents),
                documents ? "1 to the tokens, " + std::to_string(header.count) : "0");
    if (header.vocabulary < 1 || header.vocabulary > kVocabularyMost)
        damaged("vocabulary " + std::to_string(header.vocabulary),
                "1 to " + std::to_string(kVocabularyMost));
    if (std::ranges::any_of(header.padding, [](std::byte byte) { return byte != std::byte{0}; }))
        damaged("its last 8 bytes are not all zero", "zeros");
    info_ = {.vocabulary = header.vocabulary,
             .count = header.count,
             .token_bytes = width,
             .masked = (header.flags & kTokenMaskFollows) != 0,
             .documents = header.documents,
             .checksum = header.checksum};
    const uint64_t each = width + (info_.masked ? 1 : 0);
    const uint64_t payload_bytes = size_ - sizeof(TokenHeader);
    const std::string text =
        std::to_string(header.count) + " tokens of " + bytes_text(each) +
        (documents ? ", " + std::to_string(header.documents) + " documents" : "");
    // By division: a damaged count must not overflow.
    const bool truncated = payload_bytes / sizeof(uint64_t) < header.documents;
    const uint64_t of_tokens = truncated ? 0 : payload_bytes - header.documents * sizeof(uint64_t);
    if (of_tokens / each != header.count || of_tokens % each != 0)
        corrupt(path_,
                of_tokens / each < header.count ? "the token file is truncated"
                                                : "the token file is longer than it says",
                bytes_text(payload_bytes) + " after the header", text);
}

// Takes down the sum of every token block on the way: the file is the run's as it is now.
void TokenFile::check_contents(int64_t model_vocab) {
    block_bytes_ = std::max(kBlockLeast, std::bit_ceil(size_ / kBlocksMost));
    sums_.reserve(size_ / block_bytes_ + 1);
    const uint64_t tokens_end = sizeof(TokenHeader) + info_.count * info_.token_bytes;
    const auto of_model = static_cast<uint64_t>(model_vocab);
    TooLarge own(info_.token_bytes, info_.vocabulary);
    TooLarge model(info_.token_bytes, model_vocab > 0 ? of_model : info_.vocabulary);
    RunningChecksum whole;
    std::vector<std::byte> block;
    for (uint64_t at = 0; at < size_; at += block_bytes_) {
        block.resize(std::min(block_bytes_, size_ - at));
        read_raw(at, block);
        sums_.push_back(checksum(block));
        // The header is no part of what it has the checksum of; tokens end before the mask.
        const uint64_t skipped = at == 0 ? sizeof(TokenHeader) : 0;
        whole.add(std::span(block).subspan(skipped));
        const uint64_t end = std::min(at + block.size(), tokens_end);
        if (at + skipped >= end) continue;
        const std::span tokens = std::span(block).subspan(skipped, end - at - skipped);
        own.look(tokens);
        model.look(tokens);
    }
    if (whole.value() != info_.checksum)
        corrupt(path_, "the token file is damaged: its checksum differs", "", "");
    if (own.found()) refuse_token(own.index(), 0);
    if (model.found()) refuse_token(model.index(), of_model);
    check_documents();
}

void TokenFile::check_documents() const {
    constexpr uint64_t kBlock = 1 << 16;
    std::vector<uint64_t> firsts;
    uint64_t least = 0;
    for (uint64_t at = 0; at < info_.documents; at += firsts.size()) {
        firsts.resize(std::min(kBlock, info_.documents - at));
        copy_documents(at, firsts);
        for (size_t i = 0; i < firsts.size(); ++i) {
            const bool right = at + i == 0 ? firsts[i] == 0 : firsts[i] >= least;
            if (!right || firsts[i] >= info_.count)
                corrupt(path_, "the token file's documents are not in order",
                        "document " + std::to_string(at + i) + " begins at token " +
                            std::to_string(firsts[i]),
                        at + i == 0 ? "token 0"
                                    : "from " + std::to_string(least) + " on, below " +
                                          std::to_string(info_.count));
            least = firsts[i] + 1;
        }
    }
}

// Throws for a token outside the model's vocabulary; 0: outside the file's own.
void TokenFile::refuse_token(uint64_t index, uint64_t model_vocab) const {
    int32_t token = 0;
    copy_tokens(index, {&token, 1});
    const bool own = model_vocab == 0;
    throw Error(
        own ? Trouble::io : Trouble::usage,
        {.what = "a token outside the vocabulary",
         .where = path_ + ", token " + std::to_string(index),
         .measured = std::to_string(static_cast<uint32_t>(token)),
         .limit = own ? "below the file's vocabulary, " + std::to_string(info_.vocabulary)
                      : "below model.vocab, " + std::to_string(model_vocab),
         .remedy = own ? kWriteAgain
                       : "raise model.vocab, or write the tokens with the model's vocabulary"});
}

// ---------------------------------------------------------------- reading

void TokenFile::refuse_changed(uint64_t offset, uint64_t bytes) const {
    struct stat now {};
    std::string measured = "other bytes than at the start";
    if (::fstat(file_, &now) == 0) {
        if (static_cast<uint64_t>(now.st_size) != size_)
            measured = bytes_text(static_cast<uint64_t>(now.st_size)) + " long";
        else if (modified_ns(now) != modified_ns_)
            measured += ", modified since";
        else
            measured += ", its time of modification is as it was";
    }
    throw Error(Trouble::io,
                {.what = "the token file changed while the run read from it",
                 .where = fmt::format("{}, bytes {} to {}", path_, offset, offset + bytes - 1),
                 .measured = measured,
                 .limit = bytes_text(size_) + " as they were at the start",
                 .remedy = "put the file back as it was; check the drive if nobody wrote to it"});
}

void TokenFile::read_raw(uint64_t offset, std::span<std::byte> out) const {
    const uint64_t begin = offset, bytes = out.size();
    while (!out.empty()) {
        const ssize_t got = ::pread(file_, out.data(), out.size(), static_cast<off_t>(offset));
        if (got < 0 && errno == EINTR) continue;
        if (got < 0)
            throw Error(Trouble::io,
                        {.what = "the token file cannot be read",
                         .where = fmt::format("{}, {} bytes at {}", path_, out.size(), offset),
                         .measured = std::strerror(errno),
                         .remedy = "check the drive's health, or use a copy of the file"});
        if (got == 0) refuse_changed(begin, bytes);  // it ends sooner than it did
        out = out.subspan(static_cast<size_t>(got));
        offset += static_cast<uint64_t>(got);
    }
}

void TokenFile::read(uint64_t offset, std::span<std::byte> out) const {
    thread_local std::vector<std::byte> room;
    while (!out.empty()) {
        const uint64_t index = offset / block_bytes_, begin = index * block_bytes_;
        const uint64_t bytes = std::min(block_bytes_, size_ - begin);
        const uint64_t skipped = offset - begin;
        const size_t part = std::min<size_t>(out.size(), bytes - skipped);
        const bool whole = part == bytes;
        if (!whole) room.resize(bytes);
        const std::span<std::byte> block = whole ? out.first(part) : std::span(room);
        read_raw(begin, block);
        if (checksum(block) != sums_[index]) refuse_changed(begin, bytes);
        if (!whole) std::memcpy(out.data(), block.data() + skipped, part);
        out = out.subspan(part);
        offset += part;
    }
}

void TokenFile::copy_tokens(uint64_t first, std::span<int32_t> out) const {
    FERRY_CHECK(first + out.size() <= info_.count);
    thread_local std::vector<std::byte> narrow;
    narrow.resize(out.size() * info_.token_bytes);
    read(sizeof(TokenHeader) + first * info_.token_bytes, narrow);
    if (info_.token_bytes == 1) return widen<uint8_t>(narrow.data(), out);
    if (info_.token_bytes == 2) return widen<uint16_t>(narrow.data(), out);
    widen<uint32_t>(narrow.data(), out);
}

void TokenFile::copy_marks(uint64_t first, std::span<uint8_t> out) const {
    FERRY_CHECK(first + out.size() <= info_.count);
    if (!info_.masked) {
        std::ranges::fill(out, uint8_t{0});
        return;
    }
    read(sizeof(TokenHeader) + info_.count * info_.token_bytes + first,
         std::as_writable_bytes(out));
}

void TokenFile::copy_documents(uint64_t first, std::span<uint64_t> out) const {
    FERRY_CHECK(first + out.size() <= info_.documents);
    const uint64_t each = info_.token_bytes + (info_.masked ? 1 : 0);
    read(sizeof(TokenHeader) + info_.count * each + first * sizeof(uint64_t),
         std::as_writable_bytes(out));
}

// The last that begins at the token or before it.
uint64_t TokenFile::document_of(uint64_t token) const {
    FERRY_CHECK(token < info_.count && info_.documents > 0);
    uint64_t low = 0, high = info_.documents;
    while (high - low > 1) {
        const uint64_t middle = low + (high - low) / 2;
        uint64_t first = 0;
        copy_documents(middle, {&first, 1});
        (first <= token ? low : high) = middle;
    }
    return low;
}

}  // namespace ferry
