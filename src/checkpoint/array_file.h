// Arrays of several types as one safetensors file, with the checksums of what was written.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/checksum.h"
#include "base/files.h"
#include "checkpoint/manifest.h"

namespace ferry::checkpoint {

struct ArrayInfo {
    std::string name{}, dtype{};  // dtype: as the format calls it, "BF16"
    std::vector<int64_t> shape{};
    int64_t bytes = 0;
};

// Written in order and in bounded memory; the name must be free. Throws io.
class ArrayFile {
public:
    ArrayFile(const std::string& path, std::vector<ArrayInfo> arrays);
    // The next bytes of the arrays, one behind the other; no more than they have.
    void write(std::span<const std::byte> bytes);
    // After all of them: the file has its name, durably.
    Shard finish();

private:
    void end_array();

    std::string name_;
    std::vector<ArrayInfo> arrays_;
    size_t at_ = 0;     // the array that is being written
    int64_t left_ = 0;  // bytes of it that are still to come
    Draft file_;
    RunningChecksum whole_{};
    std::unique_ptr<RunningChecksum> of_array_{};
    Shard shard_{};
};

// The bytes that such a file has beside its arrays'.
int64_t header_bytes(std::span<const ArrayInfo> arrays);

// A text as a file of a checkpoint. Throws io.
Shard write_text_shard(const std::string& directory, const std::string& file,
                       std::string_view text);

}  // namespace ferry::checkpoint
