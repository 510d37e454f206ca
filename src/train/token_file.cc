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

namespace ferry {
namespace {

static_assert(std::endian::native == std::endian::little, "token files are mapped as they lie");

constexpr char kMagic[8] = {'F', 'E', 'R', 'R', 'Y', 'T', 'O', 'K'};
constexpr uint32_t kVersion = 1;
constexpr uint64_t kMaskFollows = 1;

struct Header {
    char magic[8];
    uint32_t version;
    uint32_t token_bytes;
    uint64_t vocabulary;
    uint64_t count;
    uint64_t flags;
    uint64_t checksum;
    std::byte padding[16];
};
static_assert(sizeof(Header) == 64);

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
    if (!S_ISREG(status.st_mode) || size < sizeof(Header)) {
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
    Header header{};
    std::memcpy(&header, bytes_.data(), sizeof header);
    if (std::memcmp(header.magic, kMagic, sizeof kMagic) != 0) {
        throw Error(Trouble::usage,
                    {.what = "not a token file",
                     .where = path,
                     .measured = "it does not start with FERRYTOK",
                     .remedy = "make one of your text: ferry data TEXT... -o FILE"});
    }
    if (header.version != kVersion) {
        throw Error(Trouble::usage, {.what = "a token file of another version of ferry",
                                     .where = path,
                                     .measured = "version " + std::to_string(header.version),
                                     .limit = "version " + std::to_string(kVersion),
                                     .remedy = kWriteAgain});
    }
    const uint32_t width = header.token_bytes;
    if ((width != 1 && width != 2 && width != 4) || header.flags > kMaskFollows)
        corrupt(path, "the token file's header is damaged", "token bytes " + std::to_string(width),
                "1, 2 or 4");
    info_ = {.vocabulary = header.vocabulary,
             .count = header.count,
             .token_bytes = width,
             .masked = header.flags == kMaskFollows,
             .checksum = header.checksum};
    const uint64_t each = width + (info_.masked ? 1 : 0);
    const uint64_t payload_bytes = bytes_.size() - sizeof(Header);
    // By division: a damaged count must not overflow.
    if (payload_bytes / each != header.count || payload_bytes % each != 0)
        corrupt(path,
                payload_bytes / each < header.count ? "the token file is truncated"
                                                    : "the token file is longer than it says",
                bytes_text(payload_bytes) + " after the header",
                std::to_string(header.count) + " tokens of " + bytes_text(each));
    const std::span<const std::byte> payload = bytes_.subspan(sizeof(Header));
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

// ---------------------------------------------------------------- writing

namespace {

template <class Token>
void narrow(std::span<const uint32_t> tokens, std::byte* to) {
    for (size_t i = 0; i < tokens.size(); ++i) {
        const auto token = static_cast<Token>(tokens[i]);
        std::memcpy(to + i * sizeof(Token), &token, sizeof(Token));
    }
}

void check_input(const std::string& path, std::span<const uint32_t> tokens, uint64_t vocabulary,
                 std::span<const uint8_t> mask) {
    const auto refuse = [&path](std::string what, std::string measured, std::string limit) {
        throw Error(Trouble::usage, {.what = std::move(what),
                                     .where = path,
                                     .measured = std::move(measured),
                                     .limit = std::move(limit)});
    };
    if (tokens.empty()) refuse("no tokens to write", "", "");
    if (!mask.empty() && mask.size() != tokens.size())
        refuse("the mask is not as long as the tokens", std::to_string(mask.size()),
               std::to_string(tokens.size()));
    const auto bad = std::find_if(tokens.begin(), tokens.end(),
                                  [vocabulary](uint32_t token) { return token >= vocabulary; });
    if (bad != tokens.end())
        refuse("a token outside the vocabulary",
               std::to_string(*bad) + " at " + std::to_string(bad - tokens.begin()),
               "below " + std::to_string(vocabulary));
}

std::vector<std::byte> compose(std::span<const uint32_t> tokens, uint64_t vocabulary,
                               std::span<const uint8_t> mask) {
    const uint32_t width = vocabulary <= 256 ? 1 : vocabulary <= 65536 ? 2 : 4;
    std::vector<std::byte> file(sizeof(Header) + tokens.size() * width + mask.size());
    std::byte* payload = file.data() + sizeof(Header);
    if (width == 1) narrow<uint8_t>(tokens, payload);
    if (width == 2) narrow<uint16_t>(tokens, payload);
    if (width == 4) narrow<uint32_t>(tokens, payload);
    std::transform(mask.begin(), mask.end(), payload + tokens.size() * width,
                   [](uint8_t masked) { return std::byte{masked != 0}; });
    Header header{};
    std::memcpy(header.magic, kMagic, sizeof kMagic);
    header.version = kVersion;
    header.token_bytes = width;
    header.vocabulary = vocabulary;
    header.count = tokens.size();
    header.flags = mask.empty() ? 0 : kMaskFollows;
    header.checksum = checksum(std::span(file).subspan(sizeof(Header)));
    std::memcpy(file.data(), &header, sizeof header);
    return file;
}

// False with errno set when the bytes are not all on the disk.
bool write_and_flush(const std::string& path, std::span<const std::byte> bytes) {
    constexpr mode_t kMode = 0666;
    const Descriptor file(::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, kMode));
    if (file.get() < 0) return false;
    while (!bytes.empty()) {
        const ssize_t written = ::write(file.get(), bytes.data(), bytes.size());
        if (written < 0 && errno != EINTR) return false;
        if (written > 0) bytes = bytes.subspan(static_cast<size_t>(written));
    }
    return ::fsync(file.get()) == 0;
}

}  // namespace

void write_tokens(const std::string& path, std::span<const uint32_t> tokens, uint64_t vocabulary,
                  std::span<const uint8_t> mask) {
    check_input(path, tokens, vocabulary, mask);
    const std::vector<std::byte> file = compose(tokens, vocabulary, mask);
    // A reader sees the old file or the new one, never half of one.
    const std::string partial = path + ".partial." + std::to_string(::getpid());
    if (write_and_flush(partial, file) && ::rename(partial.c_str(), path.c_str()) == 0) return;
    const int reason = errno;
    ::unlink(partial.c_str());
    throw Error(Trouble::io,
                {.what = "cannot write the token file",
                 .where = path,
                 .measured = std::strerror(reason),
                 .limit = bytes_text(file.size()) + " to write",
                 .remedy = reason == ENOENT   ? "make the directory first"
                           : reason == ENOSPC ? "free that much there, or write elsewhere (-o)"
                                              : "write elsewhere (-o)"});
}

}  // namespace ferry
