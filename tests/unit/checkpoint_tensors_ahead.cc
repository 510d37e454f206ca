// What is read ahead is what lies in the files, in any order of what is wanted and in little
// memory; what was damaged, cut or written to is named before a byte of it is given.
#include "checkpoint/tensors_ahead.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <random>

#include "checkpoint/array_file.h"
#include "checkpoint/saved.h"
#include "ferry/error.h"
#include "tests/support/temporary_directory.h"

namespace ferry::checkpoint {
namespace {

const std::vector<int64_t> kBytes{1, 2, 4095, 4096, 3 * kMiB + 2, 100, 2 * kMiB, 9 * kMiB + 6};

// Byte `at` of tensor `t`.
std::byte byte_of(size_t t, int64_t at) {
    return static_cast<std::byte>((at * 7 + at / 4096 + static_cast<int64_t>(t) * 31) & 0xff);
}

class TensorsAheadTest : public testing::Test {
protected:
    void SetUp() override {
        std::vector<ArrayInfo> arrays;
        for (size_t t = 0; t < kBytes.size(); ++t)
            arrays.push_back({name(t), "U8", {kBytes[t]}, kBytes[t]});
        ArrayFile file(path_, arrays);
        for (size_t t = 0; t < kBytes.size(); ++t) {
            std::vector<std::byte> bytes(static_cast<size_t>(kBytes[t]));
            for (size_t at = 0; at < bytes.size(); ++at)
                bytes[at] = byte_of(t, static_cast<int64_t>(at));
            file.write(bytes);
        }
        shard_ = file.finish();
    }
    static std::string name(size_t t) { return std::to_string(t) + ".weight"; }
    TensorSource source(const Weights& weights, size_t t, bool proved = true) const {
        return {&weights, weights.find(name(t)), kBytes[t],
                proved ? std::span(shard_.arrays[t].stripes) : std::span<const uint64_t>()};
    }
    void flip(int64_t at) const {
        std::fstream file(path_, std::ios::in | std::ios::out | std::ios::binary);
        file.seekg(at);
        const int was = file.get();
        file.seekp(at);
        file.put(static_cast<char>(was ^ 1));
    }
    // What all of tensor `t` throws.
    std::string refused(const Weights& weights, size_t t, bool proved) {
        TensorsAhead ahead(team_);
        ahead.want(source(weights, t, proved), 0, kBytes[t]);
        ahead.end_step();
        try {
            ahead.next();
        } catch (const Error& error) {
            EXPECT_EQ(error.trouble(), Trouble::io);
            return error.what();
        }
        return {};
    }

    const TemporaryDirectory directory_{};
    const std::string path_ = directory_.path() + "/model.safetensors";
    Shard shard_{};
    Team team_{3};
};

TEST_F(TensorsAheadTest, GivesAnyOrderInLittleMemory) {
    const Weights weights(path_);
    struct Run {
        size_t tensor = 0;
        int64_t first = 0, bytes = 0;
    };
    for (const int64_t memory : {int64_t{1}, 6 * kMiB, 256 * kMiB}) {
        std::mt19937 random(static_cast<unsigned>(memory));
        const auto below = [&](int64_t end) {
            return static_cast<int64_t>(random() % static_cast<uint64_t>(end));
        };
        std::vector<std::vector<Run>> steps(200);
        TensorsAhead ahead(team_, memory);
        for (auto& runs : steps) {
            for (int64_t i = below(4); i > 0; --i) {
                const auto tensor = static_cast<size_t>(below(std::ssize(kBytes)));
                const int64_t first = below(kBytes[tensor]);
                runs.push_back({tensor, first, 1 + below(kBytes[tensor] - first)});
                ahead.want(source(weights, tensor), first, runs.back().bytes);
            }
            ahead.end_step();
        }
        for (const auto& runs : steps) {
            ahead.next();
            for (const Run& run : runs) {
                std::vector<std::byte> bytes(static_cast<size_t>(run.bytes));
                ahead.read(*weights.find(name(run.tensor)), run.first, bytes);
                int64_t wrong = 0;
                for (int64_t at = 0; at < run.bytes; ++at)
                    wrong += bytes[static_cast<size_t>(at)] != byte_of(run.tensor, run.first + at);
                ASSERT_EQ(wrong, 0) << name(run.tensor) << " from " << run.first;
            }
        }
    }
}

// As any type: the bytes of the file where it is theirs, or rounded once from what they say.
TEST_F(TensorsAheadTest, GivesEachTypeAsAnyOther) {
    constexpr int64_t kCount = 1'100'003;  // more than a stripe
    std::vector<float> values(kCount);
    for (int64_t i = 0; i < kCount; ++i)
        values[static_cast<size_t>(i)] = static_cast<float>(i % 4099) * 0.37f - 700;
    for (const DType stored : {DType::f32, DType::bf16, DType::f16}) {
        const std::string path = directory_.path() + "/typed.safetensors";
        write_safetensors(path, std::vector<TensorInfo>{{"w", {kCount}}}, stored,
                          [&](size_t, const Sink& sink) { sink(values); });
        const Weights weights(path);
        const StoredTensor& tensor = *weights.find("w");
        std::vector<float> there(kCount);
        weights.read(tensor, 0, there);
        for (const DType type : {DType::f32, DType::bf16, DType::f16}) {
            TensorsAhead ahead(team_);
            ahead.want({&weights, &tensor, kCount * size_of(stored), {}}, 0,
                       kCount * size_of(stored));
            ahead.end_step();
            ahead.next();
            const auto width = static_cast<size_t>(size_of(type));
            std::vector<std::byte> expected(kCount * width), found(5 * width), all(kCount * width);
            convert(there, type, "w", expected.data());
            ahead.read_as(tensor, 0, type, all);
            EXPECT_TRUE(all == expected) << dtype_name(stored) << " as " << dtype_name(type);
            ahead.read_as(tensor, kCount - 5, type, found);
            EXPECT_TRUE(std::ranges::equal(found, std::span(expected).last(5 * width)));
        }
    }
    values[4] = 70000;
    const std::string path = directory_.path() + "/large.safetensors";
    write_safetensors(path, std::vector<TensorInfo>{{"w", {kCount}}}, DType::f32,
                      [&](size_t, const Sink& sink) { sink(values); });
    const Weights weights(path);
    TensorsAhead ahead(team_);
    ahead.want({&weights, weights.find("w"), kCount * 4, {}}, 0, 40);
    ahead.end_step();
    ahead.next();
    std::vector<std::byte> halves(20);
    EXPECT_THROW(ahead.read_as(*weights.find("w"), 0, DType::f16, halves), Error);
}

TEST_F(TensorsAheadTest, NamesTheTensorOfAFlippedBit) {
    int64_t header = shard_.bytes;
    for (const ArraySum& array : shard_.arrays) header -= array.bytes;
    int64_t begin = header;
    for (size_t t = 0; t < kBytes.size(); ++t) {
        for (const int64_t at : {int64_t{0}, kBytes[t] / 2, kBytes[t] - 1}) {
            flip(begin + at);
            const Weights weights(path_);
            EXPECT_THAT(refused(weights, t, true), testing::HasSubstr(path_ + ": " + name(t)));
            EXPECT_EQ(refused(weights, t, false), "");  // nothing is known of it
            flip(begin + at);
        }
        const Weights weights(path_);
        EXPECT_EQ(refused(weights, t, true), "");
        begin += kBytes[t];
    }
}

// A file in the place of the one that was summed may have tensors of other sizes.
TEST_F(TensorsAheadTest, RefusesATensorOfMoreStripesThanChecksums) {
    const Weights weights(path_);
    const size_t last = kBytes.size() - 1;
    for (const size_t sums : {size_t{1}, shard_.arrays[last].stripes.size() - 1}) {
        TensorSource of = source(weights, last);
        of.stripes = of.stripes.first(sums);
        TensorsAhead ahead(team_);
        try {
            ahead.want(of, 0, kBytes[last]);
            ADD_FAILURE() << sums;
        } catch (const Error& error) {
            EXPECT_EQ(error.trouble(), Trouble::io);
            EXPECT_THAT(error.what(), testing::HasSubstr(path_ + ": " + name(last)));
        }
    }
}

TEST_F(TensorsAheadTest, NoticesThatTheFileWasWrittenToOrCut) {
    const Weights weights(path_);
    flip(shard_.bytes - 1);
    EXPECT_THAT(refused(weights, 0, false), testing::HasSubstr("changed while they were read"));
    std::filesystem::resize_file(path_, static_cast<uintmax_t>(shard_.bytes - 4 * kMiB));
    EXPECT_THAT(refused(weights, kBytes.size() - 1, false), testing::HasSubstr(path_));
}

// Given up in the middle, transfers under way.
TEST_F(TensorsAheadTest, MayBeLeft) {
    const Weights weights(path_);
    TensorsAhead ahead(team_);
    for (size_t t = 0; t < kBytes.size(); ++t) {
        ahead.want(source(weights, t), 0, kBytes[t]);
        ahead.end_step();
    }
    ahead.next();
}

TEST_F(TensorsAheadTest, FilesAreWrittenSideBySide) {
    FileWriter writer;
    std::vector<std::unique_ptr<ArrayFile>> files;
    std::vector<NextBytes> next;
    std::vector<std::vector<std::byte>> bytes;
    for (size_t t = 0; t < kBytes.size(); ++t) {
        const std::string file = directory_.path() + "/" + name(t);
        files.push_back(std::make_unique<ArrayFile>(
            writer, file, std::vector<ArrayInfo>{{name(t), "U8", {kBytes[t]}, kBytes[t]}}));
        bytes.emplace_back();
        for (int64_t at = 0; at < kBytes[t]; ++at) bytes.back().push_back(byte_of(t, at));
    }
    for (size_t t = 0; t < kBytes.size(); ++t) next.push_back({files[t].get(), bytes[t]});
    write_side_by_side(std::move(next), team_);
    for (size_t t = 0; t < kBytes.size(); ++t) {
        const Shard shard = files[t]->finish();
        EXPECT_EQ(shard.arrays.front().stripes, shard_.arrays[t].stripes);
        const Weights weights(directory_.path() + "/" + name(t));
        EXPECT_EQ(weights.find(name(t))->offset % 4096, 0);  // its stripes are whole blocks
        std::vector<std::byte> read(bytes[t].size());
        weights.read_bytes(*weights.find(name(t)), 0, read);
        EXPECT_EQ(read, bytes[t]);
    }
}

// More files than there are blocks for a few, as one of every rank's errors.
TEST_F(TensorsAheadTest, ManyFilesAreWrittenSideBySide) {
    constexpr int64_t kFiles = 100, kFileBytes = 2 * kMiB + 3;
    FileWriter writer(kFiles);
    std::vector<std::byte> bytes(static_cast<size_t>(kFileBytes));
    for (int64_t at = 0; at < kFileBytes; ++at) bytes[static_cast<size_t>(at)] = byte_of(0, at);
    std::vector<std::unique_ptr<ArrayFile>> files;
    std::vector<NextBytes> next;
    for (int64_t f = 0; f < kFiles; ++f) {
        files.push_back(std::make_unique<ArrayFile>(
            writer, directory_.path() + "/many-" + std::to_string(f),
            std::vector<ArrayInfo>{{"w", "U8", {kFileBytes}, kFileBytes}}));
        next.push_back({files.back().get(), bytes});
    }
    write_side_by_side(std::move(next), team_);
    for (const auto& file : files) {
        const Shard shard = file->finish();
        check_shard(directory_.path(), shard, [](int64_t) {});
    }
}

}  // namespace
}  // namespace ferry::checkpoint
