// Users' text in errors, and the files that are read as text.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "base/text.h"
#include "base/words.h"
#include "ferry/error.h"
#include "ferry/units.h"

namespace ferry {
namespace {

using testing::EndsWith;
using testing::HasSubstr;
using testing::StartsWith;

constexpr size_t kNone = std::string_view::npos;

TEST(Text, ShowsWhatIsPrintableAndNamesOtherBytes) {
    EXPECT_EQ(shown("a path/with spaces"), "a path/with spaces");
    EXPECT_EQ(shown("Gr\u00fc\u00dfe \U0001f600"), "Gr\u00fc\u00dfe \U0001f600");
    EXPECT_EQ(shown(std::string_view("a\0b\n\x1b\xff\x7f", 7)), "a\\x00b\\n\\x1b\\xff\\x7f");
    EXPECT_EQ(shown("\u009b2J \u00a0"), "\\xc2\\x9b2J \u00a0");  // CSI, as one character
    EXPECT_EQ(shown("\xc3"), "\\xc3");                           // of a character cut off
    EXPECT_EQ(in_quotes("two"), "\"two\"");
}

TEST(Text, WhatIsPrintedKeepsItsLinesAndSteersNothing) {
    EXPECT_EQ(printable("one\ntwo\x1b[2J\n"), "one\ntwo\\x1b[2J\n");
    EXPECT_EQ(one_line(std::string(1000, 'x') + "\n\x1b"), std::string(1000, 'x') + "\\n\\x1b");
    EXPECT_EQ(printable(std::string(1000, 'x')), std::string(1000, 'x'));
    EXPECT_EQ(json_escaped("{\"a\":\"\x7f\u009b2J\u00fc\"}\n"),
              "{\"a\":\"\\u007f\\u009b2J\u00fc\"}\n");
}

TEST(Text, CutsWhatIsLongBetweenCharacters) {
    std::string text = "begin";
    for (int i = 0; i < 100'000; ++i) text += "\u00fc";
    const std::string cut = shown(text + "end");
    EXPECT_LE(cut.size(), kShown + 40);
    EXPECT_THAT(cut, StartsWith("begin\u00fc"));
    EXPECT_THAT(cut, EndsWith("end (200008 bytes)"));
    EXPECT_EQ(cut.find("\\x"), kNone);
    EXPECT_EQ(shown(std::string(kShown, 'x')), std::string(kShown, 'x'));
}

// Whoever forgets to cut what they quote.
TEST(Text, NoErrorIsLong) {
    const std::string much(200 * kMiB, 'x');
    const Error error(Trouble::usage, {.what = much, .where = much});
    EXPECT_LE(std::string(error.what()).size(), size_t{20'000});
}

TEST(Text, ABadByteIsFound) {
    EXPECT_EQ(first_bad_byte(""), kNone);
    EXPECT_EQ(first_bad_byte("plain\n\u20ac\U0001f600"), kNone);
    EXPECT_EQ(first_bad_byte(std::string_view("ab\0c", 4)), 2u);
    for (const char* bad : {"ab\xff", "ab\xc0\xaf", "ab\xe0\x80\x80", "ab\xed\xa0\x80",
                            "ab\xf4\x90\x80\x80", "ab\xc3", "ab\xe2\x82", "ab\x80"})
        EXPECT_EQ(first_bad_byte(bad), 2u) << shown(bad);
}

TEST(Text, PlacesAreLinesAndColumns) {
    EXPECT_EQ(line_and_column("", 0), "line 1, column 1");
    EXPECT_EQ(line_and_column("ab\ncd", 1), "line 1, column 2");
    EXPECT_EQ(line_and_column("ab\ncd", 3), "line 2, column 1");
    EXPECT_EQ(line_and_column("ab\ncd", 99), "line 2, column 3");
}

TEST(Text, WordsAreLookedUpInTime) {
    const std::vector<std::string> known(200, "optimizer.weight_decay");
    EXPECT_EQ(nearest_word(std::string(size_t{64} << 20, 'x'), known), "");
}

std::string refusal(const std::string& path, int64_t most = kMiB) {
    try {
        read_text_file(path, {.name = "the list", .remedy = "write one", .most_bytes = most});
    } catch (const Error& error) {
        EXPECT_EQ(error.trouble(), Trouble::usage);
        return error.what();
    }
    return "read";
}

TEST(Text, OnlyRegularFilesOfABoundedSizeAreRead) {
    const std::string path = testing::TempDir() + "ferry_text_" + std::to_string(::getpid());
    std::ofstream(path) << std::string(100, 'x');
    EXPECT_EQ(read_text_file(path, {.most_bytes = 100}), std::string(100, 'x'));
    EXPECT_THAT(refusal(path, 99), HasSubstr("100 bytes"));
    EXPECT_THAT(refusal(path + ".absent"), HasSubstr("No such file"));
    EXPECT_THAT(refusal(testing::TempDir()), HasSubstr("directory"));
    EXPECT_THAT(refusal("/dev/zero"), HasSubstr("no regular file"));
    const std::string pipe = path + ".pipe";
    ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
    EXPECT_THAT(refusal(pipe), HasSubstr("no regular file"));  // and nobody waits for a writer
    EXPECT_THAT(refusal(pipe), HasSubstr("cannot read the list"));
    std::filesystem::remove(pipe);
    std::filesystem::remove(path);
    // Without a size, and with contents.
    EXPECT_THAT(read_text_file("/proc/self/status", {.most_bytes = kMiB}), HasSubstr("VmRSS"));
}

}  // namespace
}  // namespace ferry
