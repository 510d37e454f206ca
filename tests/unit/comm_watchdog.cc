// Who ends the process while a library keeps its thread, and who does not.
#include "watchdog.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <string>
#include <string_view>

#include "comm/comm.h"
#include "tests/support/child.h"

namespace ferry::comm {
namespace {

using std::chrono::milliseconds;

constexpr Nanos kLimit = 1'000'000'000;

std::optional<Error> judge(Nanos stuck) {
    if (stuck < kLimit) return std::nullopt;
    return Error(Trouble::rank_lost, {.what = "stuck"});
}

TEST(Watchdog, EndsTheProcessWhoseCallDoesNotReturn) {
    const auto hang = [] {
        Watchdog watchdog(judge);
        watchdog.enter();
        std::this_thread::sleep_for(std::chrono::hours(1));
    };
    EXPECT_EXIT(hang(), testing::ExitedWithCode(6), "ferry: stuck");
}

// A program that has something to be called instead goes on.
TEST(Watchdog, TellsInsteadOnceForEachCall) {
    const int status = in_child([] {
        std::atomic<int> told = 0;
        on_stuck([&told](const Error& error) {
            told += std::string_view(error.what()) == "stuck" && error.exit_code() == 6 ? 1 : 100;
        });
        {
            Watchdog watchdog(judge);
            for (int call = 1; call <= 2; ++call) {
                watchdog.enter();
                std::this_thread::sleep_for(milliseconds(2500));
                if (told != call) return 10 + told;
                watchdog.leave();
            }
        }
        on_stuck({});
        return 0;
    });
    EXPECT_EQ(status, 0);
}

// Who is told may say who is told next, and end what it is called with.
TEST(Watchdog, MayBeGivenAnotherFromWithinACall) {
    const auto replace = [] {
        on_stuck([context = std::string("first")](const Error&) {
            on_stuck([](const Error&) { on_stuck({}); });
            std::fprintf(stderr, "told the %s\n", context.c_str());
        });
        Watchdog watchdog(judge);
        for (int call = 1; call <= 3; ++call) {
            watchdog.enter();
            std::this_thread::sleep_for(milliseconds(2500));
            watchdog.leave();
        }
    };
    EXPECT_EXIT(replace(), testing::ExitedWithCode(6), "told the first\nferry: stuck");
}

TEST(Watchdog, LeavesThoseAloneThatComeBack) {
    const int status = in_child([] {
        Watchdog watchdog(judge);
        for (int i = 0; i < 15; ++i) {
            watchdog.enter();
            std::this_thread::sleep_for(milliseconds(100));
            watchdog.leave();
        }
        std::this_thread::sleep_for(milliseconds(1500));  // outside of any call
        return 0;
    });
    EXPECT_EQ(status, 0);
}

TEST(Watchdog, DoesNotCountTheTimeInWhichItWasStopped) {
    const pid_t child = fork();
    if (child == 0) {
        Watchdog watchdog(judge);
        watchdog.enter();
        std::raise(SIGSTOP);
        std::this_thread::sleep_for(milliseconds(500));
        watchdog.leave();
        _exit(0);
    }
    int status = -1;
    waitpid(child, &status, WUNTRACED);
    ASSERT_TRUE(WIFSTOPPED(status));
    std::this_thread::sleep_for(milliseconds(1500));
    kill(child, SIGCONT);
    waitpid(child, &status, 0);
    EXPECT_EQ(status, 0);
}

}  // namespace
}  // namespace ferry::comm
