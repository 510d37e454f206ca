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

}  // namespace

bool looks_like_json(const std::string& path, std::string_view beginning) {
    std::string text = in_bytes(beginning);
    const size_t first = text.find_first_not_of(" \t\r\n");
    if (first == std::string::npos) return false;
    text = text.substr(first, kLooksAt);
    constexpr std::string_view kOpens = "{[\"";
    if (is_named_so(path) && kOpens.find(text[0]) != std::string_view::npos) return true;
    FirstKey probe;
    nlohmann::json::sax_parse(text, &probe);
    // Of a long first value the beginning holds a part.
    return probe.found() || (probe.has_key() && text.size() == kLooksAt);
}

}  // namespace ferry::tools
