#include "base/text.h"

#include <fcntl.h>
#include <spdlog/fmt/fmt.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/process_limits.h"
#include "ferry/error.h"
#include "ferry/units.h"

namespace ferry {
namespace {

unsigned char byte_at(std::string_view text, size_t index) {
    return static_cast<unsigned char>(text[index]);
}

// Bytes of the character that begins there (RFC 3629, table 3-7 of Unicode); 0: none does.
size_t character_at(std::string_view text, size_t index) {
    const unsigned char first = byte_at(text, index);
    if (first < 0x80) return 1;
    const size_t bytes = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : 2;
    if (first < 0xc2 || first > 0xf4 || index + bytes > text.size()) return 0;
    // Neither longer than it need be, nor a surrogate, nor above U+10FFFF.
    const unsigned char low = first == 0xe0 ? 0xa0 : first == 0xf0 ? 0x90 : 0x80;
    const unsigned char high = first == 0xed ? 0x9f : first == 0xf4 ? 0x8f : 0xbf;
    if (byte_at(text, index + 1) < low || byte_at(text, index + 1) > high) return 0;
    for (size_t i = 2; i < bytes; ++i) {
        if ((byte_at(text, index + i) & 0xc0) != 0x80) return 0;
    }
    return bytes;
}

// U+0080 to U+009F steer terminals as ESC does.
bool steers(std::string_view text, size_t at, size_t bytes) {
    return bytes == 2 && byte_at(text, at) == 0xc2 && byte_at(text, at + 1) < 0xa0;
}

void append_escaped(std::string& to, std::string_view text) {
    for (size_t at = 0; at < text.size();) {
        const size_t bytes = character_at(text, at);
        const unsigned char first = byte_at(text, at);
        const bool two = steers(text, at, bytes);
        if (bytes == 0 || first < ' ' || first == 0x7f || two) {
            to += first == '\n' ? "\\n" : first == '\t' ? "\\t" : fmt::format("\\x{:02x}", first);
            if (two) to += fmt::format("\\x{:02x}", byte_at(text, at + 1));
            at += two ? 2 : 1;
        } else {
            to.append(text.substr(at, bytes));
            at += bytes;
        }
    }
}

// Not inside a character.
size_t boundary(std::string_view text, size_t index) {
    for (int back = 0; back < 3 && index > 0 && (byte_at(text, index) & 0xc0) == 0x80; ++back)
        --index;
    return index;
}

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

// As errno says.
[[noreturn]] void unreadable(const std::string& path, const TextFile& kind, int error) {
    // Of a read it says that nothing is there yet, not that there is a thread too many.
    const bool waits = error == EAGAIN;
    std::string limit = waits ? "" : limit_behind(error);
    throw Error(waits ? Trouble::usage : trouble_of_reading(error),
                {.what = "cannot read " + std::string(kind.name),
                 .where = path,
                 .measured = std::strerror(error),
                 .limit = limit,
                 .remedy = limit.empty() ? std::string(kind.remedy) : "raise that limit"});
}

[[noreturn]] void unreadable(const std::string& path, const TextFile& kind, std::string measured,
                             std::string limit) {
    throw Error(Trouble::usage, {.what = "cannot read " + std::string(kind.name),
                                 .where = path,
                                 .measured = std::move(measured),
                                 .limit = std::move(limit),
                                 .remedy = std::string(kind.remedy)});
}

}  // namespace

std::string shown(std::string_view text, size_t most) {
    std::string out;
    if (text.size() <= most) {
        append_escaped(out, text);
        return out;
    }
    append_escaped(out, text.substr(0, boundary(text, most * 3 / 4)));
    out += "...";
    append_escaped(out, text.substr(boundary(text, text.size() - most / 4)));
    return out + fmt::format(" ({} bytes)", text.size());
}

std::string in_quotes(std::string_view text, size_t most) {
    return text.size() <= most ? '"' + shown(text, most) + '"' : shown(text, most);
}

std::string one_line(std::string_view name) {
    std::string out;
    append_escaped(out, name);
    return out;
}

std::string printable(std::string_view text) {
    std::string out;
    for (;;) {
        const size_t end = std::min(text.find('\n'), text.size());
        append_escaped(out, text.substr(0, end));
        if (end == text.size()) return out;
        out += '\n';
        text.remove_prefix(end + 1);
    }
}

std::string json_escaped(std::string_view json) {
    std::string out;
    for (size_t at = 0; at < json.size();) {
        const size_t bytes = std::max<size_t>(1, character_at(json, at));
        const unsigned char first = byte_at(json, at);
        if (first == 0x7f) out += "\\u007f";
        if (steers(json, at, bytes)) out += fmt::format("\\u{:04x}", byte_at(json, at + 1));
        if (first != 0x7f && !steers(json, at, bytes)) out.append(json.substr(at, bytes));
        at += bytes;
    }
    return out;
}

size_t first_bad_byte(std::string_view text) {
    for (size_t at = 0; at < text.size();) {
        const size_t bytes = character_at(text, at);
        if (bytes == 0 || text[at] == '\0') return at;
        at += bytes;
    }
    return std::string_view::npos;
}

std::string line_and_column(std::string_view text, size_t index) {
    const std::string_view before = text.substr(0, std::min(index, text.size()));
    const auto lines = std::count(before.begin(), before.end(), '\n');
    const size_t line_start = before.rfind('\n') + 1;  // npos + 1 is 0
    return fmt::format("line {}, column {}", lines + 1, before.size() - line_start + 1);
}

std::string read_text_file(const std::string& path, const TextFile& kind) {
    // Without O_NONBLOCK opening a named pipe would wait for its writer.
    const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
    struct stat status {};
    if (file.get() < 0 || ::fstat(file.get(), &status) != 0) unreadable(path, kind, errno);
    if (!S_ISREG(status.st_mode))
        unreadable(path, kind, S_ISDIR(status.st_mode) ? std::strerror(EISDIR) : "no regular file",
                   "a regular file");
    // Files of /proc have no size: what is read counts.
    std::string text;
    const auto most = static_cast<size_t>(kind.most_bytes);
    for (;;) {
        constexpr size_t kPart = size_t{64} * 1024;
        const size_t had = text.size();
        const auto expected = static_cast<size_t>(std::max<int64_t>(status.st_size, 0));
        const size_t room = std::max(kPart, expected > had ? expected - had : size_t{0});
        text.resize(had + std::min(room, most + 1 - had));
        const ssize_t count = ::read(file.get(), text.data() + had, text.size() - had);
        text.resize(had + static_cast<size_t>(std::max<ssize_t>(count, 0)));
        if (count < 0 && errno == EINTR) continue;
        if (count < 0) unreadable(path, kind, errno);
        if (text.size() > most)
            unreadable(path, kind, fmt::format("it is larger, {} bytes", status.st_size),
                       format_bytes(kind.most_bytes));
        if (count == 0) return text;
    }
}

}  // namespace ferry
