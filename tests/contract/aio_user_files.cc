// Files of the caller's: any offset, address and size, over both backends.
#include "ferry/user_files.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <random>
#include <set>
#include <string_view>
#include <thread>

#include "aio/backend.h"
#include "aio/buffer.h"
#include "tests/support/temporary_directory.h"

namespace ferry::aio {
namespace {

constexpr int64_t kBuffer = 64 * kKiB;

class Files : public testing::TestWithParam<BackendKind> {
protected:
    void SetUp() override {
        if (GetParam() == BackendKind::uring && !why_no_uring().empty())
            GTEST_SKIP() << "no io_uring here: " << why_no_uring();
        open({});
    }
    void open(UserFilesOptions options) {
        options.backend = GetParam();
        options.block_bytes = 16 * kKiB;
        options.queue_depth = 4;
        files_ = UserFiles::open(options, *executor_);
    }
    std::string path(const std::string& name) const { return directory_ / name; }
    std::string contents(const std::string& name) const { return directory_.contents(name); }
    void put(const std::string& name, const std::string& text) const { directory_.put(name, text); }
    static std::string noise(size_t bytes, unsigned seed) {
        std::mt19937 random(seed);
        std::string text(bytes, 0);
        for (char& one : text) one = static_cast<char>(random());
        return text;
    }
    // Moves it and waits; its errno.
    int move(Kind kind, FileNumber file, int64_t offset, std::byte* data, int64_t bytes) {
        operation_ = {.kind = kind,
                      .slot = file,
                      .offset = offset,
                      .buffer = {data, static_cast<size_t>(bytes)}};
        EXPECT_TRUE(files_->try_submit(operation_));
        EXPECT_EQ(wait(), &operation_);
        EXPECT_EQ(operation_.done_bytes, operation_.error ? operation_.done_bytes : bytes);
        return operation_.error;
    }
    Operation* wait() {
        Operation* back = nullptr;
        while (!(back = files_->poll()) && files_->in_flight() > 0) executor_->wait(kForever);
        return back;
    }
    template <class Body>
    void expect_error(Trouble trouble, const char* words, const Body& body) {
        try {
            body();
            ADD_FAILURE() << "nothing was thrown";
        } catch (const Error& error) {
            EXPECT_EQ(error.trouble(), trouble) << error.what();
            EXPECT_NE(std::string(error.what()).find(words), std::string::npos) << error.what();
        }
    }

    TemporaryDirectory directory_;
    std::unique_ptr<Executor> executor_ = make_thread_executor();
    std::unique_ptr<UserFiles> files_;
    AlignedBuffer memory_ = aligned_buffer(4096, 2 * kBuffer);
    Operation operation_{};
};

TEST_P(Files, AnyOffsetAddressAndSize) {
    const FileNumber file = files_->add(path("a"), FileUse::write);
    std::string expected(3 * kBuffer, '\0');
    unsigned seed = 0;
    for (const int64_t offset : {0, 1, 4096, 4097, 40960}) {
        for (const int64_t shift : {0, 1, 512, 4096}) {
            for (const int64_t bytes : {1, 4095, 4096, 4097, 16384, 49153, 65536 - 4096}) {
                const std::string text = noise(static_cast<size_t>(bytes), ++seed);
                std::byte* const data = memory_.get() + shift;
                std::copy(text.begin(), text.end(), reinterpret_cast<char*>(data));
                ASSERT_EQ(move(Kind::write, file, offset, data, bytes), 0);
                expected.replace(static_cast<size_t>(offset), text.size(), text);
                std::fill_n(data, bytes, std::byte{0});
                ASSERT_EQ(move(Kind::read, file, offset, data, bytes), 0);
                ASSERT_TRUE(std::equal(text.begin(), text.end(), reinterpret_cast<char*>(data)))
                    << offset << " " << shift << " " << bytes;
            }
        }
    }
    expected.resize(static_cast<size_t>(files_->size_bytes(file)));
    EXPECT_EQ(expected.size(), 40960u + 65536u - 4096u);
    files_->flush(file);
    EXPECT_EQ(contents("a"), expected);
}

TEST_P(Files, ManyAtOnceOverManyFiles) {
    constexpr int kFiles = 20, kEach = 4;
    constexpr int64_t kPart = 5000;  // part direct, part not
    std::vector<Operation> operations(size_t{kFiles} * kEach);
    const auto memory = aligned_buffer(4096, 8192 * kFiles * kEach);
    for (const Kind kind : {Kind::write, Kind::read}) {
        for (int i = 0; i < kFiles * kEach; ++i) {
            std::byte* const data = memory.get() + ptrdiff_t{8192} * i;
            const std::byte value = static_cast<std::byte>(i + 1);
            std::fill_n(data, kPart, kind == Kind::write ? value : std::byte{0});
            const std::string name = std::to_string(i % kFiles);
            if (kind == Kind::write && i < kFiles) {
                ASSERT_EQ(files_->add(path(name), FileUse::write), FileNumber(i));
            }
            operations[static_cast<size_t>(i)] = {.kind = kind,
                                                  .slot = FileNumber(i % kFiles),
                                                  .offset = int64_t{8192} * (i / kFiles),
                                                  .buffer = {data, kPart},
                                                  .tag = static_cast<uint64_t>(i)};
            ASSERT_TRUE(files_->try_submit(operations[static_cast<size_t>(i)]));
        }
        for (int i = 0; i < kFiles * kEach; ++i) {
            const Operation* const back = wait();
            ASSERT_EQ(back->state, State::done);
            ASSERT_EQ(back->done_bytes, kPart);
        }
        EXPECT_EQ(files_->in_flight(), 0);
    }
    for (int i = 0; i < kFiles * kEach; ++i)
        EXPECT_EQ(memory.get()[ptrdiff_t{8192} * i + kPart - 1], static_cast<std::byte>(i + 1));
}

TEST_P(Files, ThoseOnTheSameBytesKeepTheirOrder) {
    const FileNumber file = files_->add(path("a"), FileUse::write);
    std::vector<Operation> operations(40);
    std::vector<std::string> texts;
    for (size_t i = 0; i < operations.size(); ++i) texts.push_back(noise(9000, unsigned(i)));
    for (size_t i = 0; i < operations.size(); ++i) {  // an offset that parts of both kinds cover
        operations[i] = {.kind = Kind::write,
                         .slot = file,
                         .offset = 4096 * static_cast<int64_t>(i % 2),
                         .buffer = std::as_writable_bytes(std::span(texts[i]))};
        ASSERT_TRUE(files_->try_submit(operations[i]));
    }
    for (size_t i = 0; i < operations.size(); ++i) ASSERT_EQ(wait()->state, State::done);
    EXPECT_EQ(contents("a"), texts[38].substr(0, 4096) + texts[39]);
}

TEST_P(Files, ADescriptorStaysTheCallers) {
    put("a", "hello, world");
    for (const int flags : {O_RDWR, O_RDWR | O_DIRECT}) {
        const int mine = ::open(path("a").c_str(), flags);
        ASSERT_GE(mine, 0);
        const FileNumber file = files_->add(mine);
        std::string word = "ferry";
        EXPECT_EQ(move(Kind::write, file, 7, std::as_writable_bytes(std::span(word)).data(), 5), 0);
        files_->remove(file);
        EXPECT_EQ(fcntl(mine, F_GETFL) & O_DIRECT, flags & O_DIRECT);
        EXPECT_EQ(close(mine), 0);
    }
    EXPECT_EQ(contents("a"), "hello, ferry");
    expect_error(Trouble::usage, "not open", [&] { files_->add(9999); });
    EXPECT_FALSE(files_->is_open(0));
    const FileNumber again = files_->add(path("a"), FileUse::read);
    EXPECT_EQ(again, 0u);  // the number is used again
}

TEST_P(Files, AFileIsWrittenInPlace) {
    put("a", std::string(10000, 'x'));
    const FileNumber file = files_->add(path("a"), FileUse::write);
    std::fill_n(memory_.get(), 4096, std::byte{'y'});
    ASSERT_EQ(move(Kind::write, file, 4096, memory_.get(), 4096), 0);
    EXPECT_EQ(contents("a"),
              std::string(4096, 'x') + std::string(4096, 'y') + std::string(1808, 'x'));
    files_->add(path("new"), FileUse::write);
    struct stat status {};
    ASSERT_EQ(stat(path("new").c_str(), &status), 0);
    EXPECT_EQ(status.st_mode & 0777u, 0600u);
    EXPECT_EQ(status.st_size, 0);
}

// Both ways to it lead to one file, though its name is given to another one meanwhile.
TEST_P(Files, ANameMayBeGivenToAnotherFile) {
    put("a", "");
    std::atomic<bool> stop = false;
    std::thread renames([&] {
        for (int i = 0; !stop; ++i) {
            put("b", "");
            rename(path("b").c_str(), path("a").c_str());
        }
    });
    const auto opened = [&] {
        std::set<ino_t> files;
        for (int i = 3; i < 256; ++i) {
            struct stat status {};
            std::array<char, 4096> name{};
            const std::string link = "/proc/self/fd/" + std::to_string(i);
            const ssize_t bytes = readlink(link.c_str(), name.data(), name.size());
            if (bytes > 0 &&
                std::string_view(name.data(), static_cast<size_t>(bytes)).find("/a") !=
                    std::string_view::npos &&
                std::string_view(name.data()).starts_with(directory_.path()) &&
                fstat(i, &status) == 0)
                files.insert(status.st_ino);
        }
        return files.size();
    };
    for (int i = 0; i < 3000 && !HasFailure(); ++i) {
        const FileNumber file = files_->add(path("a"), FileUse::read);
        EXPECT_LE(opened(), 1u);
        files_->remove(file);
    }
    stop = true;
    renames.join();
}

TEST_P(Files, WhatIsRefused) {
    put("short", "1234");
    const FileNumber file = files_->add(path("short"), FileUse::read);
    operation_ = {.kind = Kind::read, .slot = file, .offset = 1, .buffer = {memory_.get(), 4}};
    expect_error(Trouble::io, "shorter", [&] { (void)files_->try_submit(operation_); });
    operation_.kind = Kind::write;
    expect_error(Trouble::usage, "opened for reading",
                 [&] { (void)files_->try_submit(operation_); });
    expect_error(Trouble::io, "No such file", [&] { files_->add(path("none"), FileUse::read); });
    ASSERT_EQ(mkfifo(path("pipe").c_str(), 0600), 0);  // opening it would wait for another end
    for (const std::string& other : {directory_.path(), path("pipe"), std::string("/dev/zero")})
        for (const FileUse use : {FileUse::read, FileUse::write})
            expect_error(Trouble::usage, "no file", [&] { files_->add(other, use); });
    open({.files_max = 1});
    files_->add(path("short"), FileUse::read);
    expect_error(Trouble::usage, "too many", [&] { files_->add(path("short"), FileUse::read); });
    EXPECT_EQ(files_->in_flight(), 0);
}

TEST_P(Files, OperationsAreBoundedAndTheEndWaitsForThem) {
    open({.operations_max = 2});
    const FileNumber file = files_->add(path("a"), FileUse::write);
    std::vector<Operation> operations(3);
    for (Operation& one : operations)
        one = {.kind = Kind::write, .slot = file, .buffer = {memory_.get(), kBuffer}};
    EXPECT_TRUE(files_->try_submit(operations[0]) && files_->try_submit(operations[1]));
    EXPECT_FALSE(files_->try_submit(operations[2]));
    EXPECT_EQ(files_->in_flight(file), 2);
    files_->cancel_queued();
    files_.reset();
    for (int i = 0; i < 2; ++i) {
        const State state = operations[static_cast<size_t>(i)].state;
        EXPECT_TRUE(state == State::done || state == State::cancelled);
    }
}

INSTANTIATE_TEST_SUITE_P(All, Files, testing::Values(BackendKind::uring, BackendKind::posix),
                         [](const auto& one) {
                             return one.param == BackendKind::uring ? "uring" : "posix";
                         });

}  // namespace
}  // namespace ferry::aio
