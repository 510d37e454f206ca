#include "looks_like_json.h"

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string_view>

namespace ferry::tools {
namespace {

constexpr std::streamsize kLooksAt = 64 * 1024;

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

std::string beginning_of(const std::string& path) {
    std::string text(static_cast<size_t>(kLooksAt), '\0');
    std::ifstream file(path, std::ios::binary);
    file.read(text.data(), kLooksAt);
    text.resize(static_cast<size_t>(file.gcount()));
    return text;
}

bool is_named_so(const std::string& path) {
    std::string ending = std::filesystem::path(path).extension();
    std::ranges::transform(ending, ending.begin(),
                           [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
    return ending == ".json" || ending == ".jsonl" || ending == ".ndjson";
}

}  // namespace

bool looks_like_json(const std::string& path) {
    std::error_code reason;
    // A pipe gives its bytes once.
    if (!std::filesystem::is_regular_file(path, reason)) return false;
    const std::string text = beginning_of(path);
    const size_t first = text.find_first_not_of(" \t\r\n");
    if (first == std::string::npos) return false;
    constexpr std::string_view kOpens = "{[\"";
    if (is_named_so(path) && kOpens.find(text[first]) != std::string_view::npos) return true;
    FirstKey probe;
    nlohmann::json::sax_parse(text, &probe);
    // Of a long first value the beginning holds a part.
    return probe.found() || (probe.has_key() && std::ssize(text) == kLooksAt);
}

}  // namespace ferry::tools
