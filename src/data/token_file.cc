#include "token_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <vector>

#include "base/checksum.h"
#include "ferry/error.h"
#include "token_header.h"

namespace ferry {
namespace {

constexpr const char* kWriteAgain = "write the file again with `ferry data`";

[[noreturn]] void corrupt(const std::string& path, std::string what, std::string measured,
                          std::string limit) {
    throw Error(Trouble::io, {.what = std::move(what),
                              .where = path,
                              .measured = std::move(measured),
                              .limit = std::move(limit),
                              .remedy = kWriteAgain});
}

std::string bytes_text(uint64_t bytes) { return std::to_string(bytes) + " bytes"; }

// Closes on every way out.
class Descriptor {
public:
    explicit Descriptor(int fd) : fd_(fd) {}
    ~Descriptor() {
        if (fd_ >= 0) ::close(fd_);
    }
    Descriptor(const Descriptor&) = delete;
    Descriptor& operator=(const Descriptor&) = delete;
    int get() const { return fd_; }

private:
    int fd_;
};

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

}  // namespace

TokenFile::TokenFile(const std::string& path, int64_t model_vocab) {
    map(path);
    try {
        read_header(path);
        check_tokens(path, model_vocab);
    } catch (...) {
        ::munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
        throw;
    }
}

TokenFile::~TokenFile() { ::munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size()); }

void TokenFile::map(const std::string& path) {
    // Without O_NONBLOCK opening a named pipe would wait for its writer.
    const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
    struct stat status {};
    if (file.get() < 0 || ::fstat(file.get(), &status) != 0) {
        const Trouble trouble = errno == EIO ? Trouble::io : Trouble::usage;
        throw Error(trouble, {.what = "cannot open the token file",
                              .where = path,
                              .measured = std::strerror(errno),
                              .remedy = "write one: ferry data TEXT... -o " + path});
    }
    const auto size = static_cast<size_t>(status.st_size);
    if (!S_ISREG(status.st_mode) || size < sizeof(TokenHeader)) {
        throw Error(Trouble::usage,
                    {.what = "not a token file",
                     .where = path,
                     .measured = S_ISREG(status.st_mode) ? bytes_text(size) : "not a regular file",
                     .limit = "a header of 64 bytes",
                     .remedy = "write one: ferry data TEXT... -o " + path});
    }
    void* address = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file.get(), 0);
    if (address == MAP_FAILED) {
        throw Error(
            Trouble::io,
            {.what = "cannot map the token file", .where = path, .measured = std::strerror(errno)});
    }
    bytes_ = {static_cast<const std::byte*>(address), size};
}

void TokenFile::read_header(const std::string& path) {
    TokenHeader header{};
    std::memcpy(&header, bytes_.data(), sizeof header);
    if (std::memcmp(header.magic, kTokenMagic, sizeof kTokenMagic) != 0) {
        throw Error(Trouble::usage,
                    {.what = "not a token file",
                     .where = path,
                     .measured = "it does not start with FERRYTOK",
                     .remedy = "make one of your text: ferry data TEXT... -o FILE"});
    }
    if (header.version != kTokenVersion) {
        throw Error(Trouble::usage, {.what = "a token file of another version of ferry",
                                     .where = path,
                                     .measured = "version " + std::to_string(header.version),
                                     .limit = "version " + std::to_string(kTokenVersion),
                                     .remedy = kWriteAgain});
    }
    const uint32_t width = header.token_bytes;
    if ((width != 1 && width != 2 && width != 4) || header.flags > kTokenMaskFollows)
        corrupt(path, "the token file's header is damaged", "token bytes " + std::to_string(width),
                "1, 2 or 4");
    info_ = {.vocabulary = header.vocabulary,
             .count = header.count,
             .token_bytes = width,
             .masked = header.flags == kTokenMaskFollows,
             .checksum = header.checksum};
    const uint64_t each = width + (info_.masked ? 1 : 0);
    const uint64_t payload_bytes = bytes_.size() - sizeof(TokenHeader);
    // By division: a damaged count must not overflow.
    if (payload_bytes / each != header.count || payload_bytes % each != 0)
        corrupt(path,
                payload_bytes / each < header.count ? "the token file is truncated"
                                                    : "the token file is longer than it says",
                bytes_text(payload_bytes) + " after the header",
                std::to_string(header.count) + " tokens of " + bytes_text(each));
    const std::span<const std::byte> payload = bytes_.subspan(sizeof(TokenHeader));
    if (checksum(payload) != header.checksum)
        corrupt(path, "the token file is damaged: its checksum differs", "", "");
    tokens_ = payload.first(header.count * width);
    mask_ = payload.subspan(tokens_.size());
}

void TokenFile::check_tokens(const std::string& path, int64_t model_vocab) const {
    const auto refuse = [&](Trouble trouble, uint64_t index, const std::string& limit,
                            const char* remedy) {
        int32_t token = 0;
        copy_tokens(index, {&token, 1});
        throw Error(trouble, {.what = "a token outside the vocabulary",
                              .where = path + ", token " + std::to_string(index),
                              .measured = std::to_string(static_cast<uint32_t>(token)),
                              .limit = limit,
                              .remedy = remedy});
    };
    const uint64_t own = first_at_least(tokens_, info_.token_bytes, info_.vocabulary);
    if (own != info_.count)
        refuse(Trouble::io, own, "below the file's vocabulary, " + std::to_string(info_.vocabulary),
               kWriteAgain);
    if (model_vocab <= 0 || static_cast<uint64_t>(model_vocab) >= info_.vocabulary) return;
    const auto limit = static_cast<uint64_t>(model_vocab);
    const uint64_t model = first_at_least(tokens_, info_.token_bytes, limit);
    if (model != info_.count)
        refuse(Trouble::usage, model, "below model.vocab, " + std::to_string(limit),
               "raise model.vocab, or write the tokens with the model's vocabulary");
}

void TokenFile::copy_tokens(uint64_t first, std::span<int32_t> out) const {
    FERRY_CHECK(first + out.size() <= info_.count);
    const std::byte* from = tokens_.data() + first * info_.token_bytes;
    if (info_.token_bytes == 1) return widen<uint8_t>(from, out);
    if (info_.token_bytes == 2) return widen<uint16_t>(from, out);
    widen<uint32_t>(from, out);
}

}  // namespace ferry
