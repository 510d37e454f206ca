#include "file_writer.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/process_limits.h"
#include "ferry/error.h"

namespace ferry::checkpoint {
namespace {

constexpr int64_t kOnTheirWay = 8;  // blocks, beside the one that each file fills

}  // namespace

void pad_header(std::string& header) {
    constexpr int64_t kLength = 8;
    const int64_t bytes = round_up(std::ssize(header) + kLength, kBlock) - kLength;
    header.resize(static_cast<size_t>(bytes), ' ');
}

FileWriter::FileWriter(int64_t files)
    : blocks_(std::max(kBlocksLeast, files + kOnTheirWay)),
      memory_(kBlockBytes * blocks_),
      executor_(make_thread_executor()),
      operations_(static_cast<size_t>(blocks_)) {
    const int most = static_cast<int>(blocks_);
    files_ = aio::UserFiles::open({.operations_max = most, .files_max = most}, *executor_);
    for (size_t i = operations_.size(); i-- > 0;) free_.push_back(i);
}

FileWriter::~FileWriter() = default;

std::span<std::byte> FileWriter::block(size_t index) const {
    return memory_.bytes().subspan(index * static_cast<size_t>(kBlockBytes),
                                   static_cast<size_t>(kBlockBytes));
}

size_t FileWriter::take_block() {
    while (free_.empty()) wait_for_one();
    const size_t index = free_.back();
    free_.pop_back();
    return index;
}

void FileWriter::submit(size_t index, aio::FileNumber file, int64_t offset, int64_t bytes) {
    aio::Operation& operation = operations_[index];
    operation = {.kind = aio::Kind::write,
                 .slot = file,
                 .offset = offset,
                 .buffer = block(index).first(static_cast<size_t>(bytes)),
                 .tag = index};
    FERRY_CHECK(files_->try_submit(operation), "more transfers than blocks");
}

void FileWriter::wait_for_one() {
    FERRY_CHECK(files_->in_flight() > 0, "more files than blocks");
    aio::Operation* ended = files_->poll();
    while (ended == nullptr) {
        executor_->wait(kForever);
        ended = files_->poll();
    }
    if (ended->state != aio::State::done)
        failed_.emplace_back(ended->slot, aio::to_error(*files_, *ended));
    free_.push_back(static_cast<size_t>(ended->tag));
}

void FileWriter::require_whole(aio::FileNumber file) const {
    for (const auto& [of, error] : failed_)
        if (of == file) throw Error(error);
}

void FileWriter::wait_for(aio::FileNumber file) {
    while (files_->in_flight(file) > 0) wait_for_one();
    require_whole(file);
}

// ---------------------------------------------------------------- a file

StreamedFile::StreamedFile(FileWriter& writer, int descriptor, std::string path, std::string what,
                           int64_t bytes)
    : writer_(writer), path_(std::move(path)), what_(std::move(what)), bytes_(bytes) {
    reserve(descriptor);
    saying_what([&] { file_ = writer_.files_->add(descriptor); });
}

StreamedFile::~StreamedFile() {
    while (writer_.files_->in_flight(file_) > 0) writer_.wait_for_one();
    if (has_block_) writer_.give_back(block_);
    std::erase_if(writer_.failed_, [&](const auto& one) { return one.first == file_; });
    writer_.files_->remove(file_);
}

template <class Work>
void StreamedFile::saying_what(const Work& work) const {
    try {
        work();
    } catch (const Error& error) {
        Problem problem = error.problem();
        problem.what = what_;
        problem.where = path_;
        throw Error(error.trouble(), std::move(problem));
    }
}

// A file of its whole length takes transfers side by side, and a full disk shows at once.
void StreamedFile::reserve(int descriptor) const {
    int failed = 0;
    do failed = ::fallocate(descriptor, 0, 0, bytes_) == 0 ? 0 : errno;
    while (failed == EINTR);
    if (failed == EOPNOTSUPP || failed == ENOSYS || failed == EINVAL)
        failed = ::ftruncate(descriptor, bytes_) == 0 ? 0 : errno;
    if (failed == 0) return;
    const std::string limit = limit_behind(failed);
    throw Error(
        Trouble::io,
        {.what = what_,
         .where = path_,
         .measured =
             std::string(std::strerror(failed)) + ", for " + std::to_string(bytes_) + " bytes",
         .limit = limit,
         .remedy = limit.empty() ? "free more than that there, or name a directory elsewhere"
                                 : "raise that limit"});
}

std::span<std::byte> StreamedFile::room() {
    if (!has_block_) {
        block_ = writer_.take_block();
        has_block_ = true;
        in_block_ = 0;
        saying_what([&] { writer_.require_whole(file_); });
    }
    return writer_.block(block_).subspan(static_cast<size_t>(in_block_));
}

void StreamedFile::filled(int64_t bytes) {
    in_block_ += bytes;
    FERRY_CHECK(
        has_block_ && in_block_ <= FileWriter::kBlockBytes && written_ + in_block_ <= bytes_,
        path_);
    if (in_block_ < FileWriter::kBlockBytes) return;
    writer_.submit(block_, file_, written_, in_block_);
    has_block_ = false;
    written_ += std::exchange(in_block_, 0);
}

void StreamedFile::write(std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
        const std::span<std::byte> to = room();
        const size_t part = std::min(to.size(), bytes.size());
        std::memcpy(to.data(), bytes.data(), part);
        filled(static_cast<int64_t>(part));
        bytes = bytes.subspan(part);
    }
}

void StreamedFile::finish() {
    FERRY_CHECK(written_ + in_block_ == bytes_, path_);
    if (has_block_ && in_block_ > 0) {
        writer_.submit(block_, file_, written_, in_block_);
        has_block_ = false;
        written_ += std::exchange(in_block_, 0);
    }
    saying_what([&] { writer_.wait_for(file_); });
}

}  // namespace ferry::checkpoint
