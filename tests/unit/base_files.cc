#include "base/files.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <grp.h>
#include <gtest/gtest.h>
#include <linux/filter.h>
#include <linux/fs.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <functional>
#include <thread>
#include <tuple>
#include <vector>

#include "base/checksum.h"
#include "ferry/error.h"
#include "ferry/streams.h"
#include "tests/support/temporary_directory.h"

namespace ferry {
namespace {

using testing::HasSubstr;

std::vector<std::string> names_in(const TemporaryDirectory& directory) {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(directory.path()))
        names.push_back(entry.path().filename());
    std::ranges::sort(names);
    return names;
}

void write_whole(const std::string& path, std::string_view text) {
    Draft draft(path);
    draft.write(text);
    draft.publish();
}

// Returns the exit code of a child process, whose standard streams may be closed.
int in_child(const std::function<int()>& body) {
    const pid_t child = fork();
    if (child == 0) _exit(body());
    int status = 0;
    waitpid(child, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

// From now on this call fails in this process: EPERM.
bool forbid(uint32_t call) {
    sock_filter rules[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, call, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    const sock_fprog program{.len = std::size(rules), .filter = rules};
    return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
           prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

class DraftTest : public testing::Test {
protected:
    std::string refusal(const std::string& path, Trouble trouble) const {
        try {
            write_whole(path, "new");
        } catch (const Error& error) {
            EXPECT_EQ(error.trouble(), trouble) << error.what();
            return error.what();
        }
        ADD_FAILURE() << path << " was written";
        return {};
    }

    TemporaryDirectory directory_;
};

TEST_F(DraftTest, AppearsWholeOrNotAtAll) {
    directory_.put("out", "old");
    {
        Draft draft(directory_ / "out");
        draft.write("half of ");
        EXPECT_EQ(directory_.contents("out"), "old");
    }
    EXPECT_EQ(names_in(directory_), std::vector<std::string>{"out"}) << "a draft was left";
    write_whole(directory_ / "out", "new");
    EXPECT_EQ(directory_.contents("out"), "new");
    EXPECT_EQ(names_in(directory_), std::vector<std::string>{"out"});
}

TEST_F(DraftTest, TwoOfOneNameDoNotMix) {
    Draft one(directory_ / "out"), other(directory_ / "out");
    one.write("one, and long");
    other.write("other");
    one.write(", longer");
    other.publish();
    EXPECT_EQ(directory_.contents("out"), "other");
    one.publish();
    EXPECT_EQ(directory_.contents("out"), "one, and long, longer");
}

TEST_F(DraftTest, LeavesTheUsersOwnFilesAlone) {
    directory_.put("precious", "thesis");
    directory_.put("out.part", "mine");
    const std::string link = directory_ / ("out." + std::to_string(getpid()));
    ASSERT_EQ(symlink("precious", link.c_str()), 0);
    write_whole(directory_ / "out", "new");
    EXPECT_EQ(directory_.contents("precious"), "thesis");
    EXPECT_EQ(directory_.contents("out.part"), "mine");
    EXPECT_EQ(names_in(directory_).size(), 4u);
}

TEST_F(DraftTest, WhatAKillLeftIsInNobodysWay) {
    EXPECT_EQ(in_child([&] {
                  Draft draft(directory_ / "out");
                  draft.write("half");
                  return raise(SIGKILL);
              }),
              -1);
    EXPECT_EQ(names_in(directory_).size(), 1u);
    write_whole(directory_ / "out", "new");
    EXPECT_EQ(directory_.contents("out"), "new");
}

TEST_F(DraftTest, ReplacesWhatALinkNamesAndNotTheLink) {
    directory_.put("real", "old");
    for (const char* target : {"real", "not-there-yet"}) {
        const std::string link = directory_ / "link";
        ASSERT_EQ(symlink(target, link.c_str()), 0);
        write_whole(link, "new");
        EXPECT_TRUE(std::filesystem::is_symlink(link));
        EXPECT_EQ(directory_.contents(target), "new");
        std::filesystem::remove(link);
    }
}

TEST_F(DraftTest, ReplacesNothingButRegularFiles) {
    const std::string fifo = directory_ / "fifo", link = directory_ / "link";
    ASSERT_EQ(mkfifo(fifo.c_str(), 0600), 0);
    ASSERT_EQ(symlink("/dev/null", link.c_str()), 0);
    ASSERT_EQ(mkdir((directory_ / "folder").c_str(), 0700), 0);
    for (const std::string& path : {std::string("/dev/null"), link, fifo, directory_ / "folder"})
        EXPECT_THAT(refusal(path, Trouble::usage), HasSubstr("no file"));
    EXPECT_TRUE(std::filesystem::is_character_file("/dev/null"));
    EXPECT_TRUE(std::filesystem::is_fifo(fifo));
    // It became one while the draft was written.
    Draft draft(directory_ / "late");
    ASSERT_EQ(mkfifo((directory_ / "late").c_str(), 0600), 0);
    draft.write("whole");
    try {
        draft.publish();
        ADD_FAILURE() << "a pipe was replaced";
    } catch (const Error& error) {
        EXPECT_EQ(error.trouble(), Trouble::usage);
        EXPECT_THAT(error.problem().remedy,
                    HasSubstr("the whole file is in " + (directory_ / "late.")));
    }
    EXPECT_TRUE(std::filesystem::is_fifo(directory_ / "late"));
    std::vector<std::string> names = names_in(directory_);
    std::erase_if(names, [](const std::string& name) { return !name.starts_with("late."); });
    ASSERT_EQ(names.size(), 1u);
    EXPECT_EQ(directory_.contents(names.front()), "whole");
}

TEST_F(DraftTest, SaysWhyItCannotBeWritten) {
    EXPECT_THAT(refusal(directory_ / "no/such/out", Trouble::io),
                HasSubstr("make the directory first"));
    const std::string long_name(250, 'x');
    write_whole(directory_ / long_name, "fits");
    EXPECT_EQ(directory_.contents(long_name), "fits");
}

TEST_F(DraftTest, SaysHowMuchItWrote) {
    EXPECT_EQ(in_child([&] {
                  signal(SIGXFSZ, SIG_IGN);
                  const rlimit limit{5000, 5000};
                  setrlimit(RLIMIT_FSIZE, &limit);
                  Draft draft(directory_ / "out");
                  draft.write(std::string(2000, 'x'));
                  draft.write_again(0, std::as_bytes(std::span("header", 6)));
                  try {
                      draft.write(std::string(600'000, 'x'));
                  } catch (const Error& error) {
                      EXPECT_THAT(error.problem().measured, HasSubstr("after 5000 bytes"));
                      return HasFailure() ? 1 : 0;
                  }
                  return 2;
              }),
              0);
}

// As where the file was mounted there since.
TEST_F(DraftTest, StaysWhereItCannotHaveItsName) {
    constexpr uid_t kNobody = 65534;
    directory_.put("out", "old");
    if (geteuid() == 0) {
        ASSERT_EQ(chown(directory_.path().c_str(), kNobody, kNobody), 0);
    }
    const int status = in_child([&] {
        if (geteuid() == 0 && setresuid(kNobody, kNobody, kNobody) != 0) return 2;
        Draft draft(directory_ / "out");
        draft.write("worth days");
        chmod(directory_.path().c_str(), 0555);
        try {
            draft.publish();
        } catch (const Error& error) {
            EXPECT_EQ(error.trouble(), Trouble::io);
            EXPECT_THAT(error.what(), HasSubstr("Permission denied"));
            EXPECT_THAT(error.problem().remedy, HasSubstr(directory_ / "out."));
            return HasFailure() ? 1 : 0;
        }
        return 3;
    });
    EXPECT_EQ(status, 0);
    EXPECT_EQ(directory_.contents("out"), "old");
    const std::vector<std::string> names = names_in(directory_);
    ASSERT_EQ(names.size(), 2u);
    EXPECT_EQ(directory_.contents(names.back()), "worth days");
    chmod(directory_.path().c_str(), 0755);
}

// Sets the flags of chattr; false: not here, or not by this user.
bool set_flags(const std::string& path, int flags) {
    const int file = open(path.c_str(), O_RDONLY);
    const bool set = file >= 0 && ioctl(file, FS_IOC_SETFLAGS, &flags) == 0;
    close(file);
    return set;
}

TEST_F(DraftTest, RefusesAtOnceWhatChattrHolds) {
    directory_.put("out", "old");
    for (const auto& [held, flag, word] :
         {std::tuple{"out", FS_IMMUTABLE_FL, "immutable (chattr +i)"},
          {"out", FS_APPEND_FL, "append-only (chattr +a)"},
          {".", FS_IMMUTABLE_FL, "its directory is immutable"},
          {".", FS_APPEND_FL, "its directory is append-only"}}) {
        if (!set_flags(directory_ / held, flag)) GTEST_SKIP() << "no flags for this user here";
        EXPECT_THAT(
            refusal(directory_ / "out", Trouble::usage),
            AllOf(HasSubstr("cannot be replaced"), HasSubstr(directory_ / "out"), HasSubstr(word)));
        EXPECT_TRUE(set_flags(directory_ / held, 0));
        EXPECT_EQ(names_in(directory_), std::vector<std::string>{"out"}) << word;
    }
    write_whole(directory_ / "out", "new");
}

TEST_F(DraftTest, RefusesAtOnceWhatIsAnothersInAStickyDirectory) {
    if (geteuid() != 0) GTEST_SKIP() << "there is no other user to be";
    constexpr uid_t kNobody = 65534;
    directory_.put("out", "old");
    directory_.put("mine", "old");
    ASSERT_EQ(chown((directory_ / "mine").c_str(), kNobody, kNobody), 0);
    ASSERT_EQ(chmod(directory_.path().c_str(), 01777), 0);
    EXPECT_EQ(in_child([&] {
                  if (setresuid(kNobody, kNobody, kNobody) != 0) return 2;
                  EXPECT_THAT(refusal(directory_ / "out", Trouble::usage),
                              AllOf(HasSubstr("cannot be replaced"), HasSubstr("user 0"),
                                    HasSubstr("sticky")));
                  write_whole(directory_ / "mine", "new");
                  write_whole(directory_ / "another", "new");
                  return HasFailure() ? 1 : 0;
              }),
              0);
    EXPECT_EQ(names_in(directory_), (std::vector<std::string>{"another", "mine", "out"}));
    write_whole(directory_ / "out", "new");  // root may
}

// Whoever owns the directory, and whoever may overrule all owners, may replace it.
TEST_F(DraftTest, ReplacesInAStickyDirectoryWhatTheKernelLetsIt) {
    if (geteuid() != 0) GTEST_SKIP() << "there is no other user to be";
    constexpr uid_t kNobody = 65534;
    directory_.put("out", "old");
    ASSERT_EQ(chmod((directory_ / "out").c_str(), 0666), 0);
    ASSERT_EQ(chown(directory_.path().c_str(), kNobody, kNobody), 0);
    ASSERT_EQ(chmod(directory_.path().c_str(), 01777), 0);
    EXPECT_EQ(in_child([&] {
                  if (setresuid(kNobody, kNobody, kNobody) != 0) return 2;
                  write_whole(directory_ / "out", "new");
                  return HasFailure() ? 1 : 0;
              }),
              0);
    EXPECT_EQ(directory_.contents("out"), "new");
}

// Somebody puts an empty directory into the file's place: looking at it removes nothing.
TEST_F(DraftTest, NeverRemovesAnEmptyDirectory) {
    directory_.put("out", "FILE");
    ASSERT_EQ(mkdir((directory_ / "theirs").c_str(), 0700), 0);
    std::jthread exchanges([this](const std::stop_token& stop) {
        const std::string out = directory_ / "out", theirs = directory_ / "theirs";
        while (!stop.stop_requested())
            renameat2(AT_FDCWD, out.c_str(), AT_FDCWD, theirs.c_str(), RENAME_EXCHANGE);
    });
    constexpr int kTries = 20'000;
    for (int i = 0; i < kTries; ++i) {
        try {
            const Draft draft(directory_ / "out");
        } catch (const Error&) {  // it was the directory just then
        }
    }
    exchanges.request_stop();
    exchanges.join();
    EXPECT_EQ(names_in(directory_), (std::vector<std::string>{"out", "theirs"}));
}

TEST_F(DraftTest, RefusesAtOnceWhatIsMounted) {
    directory_.put("out", "old");
    directory_.put("other", "mounted");
    const int status = in_child([&] {
        constexpr int kNone = 3;
        if (unshare(geteuid() == 0 ? CLONE_NEWNS : CLONE_NEWUSER | CLONE_NEWNS) != 0) return kNone;
        if (mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0) return kNone;
        const std::string out = directory_ / "out", other = directory_ / "other";
        if (mount(other.c_str(), out.c_str(), nullptr, MS_BIND, nullptr) != 0) return kNone;
        EXPECT_THAT(refusal(out, Trouble::usage),
                    AllOf(HasSubstr("cannot be replaced"), HasSubstr("mount point")));
        EXPECT_EQ(directory_.contents("out"), "mounted");
        return HasFailure() ? 1 : 0;
    });
    if (status == 3) GTEST_SKIP() << "nothing can be mounted here";
    EXPECT_EQ(status, 0);
    EXPECT_EQ(names_in(directory_).size(), 2u);
}

TEST_F(DraftTest, KeepsPrivateWhatWasPrivate) {
    directory_.put("out", "old");
    ASSERT_EQ(chmod((directory_ / "out").c_str(), 0600), 0);
    write_whole(directory_ / "out", "new");
    struct stat status {};
    ASSERT_EQ(stat((directory_ / "out").c_str(), &status), 0);
    EXPECT_EQ(status.st_mode & 0777, 0600u);
}

// From the first byte on: a mode that comes later was another one before.
TEST_F(DraftTest, IsPrivateFromTheBeginning) {
    directory_.put("out", "old");
    ASSERT_EQ(chmod((directory_ / "out").c_str(), 0600), 0);
    // Sees the mode that the draft is created with: fchmod() fails.
    EXPECT_EQ(in_child([&] {
                  umask(0);
                  if (!forbid(SYS_fchmod)) return 3;
                  const Draft draft(directory_ / "out");
                  for (const std::string& name : names_in(directory_)) {
                      struct stat status {};
                      stat((directory_ / name).c_str(), &status);
                      EXPECT_EQ(status.st_mode & 0777, 0600u) << name;
                  }
                  return HasFailure() ? 1 : 0;
              }),
              0);
}

TEST_F(DraftTest, LeavesAFileToItsOwner) {
    if (geteuid() != 0) GTEST_SKIP() << "nobody else can give files away";
    constexpr uid_t kNobody = 65534;
    directory_.put("out", "old");
    ASSERT_EQ(chown((directory_ / "out").c_str(), kNobody, kNobody), 0);
    ASSERT_EQ(chmod((directory_ / "out").c_str(), 0600), 0);
    write_whole(directory_ / "out", "new");
    struct stat status {};
    ASSERT_EQ(stat((directory_ / "out").c_str(), &status), 0);
    EXPECT_EQ(status.st_uid, kNobody);
    EXPECT_EQ(status.st_gid, kNobody);
    EXPECT_EQ(status.st_mode & 0777, 0600u);
}

TEST_F(DraftTest, GivesAnotherGroupNoMoreThanAllOthers) {
    if (geteuid() != 0) GTEST_SKIP() << "there is no other user to be";
    constexpr uid_t kNobody = 65534;
    directory_.put("out", "old");
    ASSERT_EQ(chown((directory_ / "out").c_str(), kNobody, 0), 0);
    ASSERT_EQ(chmod((directory_ / "out").c_str(), 0664), 0);
    ASSERT_EQ(chown(directory_.path().c_str(), kNobody, kNobody), 0);
    EXPECT_EQ(in_child([&] {
                  if (setgroups(0, nullptr) != 0 || setresgid(kNobody, kNobody, kNobody) != 0 ||
                      setresuid(kNobody, kNobody, kNobody) != 0)
                      return 2;
                  write_whole(directory_ / "out", "new");
                  return HasFailure() ? 1 : 0;
              }),
              0);
    struct stat status {};
    ASSERT_EQ(stat((directory_ / "out").c_str(), &status), 0);
    EXPECT_EQ(status.st_gid, kNobody);
    EXPECT_EQ(status.st_mode & 0777, 0644u);
}

TEST_F(DraftTest, ReplacesItsOwnKindAlone) {
    const Replaceable tokens{.beginning = "TOK", .skipped = 2};
    const std::string out = directory_ / "out";
    for (const char* text : {"", "..TOK", "..TOKENS"}) {
        directory_.put("out", text);
        Draft draft(out, "no", {}, tokens);
        draft.write("..TOKnew");
        draft.publish();
        EXPECT_EQ(directory_.contents("out"), "..TOKnew");
    }
    for (const char* text : {"T", "..TO", "...TOK"}) {
        directory_.put("out", text);
        EXPECT_THROW(Draft(out, "no", {}, tokens), Error) << text;
        EXPECT_EQ(directory_.contents("out"), text);
    }
    EXPECT_EQ(names_in(directory_), std::vector<std::string>{"out"});
}

TEST_F(DraftTest, TakesNoNameThatWasTakenMeanwhile) {
    const std::string out = directory_ / "out";
    for (const Replaceable& replaceable : {Replaceable{.beginning = "TOK"}, {.nothing = true}}) {
        Draft draft(out, "no", {}, replaceable);
        draft.write("TOK, worth days");
        directory_.put("out", replaceable.nothing ? "" : "mine");
        try {
            draft.publish();
            ADD_FAILURE() << "it was replaced";
        } catch (const Error& error) {
            EXPECT_THAT(error.problem().remedy, HasSubstr("the whole file is in " + out));
        }
        EXPECT_EQ(directory_.contents("out"), replaceable.nothing ? "" : "mine");
        std::filesystem::remove(out);
    }
    const std::string link = directory_ / "link";
    ASSERT_EQ(symlink("nowhere", link.c_str()), 0);
    EXPECT_THROW(Draft(link, "no", {}, {.nothing = true}), Error);
}

TEST_F(DraftTest, IsRemovedByAHandlerOfSignals) {
    EXPECT_EQ(in_child([&] {
                  Draft one(directory_ / "one"), two(directory_ / "two"),
                      three(directory_ / "three");
                  two.publish();
                  EXPECT_EQ(in_child([] {
                                remove_drafts();  // not the parent's
                                return 0;
                            }),
                            0);
                  EXPECT_EQ(names_in(directory_).size(), 3u);
                  remove_drafts();
                  EXPECT_EQ(names_in(directory_), std::vector<std::string>{"two"});
                  return HasFailure() ? 1 : 0;
              }),
              0);
}

TEST_F(DraftTest, NeverHasTheNumberOfAStandardStream) {
    for (int closed = 0; closed <= 2; ++closed) {
        EXPECT_EQ(in_child([&] {
                      close(closed);
                      Draft draft(directory_ / "out");
                      [[maybe_unused]] const ssize_t said = ::write(closed, "printed", 7);
                      draft.write("kept");
                      draft.publish();
                      return 0;
                  }),
                  0);
        EXPECT_EQ(directory_.contents("out"), "kept") << closed;
    }
}

TEST(StandardStreams, AreHeldWhereTheyAreClosed) {
    for (int closed = 0; closed <= 2; ++closed) {
        EXPECT_EQ(in_child([closed] {
                      close(closed);
                      hold_standard_streams();
                      char byte = 0;
                      const bool held = ::write(closed, "printed", 7) == 7 &&
                                        ::read(closed, &byte, 1) == 0 &&
                                        open("/dev/null", O_RDONLY) > 2;
                      return held ? 0 : 1;
                  }),
                  0)
            << closed;
    }
    // 3, or more where whoever started this has left something open.
    EXPECT_GE(in_child([] {
                  for (int stream = 0; stream <= 2; ++stream) close(stream);
                  hold_standard_streams();
                  return open("/dev/null", O_RDONLY);
              }),
              3);
}

TEST(RunningChecksum, IsThatOfTheWhole) {
    std::vector<std::byte> bytes(5000);
    for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(i * 7 + i / 256);
    for (const size_t piece : {size_t{1}, size_t{63}, size_t{256}, size_t{4999}, size_t{9000}}) {
        RunningChecksum running;
        for (size_t at = 0; at < bytes.size(); at += piece)
            running.add(std::span(bytes).subspan(at, std::min(piece, bytes.size() - at)));
        EXPECT_EQ(running.value(), checksum(bytes)) << piece;
    }
    EXPECT_EQ(RunningChecksum().value(), checksum({}));
}

}  // namespace
}  // namespace ferry
