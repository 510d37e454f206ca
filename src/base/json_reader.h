// The one way in which ferry reads JSON that others wrote. What nlohmann's parser takes may be
// nested so deep that copying it overflows the stack, or hold so many values that they take
// gigabytes; of two equal keys it keeps one without a word, and it ends at a NUL byte.
#pragma once

#include <iterator>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/text.h"
#include "ferry/error.h"

namespace ferry {

constexpr size_t kJsonDepth = 64;

// Where a text comes from, and how a refusal of it reads.
struct JsonSource {
    std::string where{};
    std::string what = "not valid JSON";
    std::string remedy = "correct it there";
    Trouble trouble = Trouble::usage;
    bool comments = false;
    bool binary = false;  // places are bytes, not lines: people do not edit it
    size_t most_values = 1'000'000;
};

// A value as an error shows it.
template <class Json>
std::string shown_json(const Json& value, size_t most = kShown) {
    return shown(value.dump(-1, ' ', false, Json::error_handler_t::replace), most);
}

namespace detail {

struct JsonFault {
    std::string what{}, measured{}, limit{}, remedy{};
    bool syntax = false;  // the text is no JSON at all
    size_t index = 0;     // where the fault shows: a byte's index
};

// Over a text, noting how far it was read.
class CountedText {
public:
    // NOLINTBEGIN(readability-identifier-naming): names of the standard library.
    using iterator_category = std::input_iterator_tag;
    using value_type = char;
    using difference_type = std::ptrdiff_t;
    using pointer = const char*;
    using reference = const char&;
    // NOLINTEND(readability-identifier-naming)

    CountedText(const char* at, const char** seen) : at_(at), seen_(seen) {}
    reference operator*() const { return *at_; }
    CountedText& operator++() {
        *seen_ = ++at_;
        return *this;
    }
    bool operator==(const CountedText& other) const { return at_ == other.at_; }

private:
    const char* at_;
    const char** seen_;
};

// Takes nlohmann's events and builds the value, within bounds.
template <class Json>
class JsonBuilder {
public:
    explicit JsonBuilder(const JsonSource& source) : source_(source) {}

    bool null() { return add(nullptr) != nullptr; }
    bool boolean(bool value) { return add(value) != nullptr; }
    bool number_integer(int64_t value) { return add(value) != nullptr; }
    bool number_unsigned(uint64_t value) { return add(value) != nullptr; }
    bool number_float(double value, const std::string& text) {
        const std::string_view digits = std::string_view(text).substr(0, text.find_first_of("eE"));
        if (value != 0 || digits.find_first_of("123456789") == std::string_view::npos)
            return add(value) != nullptr;
        fault_ = {.what = "a number so small that a double makes 0 of it",
                  .measured = shown(text),
                  .limit = "0, or 5e-324 or more",
                  .remedy = "write 0 if that is meant"};
        return false;
    }
    bool string(std::string& value) { return is_text(value) && add(std::move(value)) != nullptr; }
    bool binary(typename Json::binary_t&) { return false; }
    bool start_object(size_t) { return open(Json::object()); }
    bool start_array(size_t) { return open(Json::array()); }
    bool end_object() { return close(); }
    bool end_array() { return close(); }

    bool key(std::string& name) {
        if (!is_text(name)) return false;
        auto& object = open_.back().value->template get_ref<typename Json::object_t&>();
        bool is_new = true;
        if constexpr (std::is_same_v<Json, nlohmann::json>) {
            const auto [at, inserted] = object.emplace(name, nullptr);
            is_new = inserted;
            slot_ = &at->second;
        } else {  // whose own look-up goes through all of them
            is_new = open_.back().names.insert(name).second;
            object.push_back({name, nullptr});
            slot_ = &object.back().second;
        }
        if (is_new) return true;
        fault_ = {.what = "the key " + in_quotes(name) + " is given twice",
                  .remedy = "remove one of them"};
        return false;
    }

    bool parse_error(size_t position, const std::string&,
                     const nlohmann::detail::exception& error) {
        constexpr int kOverflow = 406;
        // "[json.exception.parse_error.101] parse error at ...: syntax error ...": the last part.
        const std::string all = error.what();
        const size_t start = all.find("syntax error");
        const size_t after = all.find("] ");
        const size_t from = start != std::string::npos   ? start
                            : after != std::string::npos ? after + 2
                                                         : 0;
        fault_ = {.measured = shown(std::string_view(all).substr(from), 2 * kShown),
                  .limit = error.id == kOverflow ? "a number that a double can hold" : "",
                  .syntax = error.id != kOverflow,
                  .index = position > 0 ? position - 1 : 0};
        return false;
    }

    Json take() { return std::move(root_); }
    const JsonFault& fault() const { return fault_; }

private:
    struct Open {
        Json* value = nullptr;
        std::set<std::string, std::less<>> names{};
    };

    bool is_text(const std::string& text) {
        if (text.find('\0') == std::string::npos) return true;
        fault_ = {.what = "a text holds a NUL character, where the system would cut it",
                  .measured = in_quotes(text)};
        return false;
    }

    // Null: there are too many.
    Json* add(Json value) {
        if (++values_ > source_.most_values) {
            fault_ = {.what = "JSON of too many values",
                      .limit = std::to_string(source_.most_values) + " values"};
            return nullptr;
        }
        Json* place = &root_;
        if (!open_.empty() && open_.back().value->is_array()) {
            open_.back().value->push_back(nullptr);
            place = &open_.back().value->back();
        } else if (!open_.empty()) {
            place = slot_;
        }
        *place = std::move(value);
        return place;
    }

    bool open(Json container) {
        if (open_.size() == kJsonDepth) {
            fault_ = {.what = "JSON nested too deep",
                      .limit = std::to_string(kJsonDepth) + " levels"};
            return false;
        }
        Json* const place = add(std::move(container));
        if (place != nullptr) open_.push_back({.value = place});
        return place != nullptr;
    }

    bool close() {
        open_.pop_back();
        return true;
    }

    const JsonSource& source_;
    Json root_{};
    Json* slot_ = nullptr;  // where the value of the key just read goes
    std::vector<Open> open_{};
    size_t values_ = 0;
    JsonFault fault_{};
};

[[noreturn]] inline void refuse_json(std::string_view text, const JsonSource& source,
                                     JsonFault fault) {
    const std::string place = source.binary ? "byte " + std::to_string(fault.index + 1)
                                            : line_and_column(text, fault.index);
    const bool theirs = !fault.remedy.empty() && source.trouble == Trouble::usage;
    throw Error(source.trouble, {.what = fault.what.empty() ? source.what : fault.what,
                                 .where = source.where + ": " + place,
                                 .measured = std::move(fault.measured),
                                 .limit = std::move(fault.limit),
                                 .remedy = theirs ? fault.remedy : source.remedy});
}

template <class Json>
std::optional<Json> build_json(std::string_view text, const JsonSource& source, JsonFault& fault) {
    JsonBuilder<Json> builder(source);
    const char* seen = text.data();
    const CountedText begin(text.data(), &seen), end(text.data() + text.size(), &seen);
    constexpr bool kWhole = true;
    if (Json::sax_parse(begin, end, &builder, nlohmann::detail::input_format_t::json, kWhole,
                        source.comments))
        return builder.take();
    fault = builder.fault();
    if (fault.index == 0 && seen > text.data())
        fault.index = static_cast<size_t>(seen - text.data()) - 1;
    return std::nullopt;
}

}  // namespace detail

// The value; nothing where the text is no JSON, which is for the caller to judge. Throws what
// parse_json() does for everything else.
template <class Json = nlohmann::json>
std::optional<Json> parse_json_if_it_is(std::string_view text, const JsonSource& source) {
    detail::JsonFault fault;
    std::optional<Json> value = detail::build_json<Json>(text, source, fault);
    if (!value && !fault.syntax) detail::refuse_json(text, source, std::move(fault));
    return value;
}

// Throws source.trouble, naming the place, for what is no JSON or no UTF-8, for a key that is given
// twice, a NUL character, and what is nested deeper, or holds more values, than any use has.
template <class Json = nlohmann::json>
Json parse_json(std::string_view text, const JsonSource& source) {
    if (text.empty()) detail::refuse_json(text, source, {.measured = "it is empty"});
    const size_t bad = first_bad_byte(text);
    if (bad != std::string_view::npos) {
        const std::string byte = shown(text.substr(bad, 1));
        detail::refuse_json(
            text, source,
            {.measured = text[bad] == '\0' ? "a NUL byte" : "no UTF-8: the byte " + byte,
             .limit = "text in UTF-8",
             .index = bad});
    }
    detail::JsonFault fault;
    std::optional<Json> value = detail::build_json<Json>(text, source, fault);
    if (!value) detail::refuse_json(text, source, std::move(fault));
    return *std::move(value);
}

}  // namespace ferry
