#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <pthread.h>
#include <sys/resource.h>

#include <cstdint>
#include <string>

#include "base/process_limits.h"
#include "ferry/error.h"
#include "ferry/executor.h"
#include "ferry/units.h"
#include "tests/support/temporary_directory.h"

namespace ferry {
namespace {

using testing::HasSubstr;
using testing::Not;

// A file system with this membership of control groups.
class Groups {
public:
    explicit Groups(const std::string& membership) { put("proc/self/cgroup", membership); }
    void put(const std::string& name, const std::string& contents) {
        std::filesystem::create_directories(std::filesystem::path(root_ / name).parent_path());
        root_.put(name, contents);
    }
    std::string limits() const { return thread_limits(root_.path()); }

private:
    TemporaryDirectory root_;
};

TEST(Limits, TheLeastPidsMaxOfTheGroupAndItsAncestorsIsNamed) {
    Groups groups("0::/a/b\n");
    groups.put("sys/fs/cgroup/a/b/pids.max", "max\n");
    EXPECT_THAT(groups.limits(), Not(HasSubstr("pids.max)")));
    groups.put("sys/fs/cgroup/a/pids.max", "40\n");
    groups.put("sys/fs/cgroup/pids.max", "900\n");
    EXPECT_THAT(groups.limits(), HasSubstr("40 processes and threads of the control group"));
    groups.put("sys/fs/cgroup/pids.max", "9\n");  // a container's own
    EXPECT_THAT(groups.limits(), HasSubstr("9 processes and threads of the control group"));
}

TEST(Limits, ThePidsControllerOfTheFirstVersionIsReadToo) {
    Groups groups("8:pids:/x\n4:memory:/x\n0::/\nbroken\n");
    groups.put("sys/fs/cgroup/memory/x/pids.max", "3\n");
    groups.put("sys/fs/cgroup/pids/x/pids.max", "77\n");
    EXPECT_THAT(groups.limits(), HasSubstr("77 processes and threads of the control group"));
}

TEST(Limits, AThreadThatCannotBeStartedNamesTheUsersLimit) {
    rlimit before{};
    ASSERT_EQ(getrlimit(RLIMIT_NPROC, &before), 0);
    rlimit lower = before;
    lower.rlim_cur = 123456;
    if (before.rlim_max < lower.rlim_cur) lower.rlim_cur = before.rlim_max;
    ASSERT_EQ(setrlimit(RLIMIT_NPROC, &lower), 0);
    try {
        refuse_thread("thread \"io\"", "no");
        FAIL();
    } catch (const Error& error) {
        EXPECT_EQ(error.trouble(), Trouble::does_not_fit);
        EXPECT_THAT(error.problem().limit,
                    HasSubstr(std::to_string(lower.rlim_cur) + " processes and threads"));
        EXPECT_THAT(error.problem().limit, HasSubstr("ulimit -u"));
    }
    setrlimit(RLIMIT_NPROC, &before);
}

int64_t stack_of_this_thread() {
    pthread_attr_t attributes;
    EXPECT_EQ(pthread_getattr_np(pthread_self(), &attributes), 0);
    size_t bytes = 0;
    pthread_attr_getstacksize(&attributes, &bytes);
    pthread_attr_destroy(&attributes);
    return static_cast<int64_t>(bytes);
}

TEST(Limits, ASmallStackIsRefusedWithItsSize) {
#if defined(__SANITIZE_THREAD__)
    GTEST_SKIP() << "this sanitizer makes small stacks larger";
#endif
    const auto body = [](void* said) -> void* {
        try {
            require_stack();
        } catch (const Error& error) {
            *static_cast<std::string*>(said) = error.what();
        }
        return nullptr;
    };
    for (const int64_t kib : {256, 8192}) {
        pthread_attr_t attributes;
        pthread_attr_init(&attributes);
        ASSERT_EQ(pthread_attr_setstacksize(&attributes, static_cast<size_t>(kib * kKiB)), 0);
        std::string said;
        pthread_t thread{};
        ASSERT_EQ(pthread_create(&thread, &attributes, body, &said), 0);
        pthread_join(thread, nullptr);
        pthread_attr_destroy(&attributes);
        if (kib == 8192) {
            EXPECT_EQ(said, "");
        } else {
            EXPECT_THAT(said, HasSubstr("stack"));
            EXPECT_THAT(said, HasSubstr("256.00 KiB"));
        }
    }
}

TEST(Limits, AnErrnoNamesItsLimitWithItsValue) {
    rlimit before{};
    ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
    const rlimit low{.rlim_cur = 123456, .rlim_max = before.rlim_max};
    ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &low), 0);
    const std::string size = limit_behind(EFBIG);
    setrlimit(RLIMIT_FSIZE, &before);
    EXPECT_THAT(size, HasSubstr("123456"));
    EXPECT_THAT(size, HasSubstr("ulimit -f"));
    EXPECT_THAT(limit_behind(EMFILE), HasSubstr("ulimit -n"));
    EXPECT_EQ(limit_behind(ENOENT), "");
    EXPECT_EQ(trouble_of_reading(ENOENT), Trouble::usage);
    EXPECT_EQ(trouble_of_reading(EMFILE), Trouble::does_not_fit);
    EXPECT_EQ(trouble_of_reading(EIO), Trouble::io);
}

// Kernels need it, whatever ulimit -s says.
TEST(Limits, LanesHaveTheStackThatKernelsNeed) {
    pthread_attr_t attributes;
    ASSERT_EQ(pthread_getattr_default_np(&attributes), 0);
    pthread_attr_t small = attributes;
    ASSERT_EQ(pthread_attr_setstacksize(&small, 256 * kKiB), 0);
    ASSERT_EQ(pthread_setattr_default_np(&small), 0);
    std::atomic<int64_t> bytes{0};
    {
        const auto executor = make_thread_executor();
        const LaneId lane = executor->add_lane("lane");
        executor->post(
            lane, {.run =
                       [](void* out, uint64_t) {
                           static_cast<std::atomic<int64_t>*>(out)->store(stack_of_this_thread());
                       },
                   .context = &bytes});
    }
    pthread_setattr_default_np(&attributes);
    EXPECT_GE(bytes.load(), kStackBytes);
}

}  // namespace
}  // namespace ferry
