#include "looks_like_json.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <utility>

namespace ferry::tools {
namespace {

constexpr size_t kLooksAt = size_t{64} * 1024;

// Ends at the first value that an object's key has: prose and source code do not come so far.
class FirstKey {
public:
    bool null() { return value(); }
    bool boolean(bool) { return value(); }
    bool number_integer(int64_t) { return value(); }
    bool number_unsigned(uint64_t) { return value(); }
    bool number_float(double, const std::string&) { return value(); }
    bool string(std::string&) { return value(); }
    bool binary(nlohmann::json::binary_t&) { return false; }
    bool start_object(size_t) { return value(); }
    bool end_object() { return !found_; }
    bool start_array(size_t) { return value(); }
    bool end_array() { return true; }
    bool key(std::string&) { return has_key_ = true; }
    bool parse_error(size_t, const std::string&, const nlohmann::detail::exception&) {
        return false;
    }
    bool found() const { return found_; }
    bool has_key() const { return has_key_; }

private:
    bool value() { return !(found_ = has_key_); }

    bool has_key_ = false, found_ = false;
};

struct Encoding {
    size_t mark = 0;   // so many bytes of it
    size_t bytes = 1;  // a character
    bool big_end = false;
};

// By its mark, else by where the first character, which JSON has from ASCII, has its zeros.
Encoding encoding_of(std::string_view text) {
    using namespace std::literals;
    constexpr std::array<std::pair<std::string_view, Encoding>, 5> kMarks{
        {{"\xef\xbb\xbf"sv, {3, 1, false}},
         {"\xff\xfe\0\0"sv, {4, 4, false}},
         {"\0\0\xfe\xff"sv, {4, 4, true}},
         {"\xff\xfe"sv, {2, 2, false}},
         {"\xfe\xff"sv, {2, 2, true}}}};
    for (const auto& [mark, encoding] : kMarks)
        if (text.starts_with(mark)) return encoding;
    const auto zero = [&](size_t at) { return at < text.size() && text[at] == 0; };
    if (zero(0)) return {0, zero(1) ? size_t{4} : size_t{2}, true};
    if (zero(1)) return {0, zero(2) && zero(3) ? size_t{4} : size_t{2}, false};
    return {};
}

// The low bytes of wider characters: JSON's own characters are all below 256. The separator of RFC
// 7464 is no part of a value either.
std::string in_bytes(std::string_view text) {
    const Encoding encoding = encoding_of(text);
    std::string bytes;
    bytes.reserve(text.size() / encoding.bytes);
    for (size_t at = encoding.mark; at + encoding.bytes <= text.size(); at += encoding.bytes) {
        const std::string_view one = text.substr(at, encoding.bytes);
        const char low = encoding.big_end ? one.back() : one.front();
        const auto high = encoding.big_end ? one.substr(0, one.size() - 1) : one.substr(1);
        const bool wide = high.find_first_not_of('\0') != std::string_view::npos;
        if (wide || (low != '\0' && low != '\x1e')) bytes += wide ? '?' : low;
    }
    return bytes;
}

// By the name alone, whatever compresses it: whoever means such a file as text says --raw.
bool is_named_so(const std::string& path) {
    std::string name = std::filesystem::path(path).filename();
    std::ranges::transform(name, name.begin(),
                           [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
    constexpr std::array<std::string_view, 4> kCompressed{".gz", ".zst", ".xz", ".bz2"};
    for (const std::string_view ending : kCompressed)
        if (name.ends_with(ending)) {
            name.resize(name.size() - ending.size());
            break;
        }
    constexpr std::array<std::string_view, 4> kNames{".json", ".jsonl", ".ndjson", ".json5"};
    return std::ranges::any_of(kNames, [&](auto ending) { return name.ends_with(ending); });
}

FirstKey probed(std::string_view text) {
    FirstKey probe;
    nlohmann::json::sax_parse(text, &probe);
    return probe;
}

// A list with a string or another list in it; one of numbers is a reference in prose too.
bool is_list(std::string_view text) {
    return text[0] == '[' && text.find_first_of("\"[", 1) != std::string_view::npos &&
           nlohmann::json::accept(text);
}

// A line that is an object, or a list with objects, strings or lists in it; of a long one the
// beginning may be all. What else is JSON is prose too: a number, a quotation.
bool is_record(std::string_view line) {
    if (line[0] != '{' && line[0] != '[') return false;
    const FirstKey probe = probed(line);
    return probe.found() || (probe.has_key() && line.size() >= kLooksAt) ||
           (line[0] == '{' && nlohmann::json::accept(line)) || is_list(line);
}

// Whether more than half of the lines, or of the bytes in them, are records, whatever comes first.
bool is_mostly_records(std::string_view text) {
    size_t lines = 0, bytes = 0, records = 0, record_bytes = 0;
    while (!text.empty()) {
        const size_t end = std::min(text.find('\n'), text.size());
        std::string_view line = text.substr(0, end);
        text.remove_prefix(std::min(end + 1, text.size()));
        const size_t begin = line.find_first_not_of(" \t\r");
        if (begin == std::string_view::npos) continue;
        line.remove_prefix(begin);
        const bool record = is_record(line);
        lines += 1;
        bytes += line.size();
        records += record ? 1 : 0;
        record_bytes += record ? line.size() : 0;
    }
    return records > lines / 2 || record_bytes > bytes / 2;
}

}  // namespace

bool looks_like_json(const std::string& path, std::string_view beginning) {
    if (is_named_so(path)) return true;
    const std::string text = in_bytes(beginning);
    const size_t first = text.find_first_not_of(" \t\r\n");
    if (first == std::string::npos) return false;
    const std::string_view rest = std::string_view(text).substr(first);
    const FirstKey probe = probed(rest.substr(0, kLooksAt));
    // The beginning holds only a part of a long first value.
    return probe.found() || (probe.has_key() && rest.size() >= kLooksAt) || is_list(rest) ||
           is_mostly_records(rest);
}

}  // namespace ferry::tools
