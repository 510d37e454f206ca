// For json::parse() of nlohmann as its callback: it keeps the last of two equal keys of an object,
// and a writer means one of them.
#pragma once

#include <set>
#include <string>
#include <utility>
#include <vector>

#include "ferry/error.h"

namespace ferry {

// Calls `twice` with a key that an object holds already; it throws.
template <class Twice>
class UniqueKeys {
public:
    explicit UniqueKeys(Twice twice) : twice_(std::move(twice)) {}

    template <class Event, class Json>
    bool operator()(int, Event event, const Json& parsed) {
        if (event == Event::object_start) open_.emplace_back();
        if (event == Event::object_end) open_.pop_back();
        if (event != Event::key) return true;
        const auto [key, is_new] = open_.back().insert(parsed.template get<std::string>());
        if (!is_new) twice_(*key);
        return true;
    }

private:
    Twice twice_;
    std::vector<std::set<std::string>> open_{};  // the objects that parsing is in
};

// The refusal of a user's key; `where`: the text that holds it.
inline auto refuse_keys_given_twice(const std::string& where) {
    return UniqueKeys([&where](const std::string& key) {
        throw Error(Trouble::usage, {.what = "the key \"" + key + "\" is given twice",
                                     .where = where,
                                     .remedy = "remove one of them"});
    });
}

}  // namespace ferry
