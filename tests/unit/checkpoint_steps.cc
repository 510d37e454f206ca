// Manifests, and directories of checkpoints: what is read back is what was written, what is damaged
// is named, and what goes is what the configuration says.
#include <gtest/gtest.h>
#include <spdlog/fmt/fmt.h>
#include <unistd.h>

#include <array>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>

#include "base/checksum.h"
#include "base/files.h"
#include "checkpoint/array_file.h"
#include "checkpoint/saved.h"
#include "checkpoint/steps.h"
#include "checkpoint/stripe_sums.h"
#include "checkpoint_sample.h"
#include "ferry/error.h"
#include "tests/support/temporary_directory.h"

namespace ferry::checkpoint {
namespace {

using test::sample_manifest;
using test::write_sample;

Error error_of(const std::function<void()>& work) {
    try {
        work();
    } catch (const Error& error) {
        return error;
    }
    ADD_FAILURE() << "nothing was thrown";
    return {Trouble::internal, {.what = ""}};
}

std::string text_of(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
}

void flip(const std::string& path, int64_t at) {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(at);
    const char byte = static_cast<char>(file.get() ^ 1);
    file.seekp(at);
    file.put(byte);
}

const uint64_t kSumOfFive = sum_of(std::array<uint64_t, 1>{5});

TEST(Manifest, IsReadAsItWasWritten) {
    Manifest m = sample_manifest(17);
    m.last.loss = 0.1 + 0.2;
    m.last.gradient_norm = std::numeric_limits<double>::quiet_NaN();  // of a skipped step
    m.held_back = {17, 1e-300};
    m.shards = {{"a.safetensors", 24, 0xfedcba9876543210, {{"w", 8, kSumOfFive, {5}}}},
                {"config.json", 2, 3, {}}};
    const std::string text = write_manifest(m);
    const Manifest read = read_manifest(text, "m");
    EXPECT_EQ(write_manifest(read), text);
    EXPECT_EQ(read.last.loss, m.last.loss);
    EXPECT_TRUE(std::isnan(read.last.gradient_norm));
    EXPECT_EQ(read.held_back->loss, 1e-300);
    EXPECT_EQ(read.shards[0].checksum, 0xfedcba9876543210);
    EXPECT_EQ(read.shards[0].arrays[0].stripes, std::vector<uint64_t>{5});
    EXPECT_EQ(read.training, m.training);
    EXPECT_EQ(read.bytes(), 26);
}

// Arrays were summed whole, and so was each file.
TEST(Manifest, OfTheVersionBeforeIsRead) {
    Manifest m = sample_manifest(17);
    m.version = 1;
    m.shards = {{"a.safetensors", 24, 9, {{"w", 8, 1, {}}}}};
    const Manifest read = read_manifest(write_manifest(m), "m");
    EXPECT_EQ(read.version, 1);
    EXPECT_EQ(read.shards[0].arrays[0].checksum, 1);
    EXPECT_FALSE(read.shards[0].in_stripes());
}

std::string sealed_anew(std::string text) {
    const std::string end = "\"\n}\n";
    text.resize(text.size() - 16 - end.size());
    return text + fmt::format("{:016x}", checksum(std::as_bytes(std::span(text)))) + end;
}

// One of before they were counted apart.
TEST(Manifest, WithoutACountOfMomentsHasTheWeights) {
    Manifest m = sample_manifest(17);
    m.moment_updates = 5;
    EXPECT_EQ(read_manifest(write_manifest(m), "m").moment_updates, 5);
    std::string text = write_manifest(m);
    const std::string line = " \"moment_updates\": 5,\n";
    text.erase(text.find(line), line.size());
    EXPECT_EQ(read_manifest(sealed_anew(text), "m").moment_updates, m.updates);
}

// Its length is the same, its tensors have other sizes: the checksums are of other stripes.
TEST(ModelFiles, ReplacedByOthersOfTheSameLengthAreRefused) {
    const TemporaryDirectory directory;
    Steps steps(directory.path());
    write_sample(steps, 3);
    const std::string step = directory.path() + "/" + name_of_step(3),
                      path = step + "/model.safetensors";
    require_model_files(step);
    require_model_files(path);
    const auto length = std::filesystem::file_size(path);
    std::filesystem::remove(path);
    const std::vector<float> values(10);
    ArrayFile other(path, {{"w", "F32", {2, 2}, 16}, {"v", "F32", {6}, 24}});
    other.write(std::as_bytes(std::span(values)));
    other.finish();
    ASSERT_EQ(std::filesystem::file_size(path), length);
    for (const std::string& named : {step, path}) {
        const Error error = error_of([&] { require_model_files(named); });
        EXPECT_EQ(error.trouble(), Trouble::io);
        EXPECT_EQ(error.problem().where, path + ": its header");
        EXPECT_NE(error.problem().remedy.find("remove its manifest.json"), std::string::npos);
    }
}

TEST(Manifest, EveryFlippedBitIsNoticed) {
    Manifest m = sample_manifest(3);
    m.shards = {{"a.safetensors", 24, 7, {{"w", 8, kSumOfFive, {5}}}}};
    const std::string text = write_manifest(m);
    for (size_t at = 0; at < text.size(); ++at) {
        for (int bit = 0; bit < 8; ++bit) {
            std::string damaged = text;
            damaged[at] = static_cast<char>(damaged[at] ^ (1 << bit));
            EXPECT_THROW(read_manifest(damaged, "m"), Error) << at << ' ' << bit;
        }
        EXPECT_THROW(read_manifest(text.substr(0, at), "m"), Error) << at;
    }
}

TEST(Manifest, OfANewerVersionIsRefusedByItsVersion) {
    Manifest m = sample_manifest(3);
    m.version = 3;
    m.ferry = "9.1";
    const Error error = error_of([&] { read_manifest(write_manifest(m), "there"); });
    EXPECT_EQ(error.trouble(), Trouble::usage);
    EXPECT_NE(std::string(error.what()).find("version 3"), std::string::npos);
    EXPECT_NE(std::string(error.what()).find("9.1"), std::string::npos);
}

TEST(Manifest, NamesNoFileElsewhere) {
    for (const char* file : {"../a", "/etc/passwd", "", "a/b", ".."}) {
        Manifest m = sample_manifest(3);
        m.shards = {{file, 24, 7, {}}};
        EXPECT_THROW(read_manifest(write_manifest(m), "m"), Error) << file;
    }
    Manifest m = sample_manifest(3);
    m.shards = {{"a", 24, 7, {{"w", 20, 1}, {"v", 20, 1}}}};  // more than the file has
    EXPECT_THROW(read_manifest(write_manifest(m), "m"), Error);
}

TEST(Steps, NamesGoByTheStep) {
    EXPECT_EQ(name_of_step(100), "step-00000100");
    EXPECT_EQ(step_of_name("step-00000100"), 100);
    EXPECT_EQ(step_of_name("step-1234567890"), 1234567890);
    for (const char* other : {"step-100", "step-0000010x", "step-", "step-00000100.part",
                              "step--0000100", "before-1", "step-99999999999999999999"})
        EXPECT_EQ(step_of_name(other), std::nullopt) << other;
}

TEST(Steps, WhatGoesIsWhatNothingKeeps) {
    std::vector<Candidate> all;
    for (int64_t step = 10; step <= 100; step += 10) all.push_back({step, 1.0 / double(step)});
    all[2].loss = 0.001;  // the best is step 30
    all[5].loss = std::nullopt;
    EXPECT_EQ(steps_to_remove(all, {.last = 2}),
              (std::vector<int64_t>{10, 20, 30, 40, 50, 60, 70, 80}));
    EXPECT_EQ(steps_to_remove(all, {.last = 1, .every = 40}),
              (std::vector<int64_t>{10, 20, 30, 50, 60, 70, 90}));
    EXPECT_EQ(steps_to_remove(all, {.last = 1, .best = 2}),
              (std::vector<int64_t>{10, 20, 40, 50, 60, 70, 80, 90}));
    EXPECT_EQ(steps_to_remove(all, {.last = 0}).size(), 9);  // the newest always stays
    EXPECT_EQ(steps_to_remove({}, {.last = 2}).size(), 0);
}

TEST(Steps, TheDirectoryHasOneWriter) {
    const TemporaryDirectory directory;
    const Steps steps(directory.path());
    const Error error = error_of([&] { const Steps other(directory.path()); });
    EXPECT_EQ(error.trouble(), Trouble::usage);
    EXPECT_NE(std::string(error.what()).find(directory.path()), std::string::npos);
}

TEST(Steps, ADirectoryThatWentAwayIsAnError) {
    const TemporaryDirectory directory;
    Steps steps(directory.path());
    std::filesystem::remove_all(directory.path());
    EXPECT_EQ(error_of([&] { write_sample(steps, 1); }).trouble(), Trouble::io);
    std::filesystem::create_directory(directory.path());  // another one
    EXPECT_EQ(error_of([&] { write_sample(steps, 1); }).trouble(), Trouble::io);
    EXPECT_TRUE(std::filesystem::is_empty(directory.path()));
}

TEST(Steps, AStepThatIsWrittenAgainIsReplaced) {
    const TemporaryDirectory directory;
    Steps steps(directory.path());
    write_sample(steps, 1, 1);
    write_sample(steps, 1, 2);
    const Saved saved(steps_in(directory.path()).at(0).path);
    float value = 0;
    saved.read(*saved.find("w"), 0, std::as_writable_bytes(std::span(&value, 1)));
    EXPECT_EQ(value, 2);
    EXPECT_EQ(std::distance(std::filesystem::directory_iterator(directory.path()), {}), 1);
}

TEST(Steps, WhatFailsLeavesWhatWasThere) {
    const TemporaryDirectory directory;
    Steps steps(directory.path());
    write_sample(steps, 1);
    EXPECT_THROW(steps.add(sample_manifest(2),
                           [](const std::string& draft) -> std::vector<Shard> {
                               write_text_shard(draft, "a", "b");
                               throw Error(Trouble::io, {.what = "the disk is full"});
                           }),
                 Error);
    EXPECT_EQ(std::distance(std::filesystem::directory_iterator(directory.path()), {}), 1);
}

TEST(Steps, FinishedOnesMoveAside) {
    const TemporaryDirectory directory;
    Steps steps(directory.path());
    write_sample(steps, 1);
    write_sample(steps, 2);
    const std::string first = steps.move_aside();
    EXPECT_EQ(steps_in(directory.path()).size(), 0);
    EXPECT_EQ(steps_in(first).size(), 2);
    write_sample(steps, 1);
    EXPECT_NE(steps.move_aside(), first);
    EXPECT_EQ(steps_in(first).size(), 2);
}

TEST(Saved, EveryFlippedByteIsNamedByFileAndTensor) {
    const TemporaryDirectory directory;
    Steps steps(directory.path());
    write_sample(steps, 1);
    const std::string path = steps_in(directory.path()).at(0).path;
    const auto check = [&] {
        const Saved saved(path);
        for (const Shard& shard : saved.manifest().shards) check_shard(path, shard, [](int64_t) {});
    };
    check();
    for (const Shard& shard : manifest_of(path).shards) {
        const std::string file = path + "/" + shard.file;
        int64_t header = shard.bytes;
        for (const ArraySum& array : shard.arrays) header -= array.bytes;
        const std::string bytes = text_of(file);
        for (int64_t at = 0; at < shard.bytes; ++at) {
            constexpr int64_t kSome = 97;  // of the thousands of spaces behind a header
            if (at < header && at % kSome != 0 && bytes[static_cast<size_t>(at)] == ' ') continue;
            flip(file, at);
            const std::string text = error_of(check).what();
            EXPECT_NE(text.find(shard.file), std::string::npos) << text;
            int64_t begin = header;
            for (const ArraySum& array : shard.arrays) {
                if (at >= begin && at < begin + array.bytes) {
                    EXPECT_NE(text.find(file + ": " + array.name), std::string::npos) << text;
                }
                begin += array.bytes;
            }
            flip(file, at);
        }
        std::filesystem::resize_file(file, static_cast<uintmax_t>(shard.bytes - 1));
        EXPECT_NE(std::string(error_of(check).what()).find("truncated"), std::string::npos);
        std::filesystem::remove(file);
        EXPECT_NE(std::string(error_of(check).what()).find("missing"), std::string::npos);
        std::ofstream(file, std::ios::binary) << bytes;
        check();
    }
}

// A manifest with a checksum of its own that is right, and that says something else.
void rewrite_manifest(const std::string& path, const std::function<void(Manifest&)>& change) {
    Manifest manifest = manifest_of(path);
    change(manifest);
    std::ofstream(path + "/" + kManifestName, std::ios::binary) << write_manifest(manifest);
}

TEST(Saved, SizesAreThoseOfTheHeader) {
    const TemporaryDirectory directory;
    Steps steps(directory.path());
    const std::string path = directory.path() + "/" + name_of_step(1);
    const auto refused = [&](const std::function<void(std::vector<ArraySum>&)>& change) {
        write_sample(steps, 1);
        rewrite_manifest(path, [&](Manifest& m) { change(m.shards.at(0).arrays); });
        const Error error = error_of([&] { const Saved saved(path); });
        EXPECT_EQ(error.trouble(), Trouble::io) << error.what();
        const std::string text = error.what();
        EXPECT_NE(text.find("model.safetensors: "), std::string::npos) << text;
        EXPECT_NE(text.find("elsewhere in its shard"), std::string::npos) << text;
    };
    refused([](auto& arrays) { std::swap(arrays.at(0).name, arrays.at(1).name); });
    refused([](auto& arrays) { std::swap(arrays.at(0), arrays.at(1)); });
    refused([](auto& arrays) {
        arrays.at(0).bytes -= 4;
        arrays.at(1).bytes += 4;
    });
}

TEST(Saved, AnArrayOfNoBytesIsReadWhereverItStands) {
    const std::string none = R"("none":{"dtype":"F32","shape":[0],"data_offsets":[%,%]})",
                      w = R"("w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]})";
    const auto none_at = [&](char at) {
        std::string text = none;
        std::ranges::replace(text, '%', at);
        return text;
    };
    const std::array<std::byte, 8> values{};
    const std::vector<uint64_t> stripes{checksum(values)};
    const ArraySum empty{"none", 0, sum_of({}), {}}, full{"w", 8, sum_of(stripes), stripes};
    struct Layout {
        std::string header{};
        std::vector<ArraySum> arrays{};
    };
    const std::array<Layout, 3> layouts{{{none_at('0') + "," + w, {empty, full}},
                                         {w + "," + none_at('8'), {full, empty}},
                                         {none_at('0'), {empty}}}};
    for (const Layout& layout : layouts) {
        const TemporaryDirectory directory;
        Steps steps(directory.path());
        steps.add(sample_manifest(1), [&](const std::string& draft) {
            const std::string header = "{" + layout.header + "}";
            std::string text(8, '\0');
            text[0] = static_cast<char>(header.size());
            text += header;
            const uint64_t sum = checksum(std::as_bytes(std::span(text)));
            if (layout.arrays.size() > 1) text.append(8, '\0');
            std::ofstream(draft + "/model.safetensors", std::ios::binary) << text;
            return std::vector<Shard>{{"model.safetensors", std::ssize(text), sum, layout.arrays}};
        });
        const std::string path = directory.path() + "/" + name_of_step(1);
        const Saved saved(path);
        ASSERT_NE(saved.find("none"), nullptr);
        EXPECT_EQ(saved.find("none")->bytes, 0);
        check_shard(path, saved.manifest().shards.at(0), [](int64_t) {});
        // The header is proved too: the name becomes "oone".
        const std::string file = path + "/model.safetensors";
        flip(file, static_cast<int64_t>(text_of(file).find("none")));
        const std::string text = error_of([&] { const Saved again(path); }).what();
        EXPECT_NE(text.find("its header"), std::string::npos) << text;
    }
}

TEST(Saved, ItsNameIsThatOfItsStep) {
    const TemporaryDirectory directory;
    Steps steps(directory.path());
    write_sample(steps, 2);
    write_sample(steps, 4);
    const std::string path = directory.path() + "/" + name_of_step(4),
                      other = directory.path() + "/" + name_of_step(99),
                      free = directory.path() + "/best";
    std::filesystem::rename(path, other);
    for (const char* end : {"", "/"}) {
        const Error error = error_of([&] { const Saved saved(other + end); });
        EXPECT_EQ(error.trouble(), Trouble::usage);
        EXPECT_NE(std::string(error.what()).find("is of step 4"), std::string::npos);
        EXPECT_NE(std::string(error.what()).find("step 99"), std::string::npos);
    }
    EXPECT_EQ(whole_before(other), directory.path() + "/" + name_of_step(2));
    std::filesystem::rename(other, free);  // the name of no step
    EXPECT_EQ(Saved(free).manifest().step, 4);
}

TEST(Saved, TheNewestThatIsWholeIsFound) {
    const TemporaryDirectory directory;
    Steps steps(directory.path());
    for (int64_t step = 1; step <= 4; ++step) write_sample(steps, step);
    const auto all = steps_in(directory.path());
    EXPECT_EQ(whole_before(all[3].path), all[2].path);
    flip(all[2].path + "/model.safetensors", 100);
    std::filesystem::remove(all[1].path + "/" + kManifestName);
    EXPECT_EQ(whole_before(all[3].path + "/"), all[0].path);
    EXPECT_EQ(whole_before(all[0].path), std::nullopt);
}

}  // namespace
}  // namespace ferry::checkpoint
