// Helpers of the C ABI's tests.
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "ferry/ferry.h"

namespace ferry {

template <class T>
T sized() {
    T made;
    FERRY_INIT(made);
    return made;
}

inline ferry_path path_at(const std::string& directory) {
    auto path = sized<ferry_path>();
    path.path = directory.c_str();
    return path;
}

}  // namespace ferry

// The call fails so, and its text has this in it.
#define EXPECT_REFUSED(call, status, text)                                       \
    do {                                                                         \
        EXPECT_EQ(call, status) << #call;                                        \
        EXPECT_NE(std::string(ferry_last_error()).find(text), std::string::npos) \
            << #call << " said: " << ferry_last_error();                         \
    } while (false)
#define ASSERT_DONE(call) ASSERT_EQ(call, FERRY_OK) << ferry_last_error()
