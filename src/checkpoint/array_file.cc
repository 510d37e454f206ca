#include "checkpoint/array_file.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <utility>

#include "base/checksum.h"
#include "checkpoint/checkpoint.h"
#include "ferry/error.h"
#include "ferry/units.h"

namespace ferry::checkpoint {
namespace {

constexpr const char* kWhat = "a file of the checkpoint cannot be written";
constexpr Replaceable kNothing{.nothing = true};

std::string header_of(std::span<const ArrayInfo> arrays) {
    nlohmann::ordered_json header;
    header["__metadata__"] = {{"format", "pt"}};  // which transformers asks for
    auto& object = header.get_ref<nlohmann::ordered_json::object_t&>();
    int64_t offset = 0;
    for (const ArrayInfo& array : arrays) {
        const int64_t end = offset + array.bytes;
        nlohmann::ordered_json entry{
            {"dtype", array.dtype}, {"shape", array.shape}, {"data_offsets", {offset, end}}};
        object.push_back({array.name, std::move(entry)});
        offset = end;
    }
    std::string text = header.dump();
    pad_header(text);
    return text;
}

// All that comes before the arrays.
std::string beginning_of_file(std::span<const ArrayInfo> arrays) {
    const std::string header = header_of(arrays);
    const uint64_t length = header.size();
    return std::string(reinterpret_cast<const char*>(&length), sizeof length) + header;
}

}  // namespace

ArrayFile::ArrayFile(const std::string& path, std::vector<ArrayInfo> arrays)
    : ArrayFile(std::make_unique<FileWriter>(), path, std::move(arrays)) {}

ArrayFile::ArrayFile(std::unique_ptr<FileWriter> own, const std::string& path,
                     std::vector<ArrayInfo> arrays)
    : ArrayFile(*own, path, std::move(arrays)) {
    own_ = std::move(own);
}

ArrayFile::ArrayFile(FileWriter& writer, const std::string& path, std::vector<ArrayInfo> arrays)
    : name_(std::filesystem::path(path).filename()),
      arrays_(std::move(arrays)),
      draft_(path, kWhat, {}, kNothing) {
    const std::string header = beginning_of_file(arrays_);
    int64_t bytes = std::ssize(header);
    for (const ArrayInfo& array : arrays_) bytes += array.bytes;
    FERRY_CHECK(!arrays_.empty() && arrays_.front().bytes > 0, name_);
    file_.emplace(writer, draft_.descriptor(), path, kWhat, bytes);
    const auto beginning = std::as_bytes(std::span(header));
    file_->write(beginning);
    shard_ = {.file = name_, .bytes = bytes, .checksum = checksum(beginning)};
    left_ = arrays_.front().bytes;
}

void ArrayFile::write(std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
        const std::span<std::byte> room = file_->room();
        const auto part = bytes.first(std::min(room.size(), bytes.size()));
        take(part, room);
        file_->filled(std::ssize(part));
        bytes = bytes.subspan(part.size());
    }
}

void ArrayFile::take(std::span<const std::byte> bytes, std::span<std::byte> room) {
    constexpr size_t kInCache = 64 * kKiB;
    while (!bytes.empty()) {
        FERRY_CHECK(at_ < arrays_.size(), name_);
        const auto part =
            bytes.first(std::min({static_cast<size_t>(left_), bytes.size(), kInCache}));
        std::memcpy(room.data(), part.data(), part.size());
        sums_.add(room.first(part.size()));  // of what will be written
        bytes = bytes.subspan(part.size());
        room = room.subspan(part.size());
        left_ -= std::ssize(part);
        if (left_ == 0) end_array();
    }
}

void ArrayFile::end_array() {
    const ArrayInfo& done = arrays_[at_];
    std::vector<uint64_t> stripes = sums_.finish();
    const uint64_t sum = sum_of(stripes);
    shard_.arrays.push_back({done.name, done.bytes, sum, std::move(stripes)});
    if (++at_ < arrays_.size()) left_ = arrays_[at_].bytes;
}

Shard ArrayFile::finish() {
    FERRY_CHECK(at_ == arrays_.size(), name_);
    file_->finish();
    draft_.publish();
    file_.reset();
    return std::move(shard_);
}

void write_side_by_side(std::vector<NextBytes> parts, Team& team) {
    std::vector<std::span<std::byte>> rooms(parts.size());
    for (;;) {
        std::erase_if(parts, [](const NextBytes& part) { return part.bytes.empty(); });
        if (parts.empty()) return;
        for (size_t i = 0; i < parts.size(); ++i) {
            rooms[i] = parts[i].file->file_->room();
            rooms[i] = rooms[i].first(std::min(rooms[i].size(), parts[i].bytes.size()));
        }
        team.parallel(std::ssize(parts), [&](int64_t i) {
            const auto index = static_cast<size_t>(i);
            parts[index].file->take(parts[index].bytes.first(rooms[index].size()), rooms[index]);
        });
        for (size_t i = 0; i < parts.size(); ++i) {
            parts[i].file->file_->filled(std::ssize(rooms[i]));
            parts[i].bytes = parts[i].bytes.subspan(rooms[i].size());
        }
    }
}

int64_t header_bytes(std::span<const ArrayInfo> arrays) {
    return std::ssize(beginning_of_file(arrays));
}

Shard write_text_shard(const std::string& directory, const std::string& file,
                       std::string_view text) {
    write_new_text(std::filesystem::path(directory) / file, text);
    return {.file = file,
            .bytes = std::ssize(text),
            .checksum = checksum(std::as_bytes(std::span(text)))};
}

}  // namespace ferry::checkpoint
