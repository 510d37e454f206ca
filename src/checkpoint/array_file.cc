#include "checkpoint/array_file.h"

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <utility>

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
    text.resize(static_cast<size_t>(round_up(static_cast<int64_t>(text.size()), 8)), ' ');
    return text;
}

}  // namespace

ArrayFile::ArrayFile(const std::string& path, std::vector<ArrayInfo> arrays)
    : name_(std::filesystem::path(path).filename()),
      arrays_(std::move(arrays)),
      file_(path, kWhat, {}, kNothing) {
    const std::string header = header_of(arrays_);
    const uint64_t length = header.size();
    shard_.file = name_;
    for (const auto bytes :
         {std::as_bytes(std::span(&length, 1)), std::as_bytes(std::span(header))}) {
        file_.write(bytes);
        whole_.add(bytes);
        shard_.bytes += std::ssize(bytes);
    }
    FERRY_CHECK(!arrays_.empty() && arrays_.front().bytes > 0, name_);
    left_ = arrays_.front().bytes;
    of_array_ = std::make_unique<RunningChecksum>();
}

void ArrayFile::write(std::span<const std::byte> bytes) {
    file_.write(bytes);
    whole_.add(bytes);
    shard_.bytes += std::ssize(bytes);
    while (!bytes.empty()) {
        FERRY_CHECK(at_ < arrays_.size(), name_);
        const auto part = bytes.first(static_cast<size_t>(std::min(left_, std::ssize(bytes))));
        of_array_->add(part);
        bytes = bytes.subspan(part.size());
        left_ -= std::ssize(part);
        if (left_ == 0) end_array();
    }
}

void ArrayFile::end_array() {
    const ArrayInfo& done = arrays_[at_];
    shard_.arrays.push_back({done.name, done.bytes, of_array_->value()});
    if (++at_ == arrays_.size()) return;
    left_ = arrays_[at_].bytes;
    of_array_ = std::make_unique<RunningChecksum>();
}

Shard ArrayFile::finish() {
    FERRY_CHECK(at_ == arrays_.size(), name_);
    shard_.checksum = whole_.value();
    file_.publish();
    return std::move(shard_);
}

int64_t header_bytes(std::span<const ArrayInfo> arrays) {
    return 8 + static_cast<int64_t>(header_of(arrays).size());
}

Shard write_text_shard(const std::string& directory, const std::string& file,
                       std::string_view text) {
    write_new_text(std::filesystem::path(directory) / file, text);
    return {.file = file,
            .bytes = std::ssize(text),
            .checksum = checksum(std::as_bytes(std::span(text)))};
}

}  // namespace ferry::checkpoint
