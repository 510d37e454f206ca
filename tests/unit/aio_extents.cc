#include "extents.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <set>

namespace ferry::aio {
namespace {

std::vector<int64_t> slots_per_path(const Extents& extents, size_t paths) {
    std::vector<int64_t> counts(paths);
    for (SlotId slot = 0; slot < extents.slots(); ++slot) ++counts[extents.place(slot).path];
    return counts;
}

TEST(Extents, DividesBySpeed) {
    const SlotClass classes[] = {{"a", 4096, 100}};
    const PathShape paths[] = {{.capacity_bytes = kGiB, .speed = 3},
                               {.capacity_bytes = kGiB, .speed = 1}};
    EXPECT_EQ(slots_per_path(Extents(classes, paths, 4096), 2), (std::vector<int64_t>{75, 25}));
}

TEST(Extents, SpillsWhereThereIsRoom) {
    const SlotClass classes[] = {{"a", 4096, 100}};
    const PathShape paths[] = {{.capacity_bytes = 10 * 4096, .speed = 9},
                               {.capacity_bytes = kGiB, .speed = 1},
                               {.capacity_bytes = kGiB, .speed = 2}};
    EXPECT_EQ(slots_per_path(Extents(classes, paths, 4096), 3), (std::vector<int64_t>{10, 30, 60}));
}

TEST(Extents, TooSmallNamesTheMissingBytes) {
    const SlotClass classes[] = {{"a", 5000, 10}};  // 8192 each
    const PathShape paths[] = {{.capacity_bytes = 3 * 8192}, {.capacity_bytes = 8192 + 4096}};
    try {
        Extents extents(classes, paths, 4096);
        FAIL();
    } catch (const Error& error) {
        EXPECT_EQ(error.trouble(), Trouble::does_not_fit);
        EXPECT_NE(error.problem().what.find(std::to_string(6 * 8192)), std::string::npos)
            << error.what();
    }
}

// Each in its range, and together more than 64 bits can count.
TEST(Extents, MoreThanCanBeCounted) {
    const PathShape paths[] = {{.capacity_bytes = int64_t{1} << 60},
                               {.capacity_bytes = int64_t{1} << 62}};
    const SlotClass huge{"a", int64_t{1} << 50, int64_t{1} << 31};
    const SlotClass half{"b", int64_t{1} << 50, int64_t{1} << 12};
    for (const auto& classes : {std::vector{huge}, std::vector(4, half), std::vector{half, huge}}) {
        try {
            Extents extents(classes, paths, 4096, 1);
            ADD_FAILURE() << extents.reserved_bytes();
        } catch (const Error& error) {
            EXPECT_EQ(error.trouble(), Trouble::does_not_fit);
            EXPECT_NE(error.problem().what.find("larger than any"), std::string::npos)
                << error.what();
        }
    }
}

TEST(Extents, KnowsTheMostThatWasEverInUse) {
    const SlotClass classes[] = {{"a", 4096, 3}, {"b", 5000, 2}};  // 8192 each
    const PathShape paths[] = {{.capacity_bytes = kGiB}, {.capacity_bytes = kGiB}};
    Extents extents(classes, paths, 4096, 0.5);
    EXPECT_EQ(extents.reserved_bytes(), 3 * 4096 + 2 * 8192);  // without the slack
    EXPECT_EQ(extents.peak_bytes(), 0);
    const SlotId a = extents.allocate(0), b = extents.allocate(1);
    extents.free(a);
    extents.allocate(0);
    EXPECT_EQ(extents.peak_bytes(), 4096 + 8192);
    extents.free(b);
    const SlotId again = extents.allocate(1), last = extents.allocate(1);
    extents.free(last);
    ASSERT_TRUE(extents.take(1, std::array{last}));
    EXPECT_EQ(extents.peak_bytes(), 4096 + 2 * 8192);
    extents.free(again);
    ASSERT_FALSE(extents.take(1, std::array{last}));
    EXPECT_EQ(extents.peak_bytes(), 4096 + 2 * 8192);
}

TEST(Extents, SlotsNeverOverlap) {
    const SlotClass classes[] = {{"a", 12288, 50}, {"b", 4096, 31}, {"c", 4097, 7}};
    const PathShape paths[] = {
        {.files = 3, .rings = 2, .data_offset = 0, .capacity_bytes = kGiB},
        {.files = 1, .rings = 4, .data_offset = kMiB, .capacity_bytes = kGiB, .speed = 2}};
    const Extents extents(classes, paths, 4096);
    std::vector<std::tuple<int, int, int64_t, int64_t>> ranges;
    std::set<std::pair<int, int>> rings;
    for (SlotId slot = 0; slot < extents.slots(); ++slot) {
        const SlotPlace& place = extents.place(slot);
        const int64_t end = place.offset + extents.slot_bytes(place.slot_class);
        EXPECT_LE(end, extents.file_bytes(place.path, place.file));
        EXPECT_GE(place.offset, paths[place.path].data_offset);
        EXPECT_EQ(place.offset % 4096, 0);
        ranges.emplace_back(place.path, place.file, place.offset, end);
        rings.insert({place.path, place.ring});
    }
    std::ranges::sort(ranges);
    for (size_t i = 1; i < ranges.size(); ++i) {
        const auto& [path, file, begin, end] = ranges[i];
        const auto& [path_before, file_before, begin_before, end_before] = ranges[i - 1];
        if (path != path_before || file != file_before) continue;
        EXPECT_GE(begin, end_before);
    }
    EXPECT_EQ(rings.size(), 6u) << "some ring serves no slot";
}

TEST(Extents, AllocationFollowsSpeedAsItChanges) {
    const SlotClass classes[] = {{"a", 4096, 400}};
    const PathShape paths[] = {{.capacity_bytes = kGiB}, {.capacity_bytes = kGiB}};
    Extents extents(classes, paths, 4096);
    const auto take = [&](int count) {
        std::vector<int> seen(2);
        for (int i = 0; i < count; ++i) ++seen[extents.place(extents.allocate(0)).path];
        return seen;
    };
    EXPECT_EQ(take(20), (std::vector<int>{10, 10}));
    extents.set_speed(0, 3);
    EXPECT_EQ(take(60), (std::vector<int>{50, 10}));  // 60 and 20 in all
}

TEST(Extents, NothingFragments) {
    const SlotClass classes[] = {{"a", 4096, 64}};
    const PathShape paths[] = {{.capacity_bytes = kGiB}, {.capacity_bytes = kGiB, .speed = 5}};
    Extents extents(classes, paths, 4096);
    std::vector<SlotId> held;
    uint32_t state = 1;
    for (int i = 0; i < 20000; ++i) {
        state = state * 1664525 + 1013904223;
        if ((state >> 16) % 2 && !held.empty()) {
            std::swap(held[(state >> 8) % held.size()], held.back());
            extents.free(held.back());
            held.pop_back();
        } else if (const SlotId slot = extents.allocate(0); slot != kNoSlot) {
            ASSERT_EQ(std::ranges::count(held, slot), 0);
            held.push_back(slot);
        } else {
            ASSERT_EQ(held.size(), 64u) << "none free, yet not all in use";
        }
    }
    while (extents.allocate(0) != kNoSlot) held.push_back(0);
    EXPECT_EQ(held.size(), 64u) << "none is lost";
}

TEST(Extents, FreeingTwiceIsABug) {
    const SlotClass classes[] = {{"a", 4096, 2}};
    const PathShape paths[] = {{.capacity_bytes = kGiB}};
    Extents extents(classes, paths, 4096);
    const SlotId slot = extents.allocate(0);
    extents.free(slot);
    EXPECT_DEATH(extents.free(slot), "not in use");
}

}  // namespace
}  // namespace ferry::aio
