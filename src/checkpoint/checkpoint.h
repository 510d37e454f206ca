// Weights in and out of safetensors files (https://huggingface.co/docs/safetensors), alone or as
// the shards of a Hugging Face directory.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/checksum.h"
#include "base/files.h"
#include "ferry/dtype.h"

namespace ferry::checkpoint {

struct TensorInfo {
    std::string name{};
    std::vector<int64_t> shape{};
    int64_t count() const;  // how many elements it has
};

// ---------------------------------------------------------------- reading

struct StoredTensor : TensorInfo {
    std::string dtype{};          // as the file says: F32, BF16, I64, ...
    std::optional<DType> type{};  // none: ferry reads no tensors of this type
    size_t file = 0;              // index of the shard
    int64_t offset = 0;           // where its first byte lies in the file
    int64_t bytes = 0;            // in the file
};

// The tensors of one .safetensors file, or of a directory with model.safetensors or with shards and
// their model.safetensors.index.json. Opening reads and checks the headers alone. It
// throws usage where nothing is there to read. It throws io, naming file and tensor, where a header
// is damaged or tensors overlap. So it does where a file is shorter or longer than its tensors, and
// where one is listed twice or in another shard than the index says.
class Weights {
public:
    explicit Weights(const std::string& path);
    ~Weights();
    Weights(const Weights&) = delete;
    Weights& operator=(const Weights&) = delete;

    const std::vector<StoredTensor>& tensors() const;       // by name
    const StoredTensor* find(std::string_view name) const;  // null: none of that name
    const std::string& file_of(const StoredTensor& tensor) const;
    // Elements [first, first + out.size()), row major, as fp32. `type` must be there. Nothing is
    // held beside `out`; any thread may call it. `sum`, if given, takes the bytes as they lie in
    // the file. Throws io, also where the file was written to since it was opened.
    void read(const StoredTensor& tensor, int64_t first, std::span<float> out,
              RunningChecksum* sum = nullptr) const;
    // For who reads the tensor's file in another way: open for reading, and whether it is still as
    // it was when it was opened; throws io where it is not.
    int descriptor_of(const StoredTensor& tensor) const;
    void check_unchanged(const StoredTensor& tensor) const;
    // Bytes [first, first + out.size()) of a tensor of any type, as they lie in the file.
    void read_bytes(const StoredTensor& tensor, int64_t first, std::span<std::byte> out) const;

private:
    struct Impl;
    std::unique_ptr<Impl> impl_;
};

// Values of the type that end `room`, bytewise, become fp32 from its beginning on.
void widen_in_place(DType type, std::span<float> room);

// ---------------------------------------------------------------- writing

// Takes a tensor's elements in order, row major, in runs of any length.
using Sink = std::function<void(std::span<const float>)>;
// Gives all elements of tensor i to the sink.
using Source = std::function<void(size_t i, const Sink& sink)>;

// The other way about: puts elements of tensor i, from `first` on, where they go to in the file, as
// they lie there. All of a tensor's in order, tensor after tensor.
using Filler = std::function<void(size_t i, int64_t first, std::span<std::byte> room)>;

// Values as `type`, each rounded once. Throws usage, naming the tensor and the value, for a finite
// one that fp16 has no room for.
void convert(std::span<const float> values, DType type, const std::string& tensor, std::byte* to);

// The name that safetensors has for it: "F32", "BF16", "F16".
std::string_view dtype_name(DType type);

// The beginning of a safetensors file, behind 8 bytes of length.
inline constexpr Replaceable kSafetensors{.beginning = "{\"", .skipped = 8};

// Writes tensors in the order given, one at a time, each value rounded once to `type`. The file
// appears whole or not at all (files.h, Draft). Throws Trouble::io, and usage naming the tensor and
// the value for a finite one that fp16 has no room for.
void write_safetensors(const std::string& path, std::span<const TensorInfo> tensors, DType type,
                       const Source& source, const Replaceable& replaceable = kSafetensors);
void write_safetensors(const std::string& path, std::span<const TensorInfo> tensors, DType type,
                       const Filler& fill, const Replaceable& replaceable = kSafetensors);

// The files of a directory that is being made, which vanish unless all of them were written.
class NewFiles {
public:
    NewFiles() = default;
    ~NewFiles();
    NewFiles(const NewFiles&) = delete;
    NewFiles& operator=(const NewFiles&) = delete;
    void add(std::string path) { paths_.push_back(std::move(path)); }
    void keep() { paths_.clear(); }

private:
    std::vector<std::string> paths_{};
};

// The same as transformers saves a model: one model.safetensors, or shards of at most `shard_bytes`
// (a larger tensor alone) and their index. `directory` must exist, without a model in it: nothing
// is replaced, and a file that is in the way is an error (usage). `made` gets the files.
void write_model(const std::string& directory, std::span<const TensorInfo> tensors, DType type,
                 int64_t shard_bytes, const Source& source, NewFiles& made);
void write_model(const std::string& directory, std::span<const TensorInfo> tensors, DType type,
                 int64_t shard_bytes, const Filler& fill, NewFiles& made);

// A new file, whole: what is there already is an error, usage. Throws Trouble::io.
void write_new_text(const std::string& path, std::string_view text);

}  // namespace ferry::checkpoint
