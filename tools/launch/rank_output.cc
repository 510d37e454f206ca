#include "rank_output.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <optional>

#include "base/text.h"
#include "tools/output/output.h"

namespace ferry::tools {
namespace {

constexpr std::string_view kError = "ferry: ", kLost = "ferry: lost ";

// "[1234,2]<stderr>:" at the beginning of a text: rank 2, stream 2. What of it is the tag.
struct Tag {
    int rank, stream;
    size_t length;
};

std::optional<int> take_number(std::string_view& text) {
    int value = 0;
    size_t digits = 0;
    for (; digits < text.size() && digits < 9 && std::isdigit(text[digits]) != 0; ++digits)
        value = 10 * value + (text[digits] - '0');
    text.remove_prefix(digits);
    return digits > 0 ? std::optional(value) : std::nullopt;
}
bool take(std::string_view& text, std::string_view word) {
    if (!text.starts_with(word)) return false;
    text.remove_prefix(word.size());
    return true;
}

std::optional<Tag> tag_of(std::string_view text) {
    const size_t all = text.size();
    if (!take(text, "[") || !take_number(text) || !take(text, ",")) return std::nullopt;
    const std::optional<int> rank = take_number(text);
    if (!rank || !take(text, "]<")) return std::nullopt;
    const int stream = take(text, "stdout>:") ? 1 : take(text, "stderr>:") ? 2 : 0;
    if (stream == 0) return std::nullopt;
    return Tag{*rank, stream, all - text.size()};
}

struct Found {
    size_t at;
    Tag tag;
};
std::optional<Found> find_tag(std::string_view text, size_t from) {
    for (size_t at = text.find('[', from); at != std::string_view::npos;
         at = text.find('[', at + 1))
        if (const auto tag = tag_of(text.substr(at))) return Found{at, *tag};
    return std::nullopt;
}

// A rank's error that only says how it learnt of another's.
bool of_another(const std::string& text) {
    return text.starts_with(kLost) || text.find("has given this rank (") < text.find('\n');
}

std::string failed(int rank, const std::string& text) {
    return fmt::format("rank {} failed: {}", rank, text.substr(kError.size()));
}

// "ferry: lost rank 1: its process has ended", turned round to be about that rank; so with "ranks 1
// and 2", and "a rank". Nothing: the text says no such thing.
std::optional<std::string> lost(const std::string& text) {
    const size_t colon = text.find(": ", kLost.size());
    if (!text.starts_with(kLost) || colon == std::string::npos) return std::nullopt;
    const std::string who = text.substr(kLost.size(), colon - kLost.size());
    return who + (who.starts_with("ranks ") ? " were lost" : " was lost") + text.substr(colon);
}

}  // namespace

void RankOutput::add(int stream, std::string_view bytes) {
    std::string& unread = unread_[static_cast<size_t>(stream - 1)];
    unread += bytes;
    size_t begin = 0;
    for (size_t end; (end = unread.find('\n', begin)) != std::string::npos; begin = end + 1)
        take_line(stream, unread.substr(begin, end - begin));
    unread.erase(0, begin);
    flush_output();
}

// A line of mpirun's: parts of lines of several ranks, each behind a tag; the last part ends one.
void RankOutput::take_line(int stream, const std::string& line) {
    std::optional<Found> found = find_tag(line, 0);
    if (!found || found->at != 0) return say(kMpirun, 2, line);
    while (true) {
        const Tag tag = found->tag;
        const size_t begin = found->at + tag.length;
        found = find_tag(line, begin);
        std::string& whole = unfinished_[{tag.rank, tag.stream}];
        whole += line.substr(begin, found ? found->at - begin : std::string::npos);
        if (found) continue;
        const std::string done = std::move(whole);
        whole.clear();
        return say(tag.rank, stream, done);
    }
}

void RankOutput::say(int rank, int stream, const std::string& line) {
    const auto say_to = [stream](const std::string& text) {
        if (stream == 1) return print_text(text);
        std::fwrite(text.data(), 1, text.size(), stderr);
    };
    // Not only ferry's own lines come this way.
    const std::string shown = one_line(line);
    if (rank == kMpirun) {
        if (!line.empty()) say_to(fmt::format("[mpirun] {}\n", shown));
        return;
    }
    say_to(fmt::format("[rank {}] {}\n", rank, shown));
    if (stream == 2) note_error(rank, line);
}

// "ferry: ..." and the indented lines behind it.
void RankOutput::note_error(int rank, const std::string& line) {
    const auto known = printing_.find(rank);
    if (line.starts_with(kError)) {
        printing_[rank] = failures_.size();
        failures_.push_back({rank, line});
    } else if (known != printing_.end() && line.starts_with("  ")) {
        failures_[known->second].text += "\n" + line;
    } else if (known != printing_.end()) {
        printing_.erase(known);
    }
}

void RankOutput::finish() {
    for (size_t i = 0; i < unread_.size(); ++i)
        if (!unread_[i].empty()) take_line(static_cast<int>(i) + 1, unread_[i]);
    unread_ = {};
    for (const auto& [from, text] : unfinished_)
        if (!text.empty()) say(from.first, from.second, text);
    unfinished_.clear();
    flush_output();
}

std::string RankOutput::reason() const {
    if (failures_.empty()) return "";
    const auto own = std::ranges::find_if(
        failures_, [](const Failure& failure) { return !of_another(failure.text); });
    if (own != failures_.end()) return failed(own->rank, own->text);
    const Failure& first = failures_.front();
    return lost(first.text).value_or(failed(first.rank, first.text));
}

}  // namespace ferry::tools
