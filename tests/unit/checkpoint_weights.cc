// Safetensors written and read back, and every way a file can be wrong.
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <thread>
#include <utility>

#include "checkpoint/checkpoint.h"
#include "ferry/error.h"
#include "tests/support/temporary_directory.h"

namespace ferry::checkpoint {
namespace {

class WeightsTest : public testing::Test {
protected:
    std::string path(const std::string& name) const { return directory / name; }

    // A file of this header and so many bytes of data.
    std::string write(const std::string& name, const std::string& header, size_t data_bytes) const {
        std::ofstream file(path(name), std::ios::binary);
        const uint64_t length = header.size();
        file.write(reinterpret_cast<const char*>(&length), sizeof length);
        file << header << std::string(data_bytes, '\1');
        return path(name);
    }

    void expect_refused(const std::string& from, Trouble trouble,
                        std::initializer_list<const char*> said) const {
        try {
            const Weights weights(from);
            FAIL() << from << " was read";
        } catch (const Error& error) {
            EXPECT_EQ(error.trouble(), trouble) << error.what();
            for (const char* text : said)
                EXPECT_NE(std::string(error.what()).find(text), std::string::npos)
                    << text << " in: " << error.what();
        }
    }
    void expect_damaged(const std::string& header, size_t data_bytes,
                        std::initializer_list<const char*> said) const {
        SCOPED_TRACE(header.substr(0, 200));
        expect_refused(write("bad.safetensors", header, data_bytes), Trouble::io, said);
    }

    // Not "remove one" and "fetch it again" in one breath.
    static void refused_with_one_remedy(const std::string& from) {
        try {
            const Weights weights(from);
            FAIL() << from << " was read";
        } catch (const Error& error) {
            const std::string said = error.what();
            EXPECT_EQ(said.find("remove"), std::string::npos) << said;
            EXPECT_EQ(said.find("fetch"), std::string::npos) << said;
        }
    }

    const TemporaryDirectory temporary{};
    const std::filesystem::path directory = temporary.path();
};

std::vector<float> values_of(size_t tensor, int64_t count) {
    std::vector<float> values;
    for (int64_t i = 0; i < count; ++i)
        values.push_back(static_cast<float>(i) * 0.37f - static_cast<float>(tensor) * 5);
    return values;
}

// In pieces of three values.
void source(std::span<const TensorInfo> tensors, size_t i, const Sink& sink) {
    const std::vector<float> values = values_of(i, tensors[i].count());
    for (size_t first = 0; first < values.size(); first += 3)
        sink(std::span(values).subspan(first, std::min<size_t>(3, values.size() - first)));
}

const std::vector<TensorInfo> kTensors{{"b.weight", {4, 5}}, {"a.weight", {7}}, {"c", {2, 3, 2}}};

float rounded(float value, DType type) {
    if (type == DType::f32) return value;
    return type == DType::bf16 ? from_bf16(to_bf16(value)) : from_f16(to_f16(value));
}

TEST_F(WeightsTest, what_is_written_is_read_back_in_any_part_and_type) {
    for (const DType type : {DType::f32, DType::bf16, DType::f16}) {
        write_safetensors(path("x.safetensors"), kTensors, type,
                          [&](size_t i, const Sink& sink) { source(kTensors, i, sink); });
        const Weights weights(path("x.safetensors"));
        ASSERT_EQ(weights.tensors().size(), 3u);
        EXPECT_EQ(weights.find("b"), nullptr);
        for (size_t i = 0; i < kTensors.size(); ++i) {
            const StoredTensor* stored = weights.find(kTensors[i].name);
            ASSERT_NE(stored, nullptr);
            EXPECT_EQ(stored->shape, kTensors[i].shape);
            EXPECT_EQ(stored->type, type);
            const std::vector<float> expected = values_of(i, stored->count());
            for (int64_t first = 0; first < stored->count(); ++first) {
                std::vector<float> part(static_cast<size_t>(stored->count() - first));
                weights.read(*stored, first, part);
                for (size_t j = 0; j < part.size(); ++j)
                    ASSERT_EQ(part[j], rounded(expected[static_cast<size_t>(first) + j], type));
            }
        }
    }
}

std::string bytes_of(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
}

// Who puts values where they go to in the file, block by block, writes what a source gives.
TEST_F(WeightsTest, what_is_filled_in_is_what_is_given) {
    std::vector<TensorInfo> tensors = kTensors;
    tensors.push_back({"larger.than.blocks", {3, 500'001}});
    const auto values = [&](size_t i) {
        std::vector<float> all = values_of(i, tensors[i].count());
        for (float& value : all) value = std::fmod(value, 60000.0f);
        return all;
    };
    for (const DType type : {DType::f32, DType::bf16, DType::f16}) {
        SCOPED_TRACE(dtype_name(type));
        write_safetensors(path("given.safetensors"), tensors, type,
                          [&](size_t i, const Sink& sink) { sink(values(i)); });
        const auto fill = [&](size_t i, int64_t first, std::span<std::byte> room) {
            const std::vector<float> all = values(i);
            const auto count = room.size() / static_cast<size_t>(size_of(type));
            convert(std::span(all).subspan(static_cast<size_t>(first), count), type,
                    tensors[i].name, room.data());
        };
        write_safetensors(path("filled.safetensors"), tensors, type, fill);
        EXPECT_TRUE(bytes_of(path("filled.safetensors")) == bytes_of(path("given.safetensors")));
        NewFiles made;
        write_model(directory, tensors, type, 80, fill, made);
        const Weights weights(directory);
        EXPECT_EQ(weights.tensors().size(), tensors.size());
        std::vector<float> c(12);
        weights.read(*weights.find("c"), 0, c);
        EXPECT_EQ(c[11], rounded(values(2)[11], type));
    }
    EXPECT_FALSE(std::filesystem::exists(path("model.safetensors.index.json")));
}

TEST_F(WeightsTest, shards_hold_what_fits_and_an_index_names_them) {
    // 80, 28 and 48 bytes.
    NewFiles made;
    write_model(
        directory, kTensors, DType::f32, 80,
        [&](size_t i, const Sink& sink) { source(kTensors, i, sink); }, made);
    made.keep();
    EXPECT_TRUE(std::filesystem::exists(path("model-00001-of-00002.safetensors")));
    EXPECT_TRUE(std::filesystem::exists(path("model-00002-of-00002.safetensors")));
    const Weights weights(directory);
    ASSERT_EQ(weights.tensors().size(), 3u);
    EXPECT_NE(weights.file_of(*weights.find("b.weight")), weights.file_of(*weights.find("c")));
    EXPECT_EQ(weights.file_of(*weights.find("a.weight")), weights.file_of(*weights.find("c")));
    std::vector<float> c(12);
    weights.read(*weights.find("c"), 0, c);
    EXPECT_EQ(c, values_of(2, 12));
}

TEST_F(WeightsTest, one_file_where_all_fits) {
    NewFiles made;
    write_model(
        directory, kTensors, DType::bf16, 1000,
        [&](size_t i, const Sink& sink) { source(kTensors, i, sink); }, made);
    made.keep();
    EXPECT_TRUE(std::filesystem::exists(path("model.safetensors")));
    EXPECT_FALSE(std::filesystem::exists(path("model.safetensors.index.json")));
    const Weights weights(directory);
    EXPECT_EQ(weights.tensors().size(), 3u);
    EXPECT_EQ(weights.find(kTensors[0].name)->offset % 4096, 0);
}

TEST_F(WeightsTest, a_file_that_ends_early_leaves_nothing) {
    EXPECT_THROW(write_safetensors(path("x.safetensors"), kTensors, DType::f32,
                                   [](size_t, const Sink&) { throw std::runtime_error("no"); }),
                 std::runtime_error);
    EXPECT_TRUE(std::filesystem::is_empty(directory));
}

// Both end well, so both must be whole, whoever comes last.
TEST_F(WeightsTest, two_writers_of_one_name_do_not_mix) {
    std::ofstream(path("x.safetensors.part")) << "somebody's own";
    const auto value = [](float one) {
        return [one](size_t i, const Sink& sink) {
            sink(std::vector<float>(static_cast<size_t>(kTensors[i].count()), one));
        };
    };
    bool inside = false;
    write_safetensors(path("x.safetensors"), kTensors, DType::f32, [&](size_t i, const Sink& sink) {
        if (!std::exchange(inside, true))
            write_safetensors(path("x.safetensors"), kTensors, DType::bf16, value(2));
        value(1)(i, sink);
    });
    const Weights weights(path("x.safetensors"));
    for (const TensorInfo& tensor : kTensors) {
        std::vector<float> read(static_cast<size_t>(tensor.count()));
        weights.read(*weights.find(tensor.name), 0, read);
        EXPECT_EQ(read, std::vector<float>(read.size(), 1));
    }
    std::ifstream own(path("x.safetensors.part"));
    EXPECT_EQ(std::string(std::istreambuf_iterator<char>(own), {}), "somebody's own");
}

TEST_F(WeightsTest, what_changes_while_it_is_read_is_noticed) {
    const std::string file = path("x.safetensors");
    const std::function<void()> changes[] = {
        [&] { std::fstream(file, std::ios::in | std::ios::out).seekp(-1, std::ios::end) << '?'; },
        [&] {
            const auto before = std::filesystem::last_write_time(file);
            std::fstream(file, std::ios::in | std::ios::out).seekp(-1, std::ios::end) << '?';
            std::filesystem::last_write_time(file, before);
        },
        [&] { std::filesystem::resize_file(file, std::filesystem::file_size(file) + 1); },
        [&] { std::filesystem::resize_file(file, std::filesystem::file_size(file) - 1); }};
    for (const auto& change : changes) {
        write_safetensors(file, kTensors, DType::f32,
                          [&](size_t i, const Sink& sink) { source(kTensors, i, sink); });
        const Weights weights(file);
        std::vector<float> row(7);
        weights.read(*weights.find("a.weight"), 0, row);
        std::this_thread::sleep_for(std::chrono::milliseconds(20));  // a tick of the files' clock
        change();
        try {
            weights.read(*weights.find("a.weight"), 0, row);
            FAIL() << "a mix of two files was read";
        } catch (const Error& error) {
            EXPECT_EQ(error.trouble(), Trouble::io);
            EXPECT_NE(std::string(error.what()).find("changed"), std::string::npos) << error.what();
        }
    }
}

// The second shard's: the first one was whole already.
// Its bytes are as they were, as far as can be seen: nobody is told to fetch them again.
TEST_F(WeightsTest, a_link_made_while_it_is_read_is_no_damage) {
    const std::string file = path("x.safetensors");
    write_safetensors(file, kTensors, DType::f32,
                      [&](size_t i, const Sink& sink) { source(kTensors, i, sink); });
    const Weights weights(file);
    std::vector<float> row(7);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));  // a tick of the files' clock
    std::filesystem::create_hard_link(file, path("linked"));
    try {
        weights.read(*weights.find("a.weight"), 0, row);
        FAIL() << "it cannot be told from a write with the time set back";
    } catch (const Error& error) {
        EXPECT_EQ(error.trouble(), Trouble::io);
        EXPECT_NE(error.problem().measured.find("linked"), std::string::npos) << error.what();
        EXPECT_NE(error.problem().remedy.find("start again"), std::string::npos) << error.what();
    }
}

TEST_F(WeightsTest, a_value_that_fp16_has_no_room_for_is_named_and_leaves_nothing) {
    const auto write = [&](float value) {
        NewFiles made;
        write_model(
            directory, kTensors, DType::f16, 40,
            [&](size_t i, const Sink& sink) {
                std::vector<float> values(static_cast<size_t>(kTensors[i].count()), 1.0f);
                if (i == 1) values[3] = value;
                sink(values);
            },
            made);
        made.keep();
    };
    for (const float value : {65520.0f, -1e20f}) {
        try {
            write(value);
            FAIL() << value << " was written";
        } catch (const Error& error) {
            EXPECT_EQ(error.trouble(), Trouble::usage);
            for (const char* said : {"a.weight", value > 0 ? "65520" : "-1e+20", "bf16"})
                EXPECT_NE(std::string(error.what()).find(said), std::string::npos) << error.what();
        }
        EXPECT_TRUE(std::filesystem::is_empty(directory));
    }
    write(65519.0f);
    const Weights weights(directory);
    std::vector<float> row(7);
    weights.read(*weights.find("a.weight"), 0, row);
    EXPECT_EQ(row[3], 65504);
}

constexpr const char* kOne = R"("a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]})";
std::string with(const std::string& more) { return std::string("{") + kOne + "," + more + "}"; }

TEST_F(WeightsTest, damaged_headers_are_named) {
    expect_damaged("{,", 8, {"bad.safetensors: byte 2", "not JSON"});
    expect_damaged("[1]", 8, {"no object"});
    expect_damaged(with(kOne), 8, {"\"a\" is given twice", "bad.safetensors: byte"});
    expect_damaged(R"({"a":{"dtype":"F32","shape":[2]}})", 8, {"entry", ": a"});
    expect_damaged(R"({"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}})", 8,
                   {"shape and its bytes differ", "[3]"});
    expect_damaged(R"({"a":{"dtype":"F32","shape":[-2,-1],"data_offsets":[0,8]}})", 8,
                   {"entry", ": a", "-2"});
    expect_damaged(R"({"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]}})",
                   0, {"differ"});
    expect_damaged(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}})", 8, {"differ"});
    expect_damaged(with(R"("b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]})"), 12,
                   {"overlap", ": b"});
    expect_damaged(with(R"("b":{"dtype":"F32","shape":[2],"data_offsets":[12,20]})"), 20,
                   {"gap", ": b"});
    expect_damaged(std::string("{") + kOne + "}", 7, {"truncated"});
    expect_damaged(std::string("{") + kOne + "}", 9, {"longer"});
    for (const char* shape :
         {"2", "[2.5]", "[2.0]", "[true]", "\"2\"", "[[2]]", "[9223372036854775808]"})
        expect_damaged(
            std::string(R"({"a":{"dtype":"F32","data_offsets":[0,8],"shape":)") + shape + "}}", 8,
            {"entry", "whole numbers"});
    for (const char* offsets :
         {"[0.5,8.5]", "[-8,0]", "[0,9223372036854775807]", "[18446744073709551615,7]"})
        expect_damaged(
            std::string(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":)") + offsets + "}}", 8,
            {"entry", "whole numbers"});
    for (const char* offsets : {"[]", "[8]", "[0,4,8]"})
        expect_damaged(
            std::string(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":)") + offsets + "}}", 8,
            {"entry", "data_offsets", "begin and end"});
    expect_damaged(R"({"a":{"dtype":"U8","shape":[4611686018427387904],)"
                   R"("data_offsets":[0,4611686018427387904]}})",
                   8, {"truncated", "46116860184273"});
    expect_damaged("{\"\xff\"}", 8, {"not JSON", "byte 3"});
    std::ofstream(path("short.safetensors")) << "abc";
    expect_refused(path("short.safetensors"), Trouble::io, {"truncated"});
    std::ofstream(path("huge.safetensors")) << std::string(64, '\x7f');
    expect_refused(path("huge.safetensors"), Trouble::io, {"huge.safetensors", "header of"});
}

TEST_F(WeightsTest, headers_are_bounded) {
    const auto opened = [](const char* bracket, size_t count) {
        std::string all;
        for (size_t i = 0; i < count; ++i) all += bracket;
        return all;
    };
    expect_damaged(opened("[", 10'000'000), 8, {"nested too deep", "bad.safetensors: byte 65"});
    expect_damaged(opened("{\"a\":", 100'000), 8, {"nested too deep"});
    for (const char* key : {"dtype", "shape", "data_offsets", "more"})
        expect_damaged(R"({"a":{")" + std::string(key) + "\":" + opened("[", 1'000'000), 8,
                       {"nested too deep", "bad.safetensors: byte"});
    // As many values as no file of weights has, which would take a gigabyte.
    std::string many = R"({"a":{"dtype":"F32","data_offsets":[0,8],"shape":[2)";
    for (int i = 0; i < 4'100'000; ++i) many += ",1";
    expect_damaged(many + "]}}", 8, {"too many values"});
    expect_damaged(std::string("{") + kOne + std::string("}\0\0", 3), 8, {"NUL byte", "byte"});
    expect_damaged(R"({"a\u0000b":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", 8,
                   {"NUL character"});
    expect_damaged(R"({"a":{"dtype":"F32","shape":[1e999],"data_offsets":[0,8]}})", 8, {"1e999"});
    expect_damaged(R"({"a":{"dtype":7,"shape":[2],"data_offsets":[0,8]}})", 8, {"entry", ": a"});
    expect_damaged(R"({"a":7})", 8, {"entry", ": a"});
}

// Errors show only a part of a user's file.
TEST_F(WeightsTest, errors_stay_short) {
    const std::string much(50'000'000, 'x');
    for (const std::string& header :
         {"{\"" + much + R"(":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}})",
          R"({"a":{"dtype":")" + much + R"(","shape":[2],"data_offsets":[8,0]}})",
          R"({"a":{"dtype":"F32","shape":")" + much + R"(","data_offsets":[0,8]}})",
          R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b)" + much}) {
        try {
            const Weights weights(write("long.safetensors", header, 8));
            FAIL();
        } catch (const Error& error) {
            EXPECT_LE(std::string(error.what()).size(), size_t{2000});
        }
    }
}

// Seconds of the processor, of the fastest of three.
template <class Work>
double seconds_of(const Work& work) {
    double best = 1e9;
    for (int i = 0; i < 3; ++i) {
        const std::clock_t begin = std::clock();
        work();
        best = std::min(best, static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC);
    }
    return best;
}

// Four times as many tensors take about four times as long: where each looks through all of them it
// is sixteen.
TEST_F(WeightsTest, many_tensors_take_linear_time) {
    const auto tensors_of = [](int count) {
        std::vector<TensorInfo> tensors;
        for (int i = 0; i < count; ++i)
            tensors.push_back({"model.layers." + std::to_string(i) + ".weight", {1}});
        return tensors;
    };
    constexpr int kFew = 10'000, kMany = 4 * kFew;
    const std::vector<TensorInfo> few = tensors_of(kFew), many = tensors_of(kMany);
    const auto write_all = [&](const std::vector<TensorInfo>& tensors) {
        write_safetensors(path("n" + std::to_string(tensors.size())), tensors, DType::f32,
                          [](size_t, const Sink& sink) { sink(std::vector<float>{1}); });
    };
    const auto read_all = [&](const std::vector<TensorInfo>& tensors) {
        EXPECT_EQ(Weights(path("n" + std::to_string(tensors.size()))).tensors().size(),
                  tensors.size());
    };
    constexpr double kMostTimes = 9;
    EXPECT_LT(seconds_of([&] { write_all(many); }),
              kMostTimes * seconds_of([&] { write_all(few); }));
    EXPECT_LT(seconds_of([&] { read_all(many); }), kMostTimes * seconds_of([&] { read_all(few); }));
    // Shards, and the index that names all of their tensors.
    const auto split = [&](const std::vector<TensorInfo>& tensors) {
        const std::string to = path("d" + std::to_string(tensors.size()));
        std::filesystem::create_directory(to);
        NewFiles made;
        write_model(
            to, tensors, DType::f32, 4 * std::ssize(tensors) / 2,
            [](size_t, const Sink& sink) { sink(std::vector<float>{1}); }, made);
        EXPECT_EQ(Weights(to).tensors().size(), tensors.size());
    };
    EXPECT_LT(seconds_of([&] { split(many); }), kMostTimes * seconds_of([&] { split(few); }));
}

TEST_F(WeightsTest, types_that_are_no_weights_are_listed_but_not_read) {
    const Weights weights(write(
        "x.safetensors", with(R"("m":{"dtype":"BOOL","shape":[3],"data_offsets":[8,11]})"), 11));
    EXPECT_FALSE(weights.find("m")->type.has_value());
    EXPECT_EQ(weights.find("m")->dtype, "BOOL");
}

// A library may save a tensor without elements; whoever asks for another shape says so.
TEST_F(WeightsTest, a_tensor_without_elements_is_one) {
    const std::pair<const char*, size_t> shapes[] = {
        {"[0]", 1}, {"[3,0]", 2}, {"[0,4611686018427387904,4611686018427387904]", 3}};
    for (const auto& [shape, sides] : shapes) {
        const std::string none =
            std::string(R"("m":{"dtype":"F32","data_offsets":[8,8],"shape":)") + shape + "}";
        const Weights weights(write("x.safetensors", with(none), 8));
        EXPECT_EQ(weights.find("m")->shape.size(), sides);
    }
    expect_damaged(with(R"("m":{"dtype":"F32","shape":[0],"data_offsets":[8,12]})"), 12,
                   {"differ", "4 bytes of F32", "[0]"});
}

TEST_F(WeightsTest, nothing_to_read) {
    expect_refused(directory, Trouble::usage, {"model.safetensors", "No such file"});
    std::ofstream(path("pytorch_model.bin")) << "PK";
    expect_refused(directory, Trouble::usage,
                   {"pickles", "/pytorch_model.bin", "safe_serialization=True"});
    std::filesystem::remove(path("pytorch_model.bin"));
    expect_refused(path("absent"), Trouble::usage, {"absent"});
}

TEST_F(WeightsTest, an_index_and_its_shards_must_agree) {
    const std::string index = path("model.safetensors.index.json");
    const std::string two = R"({"b":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})";
    write("one.safetensors", std::string("{") + kOne + "}", 8);
    write("two.safetensors", two, 4);
    std::ofstream(index) << R"({"weight_map":{"a":"one.safetensors","b":"two.safetensors"}})";
    EXPECT_EQ(Weights(directory).tensors().size(), 2u);
    std::ofstream(index) << R"({"weight_map":{"a":"one.safetensors","b":"one.safetensors"}})";
    expect_refused(directory, Trouble::io, {"lacks a tensor", "one.safetensors: b"});
    std::ofstream(index) << R"({"weight_map":{"a":"one.safetensors"}})";
    EXPECT_EQ(Weights(directory).tensors().size(), 1u);
    write("two.safetensors", with(R"("b":{"dtype":"F32","shape":[1],"data_offsets":[8,12]})"), 12);
    std::ofstream(index) << R"({"weight_map":{"a":"one.safetensors","b":"two.safetensors"}})";
    expect_refused(directory, Trouble::io, {"another shard", "two.safetensors"});
    std::ofstream(index) << R"({"weight_map":{"a":"../one.safetensors"}})";
    expect_refused(directory, Trouble::io, {"outside"});
    std::ofstream(index) << R"({"weight_map":{"a":"none.safetensors"}})";
    expect_refused(directory, Trouble::usage, {"none.safetensors"});
    std::ofstream(index) << R"({"weight_map":{"a":"one.safetensors"}})";
    write("model.safetensors", kOne, 8);
    expect_refused(directory, Trouble::io,
                   {"two models", "/model.safetensors and", "model.safetensors.index.json",
                    "transformers loads model.safetensors", "move the one that you do not mean"});
    refused_with_one_remedy(directory);
    std::filesystem::remove(std::filesystem::path(directory) / "model.safetensors");
    std::ofstream(index) << R"({"weight_map":{"a":"one.safetensors","a":"two.safetensors"}})";
    expect_refused(directory, Trouble::io, {"\"a\" is given twice", "index.json: line 1"});
    std::ofstream(index) << R"({"weight_map":{"a":"one\u0000.safetensors"}})";
    expect_refused(directory, Trouble::io, {"NUL character", "index.json: line 1"});
    std::ofstream(index) << R"({"weight_map":{"a":)" << std::string(1'000'000, '[');
    expect_refused(directory, Trouble::io, {"nested too deep", "index.json"});
    for (const char* text : {"{}", "[]", R"({"weight_map":[]})", R"({"weight_map":{"a":7}})",
                             R"({"weight_map":{"a":""}})", "{", ""}) {
        std::ofstream(index) << text;
        expect_refused(directory, Trouble::io, {"index"});
    }
    std::filesystem::remove(index);
    std::filesystem::create_symlink("/dev/zero", index);
    expect_refused(directory, Trouble::usage, {"index", "no regular file"});
}

TEST_F(WeightsTest, what_is_no_regular_file_is_no_weights) {
    const std::string model = path("model");
    const std::string single = model + "/model.safetensors";
    std::filesystem::create_directory(model);
    ASSERT_EQ(mkfifo(single.c_str(), 0600), 0);
    expect_refused(model, Trouble::usage, {"model.safetensors", "no regular file"});
    expect_refused(single, Trouble::usage, {"model.safetensors", "no regular file"});
    std::filesystem::remove(single);
    std::filesystem::create_symlink("/dev/zero", single);
    expect_refused(model, Trouble::usage, {"model.safetensors", "no regular file"});
    std::filesystem::remove(single);
    std::filesystem::create_directory(single);
    expect_refused(model, Trouble::usage, {"model.safetensors", "a directory"});
    std::ofstream(model + "/model.safetensors.index.json")
        << R"({"weight_map":{"a":"one.safetensors"}})";
    std::filesystem::remove(single);
    std::filesystem::create_symlink("/dev/zero", model + "/one.safetensors");
    expect_refused(model, Trouble::usage, {"one.safetensors", "no regular file"});
}

}  // namespace
}  // namespace ferry::checkpoint
