// The one reader of JSON: what it refuses, and where it says that lies.
#include "base/json_reader.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "ferry/error.h"

namespace ferry {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;
using testing::HasSubstr;

std::string refusal(std::string_view text, JsonSource source = {}) {
    source.where = "file";
    try {
        parse_json(text, source);
    } catch (const Error& error) {
        EXPECT_EQ(error.trouble(), source.trouble);
        EXPECT_LE(std::string(error.what()).size(), size_t{1500});
        return error.what();
    }
    return "accepted";
}

std::string nested(size_t levels) { return std::string(levels, '[') + std::string(levels, ']'); }

TEST(JsonReader, GivesWhatNlohmannGives) {
    const std::string text = R"({"a": [1, -2, 3.5, true, null, "x", {}, []], "b": {"c": {"d": 1}},
                                 "e": 18446744073709551615, "f": "\u00fc\ud83d\ude00"})";
    EXPECT_EQ(parse_json(text, {}), json::parse(text));
    EXPECT_EQ(parse_json<ordered_json>(text, {}), ordered_json::parse(text));
    EXPECT_EQ(parse_json<ordered_json>(R"({"z": 1, "a": 2})", {}).dump(), R"({"z":1,"a":2})");
    EXPECT_EQ(parse_json(" 7 ", {}), json(7));
    EXPECT_EQ(parse_json(nested(kJsonDepth), {}), json::parse(nested(kJsonDepth)));
    EXPECT_EQ(parse_json("[1] // one", {.comments = true}), json::parse("[1]"));
    EXPECT_EQ(parse_json("\xef\xbb\xbf{}", {}), json::object());
}

TEST(JsonReader, BoundsDepthAndNumberOfValues) {
    EXPECT_THAT(refusal(nested(kJsonDepth + 1)), HasSubstr("file: line 1, column 65"));
    for (const size_t levels : {size_t{100}, size_t{10'000'000}})
        EXPECT_THAT(refusal(std::string(levels, '[')), HasSubstr("nested too deep"));
    std::string objects;
    for (int i = 0; i < 100'000; ++i) objects += "{\"a\":";
    EXPECT_THAT(refusal(objects), HasSubstr("nested too deep"));
    EXPECT_THAT(refusal("[1,2,3]", {.most_values = 3}), HasSubstr("too many values"));
    EXPECT_EQ(refusal("[1,2,3]", {.most_values = 4}), "accepted");
}

TEST(JsonReader, NamesTheKeyThatIsGivenTwiceAndItsPlace) {
    const std::string text = "{\"a\": 1,\n \"b\": {\"c\": 1, \"c\": 2}}";
    for (const std::string& said : {std::string("\"c\" is given twice"),
                                    std::string("line 2, column 18"), std::string("remove one")})
        EXPECT_THAT(refusal(text), HasSubstr(said));
    EXPECT_THROW(parse_json<ordered_json>(text, {}), Error);
    EXPECT_EQ(refusal(R"([{"a": 1}, {"a": 2}, {"b": {"a": 1}, "a": 2}])"), "accepted");
    EXPECT_THAT(refusal(R"({"a": 1, "\u0061": 2})"), HasSubstr("twice"));
}

TEST(JsonReader, NamesBytesThatAreNoText) {
    EXPECT_THAT(refusal("{\"a\":\n \"\xff\"}"), HasSubstr("line 2, column 3"));
    EXPECT_THAT(refusal("{\"a\":\n \"\xff\"}"), HasSubstr("\\xff"));
    const std::string nul("{\"a\": 1}\0{\"b\": 2}", 17);
    EXPECT_THAT(refusal(nul), HasSubstr("NUL byte"));
    EXPECT_THAT(refusal(nul), HasSubstr("column 9"));
    EXPECT_THAT(refusal(nul, {.binary = true}), HasSubstr("file: byte 9"));
    EXPECT_THAT(refusal(R"({"path": "/tmp/a\u0000b"})"), HasSubstr("NUL character"));
    EXPECT_THAT(refusal(R"({"pa\u0000th": 1})"), HasSubstr("NUL character"));
    EXPECT_THAT(refusal(R"(["\ud800"])"), HasSubstr("file: line 1, column"));
}

TEST(JsonReader, CutsWhatItQuotes) {
    const std::string much(10'000'000, 'x');
    EXPECT_THAT(refusal("{\"" + much + "\": 1, \"" + much + "\": 2}"), HasSubstr("given twice"));
    EXPECT_THAT(refusal("{\"" + much), HasSubstr("not valid JSON"));
    EXPECT_THAT(refusal("{\"a\": 1" + much), HasSubstr("line 1, column 8"));
    EXPECT_LE(shown_json(json(much)).size(), size_t{300});
    EXPECT_EQ(shown_json(json("\xff")), "\"\ufffd\"");
}

TEST(JsonReader, NamesANumberThatNoDoubleHolds) {
    const std::string said = refusal("{\"a\": 1e999}");
    for (const char* part : {"not valid JSON", "1e999", "double", "line 1, column"})
        EXPECT_THAT(said, HasSubstr(part));
    EXPECT_EQ(said.find("json.exception"), std::string::npos);
}

TEST(JsonReader, NamesANumberOfWhichADoubleMakesZero) {
    const std::string said = refusal("{\"a\": -1.0e-400}");
    for (const char* part : {"so small", "-1.0e-400", "5e-324", "write 0", "line 1, column"})
        EXPECT_THAT(said, HasSubstr(part));
    EXPECT_THROW(parse_json_if_it_is("1e-400", {}), Error);
    for (const char* text : {"0.0", "-0.0", "0e5", "0.000e-7"})
        EXPECT_EQ(parse_json(text, {}), json(0.0)) << text;
    EXPECT_EQ(parse_json("5e-324", {}), json(5e-324));
}

TEST(JsonReader, LeavesWhatIsNoJsonToTheCaller) {
    EXPECT_FALSE(parse_json_if_it_is("24MiB", {}).has_value());
    EXPECT_EQ(parse_json_if_it_is("[1, 2]", {}), json::parse("[1, 2]"));
    EXPECT_THROW(parse_json_if_it_is(R"({"a": 1, "a": 2})", {}), Error);
    EXPECT_THROW(parse_json_if_it_is(std::string(100, '['), {}), Error);
}

TEST(JsonReader, ManyKeysTakeLinearTime) {
    std::string text = "{\"0\":0";
    for (int i = 1; i < 200'000; ++i) text += ",\"" + std::to_string(i) + "\":{}";
    text += '}';
    EXPECT_EQ(parse_json(text, {}).size(), size_t{200'000});
    EXPECT_EQ(parse_json<ordered_json>(text, {}).size(), size_t{200'000});
}

}  // namespace
}  // namespace ferry
