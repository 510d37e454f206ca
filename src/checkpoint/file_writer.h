// Files written front to back, around the page cache where the file system has that, with several
// transfers in flight. Their bytes are copied to blocks first, so that the caller's memory is free
// at once.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/io_memory.h"
#include "ferry/error.h"
#include "ferry/executor.h"
#include "ferry/units.h"
#include "ferry/user_files.h"

namespace ferry::checkpoint {

// Adds spaces behind the header of a safetensors file, so that its tensors begin at a block. Where
// they are whole blocks, their stripes are too, and reading one reads no part of another block.
void pad_header(std::string& header);

// The blocks and the ring that the files of one thread share.
class FileWriter {
public:
    // `files`: the most of them at once, each with a block that it fills.
    explicit FileWriter(int64_t files = 1);
    ~FileWriter();
    static constexpr int64_t kLeastMemory = 64 * kMiB;  // of all blocks
    FileWriter(const FileWriter&) = delete;
    FileWriter& operator=(const FileWriter&) = delete;

private:
    friend class StreamedFile;
    static constexpr int64_t kBlockBytes = 2 * kMiB;
    static constexpr int64_t kBlocksLeast = kLeastMemory / kBlockBytes;

    // A block that nobody has. Waits for a transfer where all are on their way.
    size_t take_block();
    std::span<std::byte> block(size_t index) const;
    void submit(size_t index, aio::FileNumber file, int64_t offset, int64_t bytes);
    void give_back(size_t index) { free_.push_back(index); }
    // Waits until one more transfer has ended.
    void wait_for_one();
    // Waits for all of the file's. Throws the first error of them.
    void wait_for(aio::FileNumber file);
    void require_whole(aio::FileNumber file) const;

    const int64_t blocks_;
    IoMemory memory_;
    std::unique_ptr<Executor> executor_;
    std::vector<aio::Operation> operations_;  // of the block of that number
    std::vector<size_t> free_{};
    std::vector<std::pair<aio::FileNumber, Error>> failed_{};
    std::unique_ptr<aio::UserFiles> files_;  // goes first: it waits for transfers
};

class StreamedFile {
public:
    // `descriptor` is open for writing and stays the caller's; the file gets `bytes` bytes, whose
    // space is reserved at once. Errors (io) begin with `what` and name `path`.
    StreamedFile(FileWriter& writer, int descriptor, std::string path, std::string what,
                 int64_t bytes);
    ~StreamedFile();  // waits for its transfers
    StreamedFile(const StreamedFile&) = delete;
    StreamedFile& operator=(const StreamedFile&) = delete;

    // Where the next bytes may be put, at least one. Any thread may fill them.
    std::span<std::byte> room();
    // The first `bytes` of the room are filled.
    void filled(int64_t bytes);
    void write(std::span<const std::byte> bytes);
    // After all bytes: they are written, not flushed.
    void finish();

private:
    void reserve(int descriptor) const;
    template <class Work>
    void saying_what(const Work& work) const;

    FileWriter& writer_;
    const std::string path_, what_;
    const int64_t bytes_;
    int64_t written_ = 0, in_block_ = 0;  // given to the ring; in the present block
    size_t block_ = 0;
    bool has_block_ = false;
    aio::FileNumber file_ = 0;
};

}  // namespace ferry::checkpoint
