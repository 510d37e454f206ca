// Reads numbers, flags and lists of a JSON object, within the ranges that make sense.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "base/json_reader.h"
#include "ferry/error.h"

namespace ferry::model {

// The range that fp32 holds and that makes sense. An epsilon of 1e300 is an Inf there, which trains
// nothing; one of 1e-300 is a 0.
struct Between {
    double low = 1e-30, high = 1e30;
};
constexpr Between kAnyScale{};

// The values of a JSON object by key. What is not as asked is refused by name: Trouble::usage.
class JsonKeys {
public:
    JsonKeys(const nlohmann::json& config, const std::string& where)
        : config_(config), where_(where) {}

    [[noreturn]] void refuse(std::string_view key, std::string what, const nlohmann::json& value,
                             std::string limit, std::string remedy = {}) const {
        throw Error(Trouble::usage, {.what = std::move(what),
                                     .where = where_ + ": " + std::string(key),
                                     .measured = shown_json(value),
                                     .limit = std::move(limit),
                                     .remedy = std::move(remedy)});
    }

    // Null where the key is absent or null.
    const nlohmann::json& at(std::string_view key) const {
        static const nlohmann::json kNone;
        const auto found = config_.find(key);
        return found == config_.end() ? kNone : *found;
    }
    bool has(std::string_view key) const { return config_.contains(key); }
    const std::string& where() const { return where_; }
    int64_t integer(std::string_view key, int64_t otherwise, int64_t most = 1 << 30) const {
        const nlohmann::json& value = at(key);
        if (value.is_null() && otherwise > 0) return otherwise;
        if (!value.is_number_integer() || value.get<double>() < 1 ||
            value.get<double>() > static_cast<double>(most))
            refuse(key, "a size is missing or out of range", value,
                   "an integer of 1 to " + std::to_string(most));
        return value.get<int64_t>();
    }
    double number(std::string_view key, double otherwise, const Between& range = kAnyScale) const {
        const nlohmann::json& value = at(key);
        if (value.is_null() && otherwise > 0) return otherwise;
        if (!is_in(value, range))
            refuse(key, "a number is missing or out of range", value, "a number" + text_of(range));
        return value.get<double>();
    }
    double number_or_zero(std::string_view key, double otherwise, const Between& range) const {
        return at(key) == 0 ? 0 : number(key, otherwise, range);
    }
    std::vector<double> numbers(std::string_view key, int64_t count, const Between& range) const {
        const nlohmann::json& list = at(key);
        std::vector<double> found;
        for (const nlohmann::json& value : list.is_array() ? list : nlohmann::json::array()) {
            if (is_in(value, range)) found.push_back(value.get<double>());
        }
        if (!list.is_array() || std::ssize(list) != count || std::ssize(found) != count)
            refuse(key, "a list is missing, too short or too long, or holds something else", list,
                   std::to_string(count) + " numbers" + text_of(range));
        return found;
    }
    bool flag(std::string_view key, bool otherwise) const {
        const nlohmann::json& value = at(key);
        if (value.is_null()) return otherwise;
        if (!value.is_boolean()) refuse(key, "wrong type of value", value, "true or false");
        return value.get<bool>();
    }

private:
    static bool is_in(const nlohmann::json& value, const Between& range) {
        const double number = value.is_number() ? value.get<double>() : 0;
        return number >= range.low && number <= range.high;
    }
    static std::string text_of(const Between& range) {
        std::ostringstream text;
        text << " of " << range.low << " to " << range.high;
        return text.str();
    }

    const nlohmann::json& config_;
    const std::string& where_;
};

}  // namespace ferry::model
