// The configuration's keys as data: reading, checking and documenting all walk this one table.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "ferry/config.h"

namespace ferry::config {

struct Pair {
    double* first;
    double* second;
};
struct Triple {
    double* first;
    double* second;
    double* third;
};
// A key whose values are words: they and the values of its field, in one table. Words are called by
// their index there.
struct Choice {
    size_t count;
    std::string_view (*word)(size_t index);
    size_t (*read)(const Config& config);
    void (*write)(Config& config, size_t index);
};
// Where a key's value lives in a Config. The alternative is the key's C++ type; `Key::form` says
// how it is written.
using Slot =
    std::variant<Choice, int64_t* (*)(Config&), int* (*)(Config&), uint32_t* (*)(Config&),
                 double* (*)(Config&), bool* (*)(Config&), std::string* (*)(Config&),
                 std::optional<int>* (*)(Config&), std::optional<int64_t>* (*)(Config&),
                 std::optional<double>* (*)(Config&), std::vector<std::string>* (*)(Config&),
                 std::vector<int>* (*)(Config&), std::vector<NvmePath>* (*)(Config&),
                 Period* (*)(Config&), Pair (*)(Config&), Triple (*)(Config&)>;

enum class Form : uint8_t {
    integer,
    number,
    boolean,
    text,
    choice,
    bytes,
    pair,
    triple,
    integers,
    texts,
    volumes,
    period
};

struct Range {
    double low = 0, high = 0;
    bool above_low = false;   // low itself is outside
    bool below_high = false;  // high itself is outside
    // What to do about a value outside; none: take the nearest one inside.
    std::string_view remedy{};
};

struct Key {
    std::string_view path;
    Slot slot;
    Form form;
    std::string_view doc;
    Range range{};  // integer, number, pair, triple, integers, bytes
    // May be "auto". An optional field is empty then; another one is as it was made, and gets its
    // value when the configuration is checked.
    bool automatic = false;
    bool required = false;
};

struct Section {
    std::string_view name;  // empty: the top level
    std::string_view doc;
};

std::span<const Key> schema();
std::span<const Section> sections();
const Key* find_key(std::string_view path);

// "integer", "size", ...: how the form is called in errors and documentation.
std::string_view name_of(Form form);
std::string describe(const Range& range, Form form);
std::string describe(const Period& period);  // "100", "600s"
// 0.1 -> "0.1", 1e-08 -> "1e-08", 3.0 -> "3".
std::string format_number(double value);

}  // namespace ferry::config
