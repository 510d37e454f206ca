#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "base/files.h"
#include "base/json_reader.h"
#include "base/process_limits.h"
#include "checkpoint/checkpoint.h"

namespace ferry::checkpoint {
namespace {

using nlohmann::json;

constexpr uint64_t kHeaderMost = 100'000'000;  // the format's own limit
constexpr const char* kSingle = "model.safetensors";
constexpr const char* kIndex = "model.safetensors.index.json";

constexpr const char* kWriteAgain = "fetch or write the file again";

[[noreturn]] void damaged(std::string what, const std::string& where, std::string measured = {},
                          std::string limit = {}) {
    throw Error(Trouble::io, {.what = std::move(what),
                              .where = where,
                              .measured = std::move(measured),
                              .limit = std::move(limit),
                              .remedy = kWriteAgain});
}

// A shard, open for reading.
class File {
public:
    explicit File(std::string path) : path_(std::move(path)) {
        // Without O_NONBLOCK opening a named pipe would wait for its writer.
        fd_ = open_above_standard(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
        if (fd_ < 0 || ::fstat(fd_, &opened_) != 0) refuse(errno, std::strerror(errno));
        if (!S_ISREG(opened_.st_mode)) {
            ::close(fd_);
            refuse(0, S_ISDIR(opened_.st_mode) ? "a directory" : "no regular file");
        }
        size_bytes_ = opened_.st_size;
    }
    ~File() {
        if (fd_ >= 0) ::close(fd_);
    }
    File(File&& other) noexcept
        : path_(std::move(other.path_)),
          fd_(std::exchange(other.fd_, -1)),
          size_bytes_(other.size_bytes_),
          opened_(other.opened_) {}
    File& operator=(File&&) = delete;

    void read(void* to, int64_t bytes, int64_t offset) const {
        auto* at = static_cast<char*>(to);
        while (bytes > 0) {
            const ssize_t count = ::pread(fd_, at, static_cast<size_t>(bytes), offset);
            if (count < 0 && errno == EINTR) continue;
            if (count <= 0) {
                damaged("the weights cannot be read", path_,
                        count < 0 ? std::strerror(errno) : "the file ends",
                        std::to_string(bytes) + " bytes wanted at " + std::to_string(offset));
            }
            at += count;
            offset += count;
            bytes -= count;
        }
        check_unchanged();
    }
    const std::string& path() const { return path_; }
    int64_t size_bytes() const { return size_bytes_; }
    int descriptor() const { return fd_; }
    void check_unchanged() const;

private:
    [[noreturn]] void refuse(int error, const std::string& measured) const {
        const std::string limit = limit_behind(error);
        throw Error(
            trouble_of_reading(error),
            {.what = "cannot open the weights",
             .where = path_,
             .measured = measured,
             .limit = limit,
             .remedy = !limit.empty() ? "raise that limit"
                                      : "name a safetensors file, or the directory of a model"});
    }

    std::string path_;
    int fd_ = -1;
    int64_t size_bytes_ = 0;
    struct stat opened_ {};
};

// The format has no checksums, but nobody can write without the kernel taking down when: the
// time of change cannot be set back, as that of modification can.
void File::check_unchanged() const {
    struct stat now {};
    const auto same = [](const timespec& one, const timespec& other) {
        return one.tv_sec == other.tv_sec && one.tv_nsec == other.tv_nsec;
    };
    if (::fstat(fd_, &now) == 0 && now.st_size == opened_.st_size &&
        same(now.st_mtim, opened_.st_mtim) && same(now.st_ctim, opened_.st_ctim))
        return;
    const bool known = now.st_size == opened_.st_size && same(now.st_mtim, opened_.st_mtim);
    if (known)
        throw Error(Trouble::io,
                    {.what = "the weights may have changed while they were read",
                     .where = path_,
                     .measured = "linked, renamed, given another mode, or written to with the "
                                 "time set back",
                     .limit = "the file as it was when opened",
                     .remedy = "start again, and leave the file and its names alone meanwhile"});
    damaged("the weights changed while they were read", path_,
            now.st_size == opened_.st_size ? "written to or replaced since"
                                           : std::to_string(now.st_size) + " bytes",
            std::to_string(opened_.st_size) + " bytes as they were when opened");
}

// Where neither name of a directory's weights is there.
void require_safetensors(const std::filesystem::path& directory) {
    if (kind_of(directory / kSingle) != FileKind::none) return;
    for (const char* other : {"pytorch_model.bin", "pytorch_model.bin.index.json"}) {
        if (kind_of(directory / other) == FileKind::none) continue;
        throw Error(Trouble::usage,
                    {.what = "the weights are PyTorch's pickles, which ferry does not read",
                     .where = (directory / other).string(),
                     .limit = std::string(kSingle) + " or " + kIndex,
                     .remedy = "write them again with transformers: "
                               "model.save_pretrained(directory, safe_serialization=True)"});
    }
}

[[noreturn]] void refuse_two_models(const std::filesystem::path& directory) {
    throw Error(Trouble::io,
                {.what = "two models' weights are in one directory",
                 .where = (directory / kSingle).string() + " and " + (directory / kIndex).string(),
                 .limit = std::string("one of the two; transformers loads ") + kSingle,
                 .remedy = "move the one that you do not mean out of the directory"});
}

struct Known {
    std::string_view dtype;
    int64_t bytes;
    std::optional<DType> type;
};
// Those that ferry does not read may lie in a file beside the weights: masks, step counts.
constexpr std::array<Known, 14> kTypes{{{"F32", 4, DType::f32},
                                        {"BF16", 2, DType::bf16},
                                        {"F16", 2, DType::f16},
                                        {"F64", 8, {}},
                                        {"I64", 8, {}},
                                        {"U64", 8, {}},
                                        {"I32", 4, {}},
                                        {"U32", 4, {}},
                                        {"I16", 2, {}},
                                        {"U16", 2, {}},
                                        {"I8", 1, {}},
                                        {"U8", 1, {}},
                                        {"BOOL", 1, {}},
                                        {"F8_E4M3", 1, {}}}};

// The most values of a header or an index: those of half a million tensors, where the largest files
// have some thousands.
constexpr size_t kMostValues = 4'000'000;

json parse_header(const std::string& text, const std::string& path) {
    json header = parse_json(text, {.where = path,
                                    .what = "not a safetensors file: its header is not JSON",
                                    .remedy = kWriteAgain,
                                    .trouble = Trouble::io,
                                    .binary = true,
                                    .most_values = kMostValues});
    if (!header.is_object()) damaged("not a safetensors file: its header is no object", path);
    return header;
}

// Sizes and offsets. nlohmann would cut 24.5 to 24, and take what an int64 has no room for.
std::vector<int64_t> whole_numbers(const json& list, const std::string& where) {
    constexpr uint64_t kMost = uint64_t{1} << 62;  // two of them can be added
    const auto fits = [](const json& value) {
        return value.is_number_unsigned() && value.get<uint64_t>() <= kMost;
    };
    if (!list.is_array() || !std::ranges::all_of(list, fits))
        damaged("a tensor's entry in the header is damaged", where, shown_json(list),
                "a list of whole numbers up to 2^62");
    return list.get<std::vector<int64_t>>();
}

// One entry of a header; `data` is where the tensors' bytes begin, `end` receives where its own
// end.
StoredTensor read_entry(const std::string& name, const json& entry, const std::string& path,
                        int64_t data, int64_t& end) {
    const std::string where = path + ": " + shown(name);
    for (const char* key : {"dtype", "shape", "data_offsets"}) {
        if (!entry.is_object() || !entry.contains(key))
            damaged("a tensor's entry in the header is damaged", where, shown_json(entry),
                    "an object with dtype, shape and data_offsets");
    }
    if (!entry["dtype"].is_string())
        damaged("a tensor's entry in the header is damaged", where, shown_json(entry["dtype"]),
                "the name of a type");
    StoredTensor tensor;
    tensor.name = name;
    tensor.dtype = entry["dtype"].get<std::string>();
    tensor.shape = whole_numbers(entry["shape"], where);
    const std::vector<int64_t> offsets = whole_numbers(entry["data_offsets"], where);
    if (offsets.size() != 2)
        damaged("a tensor's entry in the header is damaged", where,
                std::to_string(offsets.size()) + " data_offsets", "begin and end");
    const auto* known = std::ranges::find(kTypes, tensor.dtype, &Known::dtype);
    const int64_t bytes = offsets[1] - offsets[0];
    // By division, as a damaged shape must not overflow.
    int64_t left = known == kTypes.end() ? 0 : bytes / known->bytes;
    bool fits = known == kTypes.end() || left * known->bytes == bytes;
    const bool none = std::ranges::find(tensor.shape, 0) != tensor.shape.end();
    if (none && known != kTypes.end()) left = bytes == 0 ? 1 : 0;  // no elements, no bytes
    for (const int64_t side : tensor.shape) {
        if (known == kTypes.end() || none) break;
        fits = fits && side > 0 && left % side == 0;
        if (fits) left /= side;
    }
    if (bytes < 0 || !fits || (known != kTypes.end() && left != 1)) {
        damaged("a tensor's shape and its bytes differ", where,
                std::to_string(bytes) + " bytes of " + shown(tensor.dtype),
                "shape " + shown_json(json(tensor.shape)));
    }
    if (known != kTypes.end()) tensor.type = known->type;
    tensor.offset = data + offsets[0];
    tensor.bytes = bytes;
    end = data + offsets[1];
    return tensor;
}

// The tensors of a file, which fill it without a gap.
std::vector<StoredTensor> read_file(const File& file, size_t index) {
    const std::string& path = file.path();
    uint64_t length = 0;
    if (file.size_bytes() >= 8) file.read(&length, sizeof length, 0);
    if (length < 2 || length > kHeaderMost ||
        8 + static_cast<int64_t>(length) > file.size_bytes()) {
        damaged("not a safetensors file, or a truncated one", path,
                std::to_string(file.size_bytes()) + " bytes",
                "a header of " + std::to_string(length) + " bytes");
    }
    std::string text(length, '\0');
    file.read(text.data(), static_cast<int64_t>(length), 8);
    const json header = parse_header(text, path);
    const int64_t data = 8 + static_cast<int64_t>(length);
    std::vector<std::pair<int64_t, StoredTensor>> found;  // with their ends
    for (const auto& [name, entry] : header.items()) {
        if (name == "__metadata__") continue;
        int64_t end = 0;
        StoredTensor tensor = read_entry(name, entry, path, data, end);
        tensor.file = index;
        found.emplace_back(end, std::move(tensor));
    }
    std::ranges::sort(found, {},
                      [](const auto& one) { return std::pair(one.second.offset, one.first); });
    int64_t at = data;
    std::vector<StoredTensor> tensors;
    for (auto& [end, tensor] : found) {
        if (tensor.offset != at) {
            damaged(tensor.offset < at ? "tensors overlap" : "there is a gap before a tensor",
                    path + ": " + shown(tensor.name),
                    "it begins at byte " + std::to_string(tensor.offset),
                    "the one before ends at " + std::to_string(at));
        }
        at = end;
        tensors.push_back(std::move(tensor));
    }
    if (at != file.size_bytes()) {
        damaged(at > file.size_bytes() ? "the file is truncated"
                                       : "the file is longer than its tensors",
                path, std::to_string(file.size_bytes()) + " bytes", std::to_string(at) + " bytes");
    }
    return tensors;
}

// Tensor to file name.
std::map<std::string, std::string> read_index(const std::filesystem::path& path) {
    constexpr TextFile kFile{.name = "the index of the shards",
                             .remedy = "fetch the model again",
                             .most_bytes = static_cast<int64_t>(kHeaderMost)};
    const json index = parse_json(read_text_file(path, kFile),
                                  {.where = path,
                                   .what = "the index of the shards is damaged: it is not JSON",
                                   .remedy = kWriteAgain,
                                   .trouble = Trouble::io,
                                   .most_values = kMostValues});
    const json names = index.is_object() ? index.value("weight_map", json()) : json();
    if (!names.is_object())
        damaged("the index of the shards is damaged", path, shown_json(names),
                "an object \"weight_map\"");
    std::map<std::string, std::string> map;
    for (const auto& [tensor, file] : names.items()) {
        if (!file.is_string())
            damaged("the index of the shards is damaged", path.string() + ": " + shown(tensor),
                    shown_json(file), "the name of a file");
        const auto& name = file.get_ref<const std::string&>();
        if (name.empty() || std::filesystem::path(name).filename() != name)
            damaged("a shard outside the model's directory", path, in_quotes(name));
        map.emplace(tensor, name);
    }
    return map;
}

}  // namespace

struct Weights::Impl {
    std::vector<File> files{};
    std::vector<StoredTensor> tensors{};

    explicit Impl(const std::filesystem::path& path) {
        const bool directory = kind_of(path) == FileKind::directory;
        if (directory && kind_of(path / kIndex) != FileKind::none) {
            if (kind_of(path / kSingle) != FileKind::none) refuse_two_models(path);
            read_shards(path);
        } else {
            if (directory) require_safetensors(path);
            files.emplace_back(directory ? path / kSingle : path);
            tensors = read_file(files[0], 0);
        }
        std::ranges::sort(tensors, {}, &StoredTensor::name);
    }

    void read_shards(const std::filesystem::path& path) {
        const auto map = read_index(path / kIndex);
        std::set<std::string> names;
        for (const auto& [tensor, name] : map) names.insert(name);
        std::set<std::string> listed;
        for (const std::string& name : names) {
            files.emplace_back(path / name);
            for (StoredTensor& tensor : read_file(files.back(), files.size() - 1)) {
                const auto place = map.find(tensor.name);
                if (place == map.end() || place->second != name)
                    damaged("a tensor lies in another shard than the index says",
                            files.back().path() + ": " + tensor.name,
                            place == map.end() ? "not in the index" : place->second);
                listed.insert(tensor.name);
                tensors.push_back(std::move(tensor));
            }
        }
        for (const auto& [tensor, name] : map) {
            if (!listed.contains(tensor))
                damaged("a shard lacks a tensor", (path / name).string() + ": " + tensor);
        }
    }
};

void widen_in_place(DType type, std::span<float> room) {
    if (type == DType::f32) return;
    // Narrow values lie at the end: what is written never overtakes what is read. In parts, so
    // that the compiler sees two arrays.
    constexpr size_t kPart = 1024;
    std::array<uint16_t, kPart> part{};
    const std::byte* const from =
        reinterpret_cast<const std::byte*>(room.data()) + room.size_bytes() / 2;
    for (size_t first = 0; first < room.size(); first += kPart) {
        const size_t count = std::min(kPart, room.size() - first);
        std::memcpy(part.data(), from + 2 * first, 2 * count);
        if (type == DType::bf16)
            for (size_t i = 0; i < count; ++i)
                room[first + i] = std::bit_cast<float>(uint32_t{part[i]} << 16);
        else
            std::transform(part.begin(), part.begin() + static_cast<std::ptrdiff_t>(count),
                           room.begin() + static_cast<std::ptrdiff_t>(first), from_f16);
    }
}

Weights::Weights(const std::string& path) : impl_(std::make_unique<Impl>(path)) {}
Weights::~Weights() = default;

const std::vector<StoredTensor>& Weights::tensors() const { return impl_->tensors; }

const StoredTensor* Weights::find(std::string_view name) const {
    const auto at = std::ranges::lower_bound(impl_->tensors, name, {}, &StoredTensor::name);
    return at != impl_->tensors.end() && at->name == name ? &*at : nullptr;
}

const std::string& Weights::file_of(const StoredTensor& tensor) const {
    return impl_->files[tensor.file].path();
}

int Weights::descriptor_of(const StoredTensor& tensor) const {
    return impl_->files[tensor.file].descriptor();
}

void Weights::check_unchanged(const StoredTensor& tensor) const {
    impl_->files[tensor.file].check_unchanged();
}

void Weights::read_bytes(const StoredTensor& tensor, int64_t first,
                         std::span<std::byte> out) const {
    impl_->files[tensor.file].read(out.data(), std::ssize(out), tensor.offset + first);
}

void Weights::read(const StoredTensor& tensor, int64_t first, std::span<float> out,
                   RunningChecksum* sum) const {
    FERRY_CHECK(tensor.type.has_value() && first >= 0);
    FERRY_CHECK(first + std::ssize(out) <= tensor.count(), tensor.name);
    const int64_t count = std::ssize(out), width = size_of(*tensor.type);
    // Narrow values are read into the end of `out` and widened from its beginning: what is written
    // never overtakes what is read.
    std::byte* to = reinterpret_cast<std::byte*>(out.data()) + count * (4 - width);
    impl_->files[tensor.file].read(to, count * width, tensor.offset + first * width);
    if (sum) sum->add({to, static_cast<size_t>(count * width)});
    widen_in_place(*tensor.type, out);
}

}  // namespace ferry::checkpoint
