#include <spdlog/fmt/fmt.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <numeric>
#include <thread>

#include "base/files.h"
#include "checkpoint/checkpoint.h"
#include "ferry/error.h"
#include "ferry/team.h"
#include "ferry/units.h"
#include "file_writer.h"

namespace ferry::checkpoint {

std::string_view dtype_name(DType type) {
    switch (type) {
        case DType::bf16:
            return "BF16";
        case DType::f16:
            return "F16";
        case DType::f32:
            break;
    }
    return "F32";
}

namespace {

constexpr const char* kWhat = "the file cannot be written";
constexpr Replaceable kNothing{.nothing = true};

// Finite values must be finite in the file too: a model with an infinite weight is none.
void check_range(std::span<const float> values, const std::string& name) {
    constexpr float kLeastTooLarge = 65520;  // rounds to infinity
    const auto at = std::ranges::find_if(values, [](float value) {
        return std::abs(value) >= kLeastTooLarge && std::isfinite(value);
    });
    if (at == values.end()) return;
    throw Error(Trouble::usage, {.what = "a weight is too large for fp16",
                                 .where = name,
                                 .measured = fmt::format("{}", *at),
                                 .limit = "65504, the largest number of fp16",
                                 .remedy = "write it in bf16 or fp32: --export-type bf16"});
}

void narrow(std::span<const float> values, DType type, std::byte* to) {
    // In parts, so that the compiler sees two arrays.
    constexpr size_t kPart = 1024;
    std::array<uint16_t, kPart> part{};
    for (size_t first = 0; first < values.size(); first += kPart) {
        const size_t count = std::min(kPart, values.size() - first);
        const std::span<const float> from = values.subspan(first, count);
        std::ranges::transform(from, part.begin(), type == DType::bf16 ? to_bf16 : to_f16);
        std::memcpy(to + 2 * first, part.data(), 2 * count);
    }
}

void convert_checked(std::span<const float> values, DType type, std::byte* to) {
    if (type == DType::f32)
        std::memcpy(to, values.data(), values.size_bytes());
    else
        narrow(values, type, to);
}

// Values of a tensor as they lie in the file, converted by the team's threads.
void write_values(StreamedFile& file, const std::string& name, std::span<const float> values,
                  DType type, Team& team) {
    const auto width = static_cast<size_t>(size_of(type));
    if (type == DType::f16) check_range(values, name);
    while (!values.empty()) {
        const std::span<std::byte> room = file.room();
        const size_t count = std::min(room.size() / width, values.size());
        constexpr size_t kPart = 64 * kKiB;
        team.parallel(ceil_div(static_cast<int64_t>(count), int64_t{kPart}), [&](int64_t i) {
            const size_t first = static_cast<size_t>(i) * kPart;
            convert_checked(values.subspan(first, std::min(kPart, count - first)), type,
                            room.data() + first * width);
        });
        file.filled(static_cast<int64_t>(count * width));
        values = values.subspan(count);
    }
}

// Beyond the object's own look-up, which goes through all of its keys: of many tensors it would
// take minutes.
void append(nlohmann::ordered_json& object, const std::string& key, nlohmann::ordered_json value) {
    object.get_ref<nlohmann::ordered_json::object_t&>().push_back({key, std::move(value)});
}

std::string header_of(std::span<const TensorInfo> tensors, DType type) {
    nlohmann::ordered_json header;
    header["__metadata__"] = {{"format", "pt"}};  // which transformers asks for
    int64_t offset = 0;
    for (const TensorInfo& tensor : tensors) {
        const int64_t end = offset + tensor.count() * size_of(type);
        append(header, tensor.name,
               {{"dtype", dtype_name(type)},
                {"shape", tensor.shape},
                {"data_offsets", {offset, end}}});
        offset = end;
    }
    std::string text = header.dump();
    pad_header(text);
    return text;
}

// First tensor of each shard, and the end.
std::vector<size_t> cut_shards(std::span<const TensorInfo> tensors, DType type,
                               int64_t shard_bytes) {
    std::vector<size_t> first{0};
    int64_t bytes = 0;
    for (size_t i = 0; i < tensors.size(); ++i) {
        const int64_t own = tensors[i].count() * size_of(type);
        if (bytes > 0 && bytes + own > shard_bytes) {
            first.push_back(i);
            bytes = 0;
        }
        bytes += own;
    }
    first.push_back(tensors.size());
    return first;
}

}  // namespace

int64_t TensorInfo::count() const {
    return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
}

void convert(std::span<const float> values, DType type, const std::string& tensor, std::byte* to) {
    if (type == DType::f16) check_range(values, tensor);
    convert_checked(values, type, to);
}

namespace {

// write(i, file) writes all of tensor i.
template <class Write>
void write_file(const std::string& path, std::span<const TensorInfo> tensors, DType type,
                const Replaceable& replaceable, const Write& write) {
    const std::string header = header_of(tensors, type);
    Draft draft(path, kWhat, {}, replaceable);
    const uint64_t length = header.size();
    int64_t bytes = 8 + std::ssize(header);
    for (const TensorInfo& tensor : tensors) bytes += tensor.count() * size_of(type);
    FileWriter writer;
    StreamedFile file(writer, draft.descriptor(), path, kWhat, bytes);
    file.write(std::as_bytes(std::span(&length, 1)));
    file.write(std::as_bytes(std::span(header)));
    for (size_t i = 0; i < tensors.size(); ++i) write(i, file);
    file.finish();
    draft.publish();
}

}  // namespace

void write_safetensors(const std::string& path, std::span<const TensorInfo> tensors, DType type,
                       const Source& source, const Replaceable& replaceable) {
    Team team(static_cast<int>(std::max(1U, std::thread::hardware_concurrency())));
    write_file(path, tensors, type, replaceable, [&](size_t i, StreamedFile& file) {
        int64_t written = 0;
        source(i, [&](std::span<const float> values) {
            written += std::ssize(values);
            FERRY_CHECK(written <= tensors[i].count(), tensors[i].name);
            write_values(file, tensors[i].name, values, type, team);
        });
        FERRY_CHECK(written == tensors[i].count(), tensors[i].name);
    });
}

void write_safetensors(const std::string& path, std::span<const TensorInfo> tensors, DType type,
                       const Filler& fill, const Replaceable& replaceable) {
    write_file(path, tensors, type, replaceable, [&](size_t i, StreamedFile& file) {
        const int64_t count = tensors[i].count(), width = size_of(type);
        for (int64_t first = 0; first < count;) {
            const std::span<std::byte> room = file.room();
            const int64_t part = std::min(std::ssize(room) / width, count - first);
            fill(i, first, room.first(static_cast<size_t>(part * width)));
            file.filled(part * width);
            first += part;
        }
    });
}

NewFiles::~NewFiles() {
    for (const std::string& path : paths_) ::unlink(path.c_str());
}

namespace {

// write(path, first, part) writes the file of some neighbours, from the first of them on.
template <class Write>
void write_shards(const std::string& directory, std::span<const TensorInfo> tensors, DType type,
                  int64_t shard_bytes, NewFiles& made, const Write& write) {
    const std::filesystem::path folder(directory);
    const std::vector<size_t> cuts = cut_shards(tensors, type, shard_bytes);
    const size_t shards = cuts.size() - 1;
    nlohmann::ordered_json map = nlohmann::ordered_json::object();
    int64_t bytes = 0;
    for (size_t shard = 0; shard < shards; ++shard) {
        const std::string name =
            shards == 1 ? "model.safetensors"
                        : fmt::format("model-{:05}-of-{:05}.safetensors", shard + 1, shards);
        const size_t first = cuts[shard];
        const auto part = tensors.subspan(first, cuts[shard + 1] - first);
        write(folder / name, first, part);
        made.add(folder / name);  // by now: before, it might have been another's
        for (const TensorInfo& tensor : part) {
            append(map, tensor.name, name);
            bytes += tensor.count() * size_of(type);
        }
    }
    if (shards == 1) return;
    const nlohmann::ordered_json index{{"metadata", {{"total_size", bytes}}}, {"weight_map", map}};
    write_new_text(folder / "model.safetensors.index.json", index.dump(2) + "\n");
    made.add(folder / "model.safetensors.index.json");
}

}  // namespace

void write_model(const std::string& directory, std::span<const TensorInfo> tensors, DType type,
                 int64_t shard_bytes, const Source& source, NewFiles& made) {
    write_shards(directory, tensors, type, shard_bytes, made,
                 [&](const std::string& path, size_t first, std::span<const TensorInfo> part) {
                     const Source of_part = [&](size_t i, const Sink& sink) {
                         source(first + i, sink);
                     };
                     write_safetensors(path, part, type, of_part, kNothing);
                 });
}

void write_model(const std::string& directory, std::span<const TensorInfo> tensors, DType type,
                 int64_t shard_bytes, const Filler& fill, NewFiles& made) {
    write_shards(directory, tensors, type, shard_bytes, made,
                 [&](const std::string& path, size_t first, std::span<const TensorInfo> part) {
                     const Filler of_part = [&](size_t i, int64_t at, std::span<std::byte> room) {
                         fill(first + i, at, room);
                     };
                     write_safetensors(path, part, type, of_part, kNothing);
                 });
}

void write_new_text(const std::string& path, std::string_view text) {
    Draft file(path, kWhat, {}, kNothing);
    file.write(text);
    file.publish();
}

}  // namespace ferry::checkpoint
