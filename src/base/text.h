// Text that users give: files of it, what errors show of it, and bytes that are none.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "ferry/units.h"

namespace ferry {

constexpr size_t kShown = 160;

// A user's text as an error shows it: bytes that are no printable UTF-8 as \xff. A text of more
// than `most` bytes is cut to its beginning, its end and how many there are.
std::string shown(std::string_view text, size_t most = kShown);
std::string in_quotes(std::string_view text, size_t most = kShown);  // the same between quotes
// The same of all of a name, so that it stays a part of its line.
std::string one_line(std::string_view name);
// And of whole text: its lines stay. What is printed or logged is this.
std::string printable(std::string_view text);
// JSON with U+007F to U+009F, which may stand in its strings, as \u007f.
std::string json_escaped(std::string_view json);

// The index of the first byte that is NUL or part of no UTF-8; npos: none.
size_t first_bad_byte(std::string_view text);
// The place of a byte: "line 3, column 10", both from 1.
std::string line_and_column(std::string_view text, size_t index);

// How a file of text is called, and what is done about one that cannot be read.
struct TextFile {
    std::string_view name{};  // "the configuration"
    std::string_view remedy{};
    int64_t most_bytes = 16 * kMiB;
};
// All of a regular file. Throws usage for anything else, whose end might never come, and for a
// larger one; io where the disk fails.
std::string read_text_file(const std::string& path, const TextFile& kind);

}  // namespace ferry
