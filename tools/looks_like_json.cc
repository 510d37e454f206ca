#include "looks_like_json.h"

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace ferry::tools {
namespace {

constexpr size_t kLooksAt = 64 * 1024;

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

// Of UTF-16, which its mark tells, the low bytes: JSON's own characters are all below 256.
std::string in_bytes(std::string_view text) {
    if (text.starts_with("\xef\xbb\xbf")) text.remove_prefix(3);
    const bool big_end = text.starts_with("\xfe\xff");
    if (!big_end && !text.starts_with("\xff\xfe")) return std::string(text);
    std::string bytes;
    for (size_t at = 2; at + 1 < text.size(); at += 2) {
        const char low = text[at + (big_end ? 1 : 0)], high = text[at + (big_end ? 0 : 1)];
        bytes += high == 0 ? low : '?';
    }
    return bytes;
}

bool is_named_so(const std::string& path) {
    std::string ending = std::filesystem::path(path).extension();
    std::ranges::transform(ending, ending.begin(),
                           [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
    return ending == ".json" || ending == ".jsonl" || ending == ".ndjson";
}

FirstKey probed(std::string_view text) {
    FirstKey probe;
    nlohmann::json::sax_parse(text, &probe);
    return probe;
}

// A line that is an object, or a list with objects in it; of a long one the beginning may be all.
// What else is JSON is prose too: a number, a quotation.
bool is_record(std::string_view line) {
    if (line[0] != '{' && line[0] != '[') return false;
    const FirstKey probe = probed(line);
    return probe.found() || (probe.has_key() && line.size() >= kLooksAt) ||
           (line[0] == '{' && nlohmann::json::accept(line));
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
    const std::string text = in_bytes(beginning);
    const size_t first = text.find_first_not_of(" \t\r\n");
    if (first == std::string::npos) return false;
    const std::string_view rest = std::string_view(text).substr(first);
    constexpr std::string_view kOpens = "{[\"";
    const auto first_line = rest.substr(0, rest.find_first_of("\r\n"));
    if (is_named_so(path) &&
        (kOpens.find(rest[0]) != std::string_view::npos || nlohmann::json::accept(first_line)))
        return true;
    const FirstKey probe = probed(rest.substr(0, kLooksAt));
    // Of a long first value the beginning holds a part.
    return probe.found() || (probe.has_key() && rest.size() >= kLooksAt) || is_mostly_records(rest);
}

}  // namespace ferry::tools
