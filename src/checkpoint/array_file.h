// Arrays of several types as one safetensors file, with the checksums of what was written.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/files.h"
#include "checkpoint/file_writer.h"
#include "checkpoint/manifest.h"
#include "checkpoint/stripe_sums.h"
#include "ferry/team.h"

namespace ferry::checkpoint {

struct ArrayInfo {
    std::string name{}, dtype{};  // dtype: as the format calls it, "BF16"
    std::vector<int64_t> shape{};
    int64_t bytes = 0;
};

struct NextBytes;

// Written in order and in bounded memory; the name must be free. Throws io.
class ArrayFile {
public:
    // With a writer of its own, or one that several files of this thread share.
    ArrayFile(const std::string& path, std::vector<ArrayInfo> arrays);
    ArrayFile(FileWriter& writer, const std::string& path, std::vector<ArrayInfo> arrays);
    // The next bytes of the arrays, one behind the other; no more than they have.
    void write(std::span<const std::byte> bytes);
    // After all of them: the file has its name, durably.
    Shard finish();

private:
    friend void write_side_by_side(std::vector<NextBytes> parts, Team& team);
    ArrayFile(std::unique_ptr<FileWriter> own, const std::string& path,
              std::vector<ArrayInfo> arrays);
    // Copies them to the room, and sums them. Any thread.
    void take(std::span<const std::byte> bytes, std::span<std::byte> room);
    void end_array();

    std::string name_;
    std::vector<ArrayInfo> arrays_;
    size_t at_ = 0;     // the array that is being written
    int64_t left_ = 0;  // bytes of it that are still to come
    std::unique_ptr<FileWriter> own_{};
    Draft draft_;
    std::optional<StreamedFile> file_{};
    StripeSums sums_{};
    Shard shard_{};
};

// The next bytes of several files at once, each file's by a thread of the team's.
struct NextBytes {
    ArrayFile* file = nullptr;
    std::span<const std::byte> bytes{};
};
void write_side_by_side(std::vector<NextBytes> parts, Team& team);

// The bytes that such a file has beside its arrays'.
int64_t header_bytes(std::span<const ArrayInfo> arrays);

// A text as a file of a checkpoint. Throws io.
Shard write_text_shard(const std::string& directory, const std::string& file,
                       std::string_view text);

}  // namespace ferry::checkpoint
