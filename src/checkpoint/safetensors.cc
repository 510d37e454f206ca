#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>
#include <numeric>

#include "ferry/checkpoint.h"

namespace ferry::checkpoint {
namespace {

// A file that replaces `path` when published and vanishes otherwise.
class NewFile {
public:
    explicit NewFile(std::string path) : path_(std::move(path)), temporary_(path_ + ".part") {
        fd_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
        if (fd_ < 0) fail("cannot be created");
    }
    ~NewFile() {
        if (fd_ >= 0) ::close(fd_);
        if (!published_) ::unlink(temporary_.c_str());
    }
    NewFile(const NewFile&) = delete;
    NewFile& operator=(const NewFile&) = delete;

    void write(const void* data, size_t bytes) {
        const auto* at = static_cast<const char*>(data);
        while (bytes > 0) {
            const ssize_t written = ::write(fd_, at, bytes);
            if (written < 0 && errno == EINTR) continue;
            if (written <= 0) fail("cannot be written");
            at += written;
            bytes -= static_cast<size_t>(written);
        }
    }

    void publish() {
        if (::fsync(fd_) != 0) fail("cannot be flushed");
        if (::rename(temporary_.c_str(), path_.c_str()) != 0) fail("cannot be renamed into place");
        published_ = true;
    }

private:
    [[noreturn]] void fail(const char* what) const {
        throw Error(Trouble::io,
                    {.what = std::string("the weights file ") + what,
                     .where = temporary_,
                     .measured = std::strerror(errno),
                     .remedy = "check that the directory exists, is writable and has room"});
    }
    std::string path_, temporary_;
    int fd_ = -1;
    bool published_ = false;
};

}  // namespace

void write_safetensors(const std::string& path, const std::vector<TensorInfo>& tensors,
                       const std::function<std::vector<float>(size_t)>& read) {
    nlohmann::ordered_json header;
    uint64_t offset = 0;
    for (const TensorInfo& tensor : tensors) {
        const auto count = std::accumulate(tensor.shape.begin(), tensor.shape.end(), int64_t{1},
                                           std::multiplies<>());
        const uint64_t end = offset + static_cast<uint64_t>(count) * 4;
        header[tensor.name] = {
            {"dtype", "F32"}, {"shape", tensor.shape}, {"data_offsets", {offset, end}}};
        offset = end;
    }
    std::string text = header.dump();
    text.resize(static_cast<size_t>(round_up(static_cast<int64_t>(text.size()), 8)), ' ');
    NewFile file(path);
    const uint64_t length = text.size();
    file.write(&length, sizeof length);
    file.write(text.data(), text.size());
    for (size_t i = 0; i < tensors.size(); ++i) {
        const std::vector<float> values = read(i);
        file.write(values.data(), values.size() * sizeof(float));
    }
    file.publish();
}

}  // namespace ferry::checkpoint
