#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>
#include <vector>

#include "base/text.h"
#include "base/words.h"
#include "ferry/error.h"
#include "ferry/units.h"

namespace ferry {
namespace {

// Bytes of one unit, 0 when the suffix is none.
double unit_bytes(std::string_view suffix) {
    static constexpr std::string_view kLetters = "kmgt";
    std::string lower(suffix);
    std::transform(lower.begin(), lower.end(), lower.begin(),
                   [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
    if (lower.empty() || lower == "b") return 1;
    const size_t power = kLetters.find(lower[0]);
    if (power == std::string_view::npos) return 0;
    const std::string_view rest = std::string_view(lower).substr(1);
    if (rest == "ib" || rest == "i") return std::pow(1024.0, static_cast<double>(power + 1));
    if (rest.empty() || rest == "b") return std::pow(1000.0, static_cast<double>(power + 1));
    return 0;
}

size_t edit_distance(std::string_view a, std::string_view b) {
    std::vector<size_t> row(b.size() + 1);
    for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
    for (size_t i = 1; i <= a.size(); ++i) {
        size_t diagonal = row[0]++;
        for (size_t j = 1; j <= b.size(); ++j) {
            const size_t substitution = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
            diagonal = row[j];
            row[j] = std::min({substitution, row[j] + 1, row[j - 1] + 1});
        }
    }
    return row[b.size()];
}

}  // namespace

int64_t parse_bytes(std::string_view text, std::string_view where) {
    double value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    std::string_view suffix(end, static_cast<size_t>(text.data() + text.size() - end));
    while (!suffix.empty() && suffix.front() == ' ') suffix.remove_prefix(1);
    const double unit = error == std::errc() ? unit_bytes(suffix) : 0;
    const double bytes = value * unit;
    if (unit == 0 || !(bytes >= 0) || bytes > 9e18) {
        throw Error(Trouble::usage, {.what = "not a size in bytes",
                                     .where = std::string(where),
                                     .measured = in_quotes(text),
                                     .remedy = "write a number and a unit: 512MiB, 16GiB, 2TB"});
    }
    return static_cast<int64_t>(std::llround(bytes));
}

std::string format_bytes(int64_t bytes) {
    static constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
    if (std::abs(bytes) < kKiB) return fmt::format("{} B", bytes);
    double value = static_cast<double>(bytes);
    size_t unit = 0;
    while (std::abs(value) >= 1024 && unit + 1 < std::size(kUnits)) value /= 1024, ++unit;
    return fmt::format("{:.2f} {}", value, kUnits[unit]);
}

std::string nearest_word(std::string_view word, std::span<const std::string> known,
                         bool however_far) {
    // Beyond that no word is near, and every letter costs.
    constexpr size_t kLongest = 64;
    word = word.substr(0, kLongest);
    std::string best;
    size_t best_distance = however_far ? SIZE_MAX : std::max<size_t>(2, word.size() / 2) + 1;
    for (const std::string& candidate : known) {
        const size_t distance = edit_distance(word, candidate);
        // Nothing in common is not near, however short both are.
        const bool shares = distance < std::max(word.size(), candidate.size());
        if (distance < best_distance && (shares || however_far))
            best_distance = distance, best = candidate;
    }
    return best;
}

}  // namespace ferry
