#include <gtest/gtest.h>

#include <vector>

#include "base/words.h"
#include "ferry/error.h"
#include "ferry/units.h"

namespace ferry {
namespace {

TEST(Bytes, AreReadWithTheirUnits) {
    EXPECT_EQ(parse_bytes("4096", "x"), 4096);
    EXPECT_EQ(parse_bytes("64MiB", "x"), 64 * kMiB);
    EXPECT_EQ(parse_bytes("1.5 GiB", "x"), 3 * kGiB / 2);
    EXPECT_EQ(parse_bytes("2GB", "x"), 2'000'000'000);
    EXPECT_EQ(parse_bytes("3kb", "x"), 3000);
    for (const char* bad : {"", "MiB", "12 parsecs", "-1GiB", "1e40", "nan", "1GiBs"}) {
        EXPECT_THROW(parse_bytes(bad, "budgets.host"), Error) << bad;
    }
}

TEST(Bytes, ErrorNamesThePlaceAndTheText) {
    try {
        parse_bytes("12 parsecs", "budgets.host");
        FAIL();
    } catch (const Error& error) {
        EXPECT_EQ(error.exit_code(), 2);
        EXPECT_NE(std::string(error.what()).find("budgets.host"), std::string::npos);
        EXPECT_NE(std::string(error.what()).find("12 parsecs"), std::string::npos);
    }
}

TEST(Bytes, ArePrintedShort) {
    EXPECT_EQ(format_bytes(17), "17 B");
    EXPECT_EQ(format_bytes(3 * kGiB / 2), "1.50 GiB");
    EXPECT_EQ(format_bytes(-2 * kMiB), "-2.00 MiB");
}

TEST(NearestWord, FindsTypingErrorsOnly) {
    const std::vector<std::string> known{"budgets", "batch", "optimizer"};
    EXPECT_EQ(nearest_word("budget", known), "budgets");
    EXPECT_EQ(nearest_word("optimiser", known), "optimizer");
    EXPECT_EQ(nearest_word("zzzzzzzz", known), "");
    EXPECT_EQ(nearest_word("bazzzzzz", known, true), "batch");
}

}  // namespace
}  // namespace ferry
