#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>

#include "ferry/error.h"
#include "trace/trace.h"

namespace ferry::trace {
namespace {

struct TemporaryFile {
    std::string path = "/tmp/ferry-trace-" + std::to_string(getpid());
    ~TemporaryFile() { ::unlink(path.c_str()); }
};

TEST(Recording, IsWrittenAsAChromeTrace) {
    Recording recording(10);
    const RowId planned = recording.add_row("planned", "compute");
    const RowId measured = recording.add_row("measured", "path \"a\"\n");
    recording.add({.row = planned, .name = "forward", .begin_ns = 5'000, .end_ns = 7'500});
    recording.add({.row = measured,
                   .name = "read",
                   .begin_ns = 3'000,
                   .end_ns = 4'000,
                   .bytes = 4096,
                   .step = 0,
                   .layer = 2,
                   .item = 1});
    const TemporaryFile file;
    recording.write(file.path);
    const auto events = nlohmann::json::parse(std::ifstream(file.path))["traceEvents"];
    std::vector<nlohmann::json> slices;
    std::map<std::pair<int, int>, std::string> rows;
    std::map<int, std::string> groups;
    int clocks = 0;
    for (const auto& event : events) {
        if (event["ph"] == "X") slices.push_back(event);
        if (event["name"] == "thread_name")
            rows[{event["pid"], event["tid"]}] = event["args"]["name"];
        if (event["name"] == "clock") {
            EXPECT_EQ(event["args"]["origin_ns"], 3'000);
            ++clocks;
        }
        if (event["name"] == "process_name") groups[event["pid"]] = event["args"]["name"];
    }
    EXPECT_EQ(clocks, 1);
    ASSERT_EQ(slices.size(), 2U);
    EXPECT_EQ(slices[0]["ts"], 2.0);  // microseconds after the first slice
    EXPECT_EQ(slices[0]["dur"], 2.5);
    EXPECT_TRUE(slices[0]["args"].empty());
    EXPECT_EQ(slices[1]["args"],
              (nlohmann::json{{"step", 0}, {"layer", 2}, {"item", 1}, {"bytes", 4096}}));
    EXPECT_EQ(groups.at(slices[0]["pid"]), "planned");
    EXPECT_EQ(groups.at(slices[1]["pid"]), "measured");
    EXPECT_EQ(rows.at({slices[1]["pid"], slices[1]["tid"]}), "path \"a\"\n");
}

TEST(Recording, HoldsNothingOfAPause) {
    Recording recording(2);
    const RowId row = recording.add_row("measured", "compute");
    recording.add({.row = row, .name = "before"});
    {
        const Recording::Pause pause(&recording);
        for (int i = 0; i < 5; ++i) recording.add({.row = row, .name = "measuring"});
    }
    recording.add({.row = row, .name = "after"});
    ASSERT_EQ(recording.size(), 2U);
    EXPECT_EQ(recording[1].name, "after");
    EXPECT_EQ(recording.dropped(), 0U);
    const Recording::Pause of_nothing(nullptr);
}

TEST(Recording, DropsAndCountsWhatDoesNotFit) {
    Recording recording(100);
    const RowId row = recording.add_row("measured", "compute");
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t) {
        threads.emplace_back([&recording, row, t] {
            for (int i = 0; i < 50; ++i)
                recording.add(
                    {.row = row, .name = "work", .begin_ns = i, .end_ns = i + 1, .item = t});
        });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(recording.size(), 100U);
    EXPECT_EQ(recording.dropped(), 100U);
    for (size_t i = 0; i < recording.size(); ++i) EXPECT_EQ(recording[i].name, "work");
}

TEST(Recording, SaysWhereItCannotBeWritten) {
    const Recording recording(1);
    try {
        recording.write("/no/such/directory/trace.json");
        FAIL();
    } catch (const Error& error) {
        EXPECT_EQ(error.trouble(), Trouble::io);
        EXPECT_THAT(error.what(), testing::HasSubstr("/no/such/directory/trace.json"));
    }
}

}  // namespace
}  // namespace ferry::trace
