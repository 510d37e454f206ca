#include "checkpoint/saved.h"

#include <fcntl.h>
#include <spdlog/fmt/fmt.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <ranges>
#include <set>

#include "base/checksum.h"
#include "base/files.h"
#include "base/process_limits.h"
#include "checkpoint/steps.h"
#include "ferry/error.h"
#include "ferry/units.h"
#include "stripe_sums.h"

namespace ferry::checkpoint {
namespace {

[[noreturn]] void damaged(std::string what, std::string where, std::string measured,
                          std::string limit) {
    throw Error(Trouble::io, {.what = std::move(what),
                              .where = std::move(where),
                              .measured = std::move(measured),
                              .limit = std::move(limit),
                              .remedy = "use another checkpoint: ferry ckpt ls lists them"});
}

std::string file_of(const std::string& checkpoint, const Shard& shard) {
    return std::filesystem::path(checkpoint) / shard.file;
}

// A file of a checkpoint, read from its beginning to its end.
class Reader {
public:
    Reader(std::string path, int64_t bytes) : path_(std::move(path)) {
        file_ = open_above_standard(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
        struct stat status {};
        if (file_ < 0 || ::fstat(file_, &status) != 0) {
            const int error = errno;
            if (file_ >= 0) ::close(file_);
            // The checkpoint may be whole.
            if (std::string limit = limit_behind(error); !limit.empty())
                throw Error(Trouble::does_not_fit,
                            {.what = "a file of the checkpoint cannot be opened",
                             .where = path_,
                             .measured = std::strerror(error),
                             .limit = std::move(limit),
                             .remedy = "raise that limit"});
            if (error == EACCES || error == EPERM)
                throw Error(Trouble::usage,
                            {.what = "a file of the checkpoint may not be read",
                             .where = path_,
                             .measured = std::strerror(error),
                             .remedy = "read it as its owner, or give the right to"});
            damaged(error == ENOENT ? "a file of the checkpoint is missing"
                                    : "a file of the checkpoint cannot be read",
                    path_, std::strerror(error), std::to_string(bytes) + " bytes");
        }
        if (!S_ISREG(status.st_mode)) {
            ::close(file_);
            damaged("a file of the checkpoint is no regular file", path_,
                    S_ISDIR(status.st_mode) ? "a directory" : "a pipe, a socket or a device",
                    std::to_string(bytes) + " bytes");
        }
        if (status.st_size != bytes) {
            ::close(file_);
            damaged(status.st_size < bytes ? "a file of the checkpoint is truncated"
                                           : "a file of the checkpoint has another length",
                    path_, std::to_string(status.st_size) + " bytes",
                    std::to_string(bytes) + " bytes");
        }
        ::posix_fadvise(file_, 0, 0, POSIX_FADV_SEQUENTIAL);
    }
    ~Reader() { ::close(file_); }
    Reader(const Reader&) = delete;
    Reader& operator=(const Reader&) = delete;

    // The next bytes, to the full of `room`.
    void next(std::span<std::byte> room) {
        while (!room.empty()) {
            const ssize_t count = ::pread(file_, room.data(), room.size(), at_);
            if (count < 0 && errno == EINTR) continue;
            if (count <= 0)
                damaged("a file of the checkpoint cannot be read", path_,
                        count < 0 ? std::strerror(errno) : "the file ends",
                        fmt::format("{} bytes wanted at {}", room.size(), at_));
            room = room.subspan(static_cast<size_t>(count));
            at_ += count;
        }
    }

private:
    std::string path_;
    int file_ = -1;
    int64_t at_ = 0;
};

void require_same(const std::string& where, uint64_t is, uint64_t was) {
    if (is == was) return;
    damaged("bytes of the checkpoint are not those that were written", where,
            fmt::format("checksum {:016x}", is), fmt::format("{:016x}", was));
}

int64_t bytes_before_arrays(const Shard& shard) {
    int64_t bytes = shard.bytes;
    for (const ArraySum& array : shard.arrays) bytes -= array.bytes;
    return bytes;
}

std::string header_of(const std::string& file) { return file + ": its header"; }

void check_header(const std::string& file, const Shard& shard) {
    Reader reader(file, shard.bytes);
    RunningChecksum sum;
    int64_t left = bytes_before_arrays(shard);  // as the manifest says: perhaps far too many
    std::vector<std::byte> room(static_cast<size_t>(std::min(kStripeBytes, left)));
    while (left > 0) {
        const auto part = std::span(room).first(static_cast<size_t>(std::min(kStripeBytes, left)));
        reader.next(part);
        sum.add(part);
        left -= std::ssize(part);
    }
    require_same(header_of(file), sum.value(), shard.checksum);
}

}  // namespace

// ---------------------------------------------------------------- opening

Saved::Saved(std::string path) : path_(std::move(path)), manifest_(manifest_of(path_)) {
    if (auto wrong = misnamed(path_, manifest_)) throw Error(Trouble::usage, std::move(*wrong));
    for (const Shard& shard : manifest_.shards) {
        const std::string file = file_of(path_, shard);
        const Reader there(file, shard.bytes);  // of that length
        if (shard.arrays.empty())
            check_shard(path_, shard, [](int64_t) {});
        else
            open(shard);
    }
}

void Saved::open(const Shard& shard) {
    const std::string file = file_of(path_, shard);
    if (in_stripes()) check_header(file, shard);
    shards_.push_back(std::make_unique<Weights>(file));
    const Weights& weights = *shards_.back();
    if (weights.tensors().size() != shard.arrays.size())
        damaged("a shard has other tensors than the manifest says", file,
                std::to_string(weights.tensors().size()), std::to_string(shard.arrays.size()));
    int64_t at = bytes_before_arrays(shard);
    for (const ArraySum& array : shard.arrays) {
        const StoredTensor* stored = weights.find(array.name);
        if (stored == nullptr)
            damaged("a shard lacks a tensor", file + ": " + array.name, "", array.name);
        if (stored->bytes != array.bytes || stored->offset != at)
            damaged("a tensor lies elsewhere in its shard than the manifest says",
                    file + ": " + array.name,
                    fmt::format("{} bytes at {}", stored->bytes, stored->offset),
                    fmt::format("{} bytes at {}", array.bytes, at));
        at += array.bytes;
        if (!arrays_
                 .emplace(array.name,
                          Array{stored, &weights, array.bytes, array.checksum, array.stripes})
                 .second)
            damaged("a tensor is in two shards", file + ": " + array.name, "", "");
    }
}

const Saved::Array* Saved::find(std::string_view name) const {
    const auto found = arrays_.find(name);
    return found == arrays_.end() ? nullptr : &found->second;
}

void Saved::read(const Array& array, int64_t first, std::span<std::byte> out) const {
    FERRY_CHECK(first >= 0 && first + std::ssize(out) <= array.bytes, array.stored->name);
    array.shard->read_bytes(*array.stored, first, out);
}

// ---------------------------------------------------------------- proving

ModelFiles files_of_model(const std::string& weights) {
    const std::filesystem::path path = without_end(weights);
    const bool whole = kind_of(path) == FileKind::directory;
    ModelFiles found{.checkpoint = whole ? path : path.parent_path()};
    const auto manifest = manifest_of_model(found.checkpoint);
    if (!manifest) return found;
    for (const Shard& shard : manifest->shards) {
        const bool is_models = shard.file == "config.json" || shard.file.starts_with("model");
        if (whole ? is_models : shard.file == path.filename()) found.files.push_back(shard);
    }
    return found;
}

void check_shard(const std::string& checkpoint, const Shard& shard,
                 const std::function<void(int64_t bytes)>& read) {
    const std::string path = file_of(checkpoint, shard);
    Reader file(path, shard.bytes);
    std::vector<std::byte> room(static_cast<size_t>(std::min(kStripeBytes, shard.bytes)));
    RunningChecksum whole;
    // The checksum of the next bytes, and of each stripe of them.
    const auto pass = [&](int64_t bytes, std::vector<uint64_t>* stripes) {
        RunningChecksum all;
        while (bytes > 0) {
            const auto stripe =
                std::span(room).first(static_cast<size_t>(std::min(kStripeBytes, bytes)));
            file.next(stripe);
            if (stripes) {
                stripes->push_back(checksum(stripe));
            } else {
                whole.add(stripe);
                all.add(stripe);
            }
            bytes -= std::ssize(stripe);
            read(std::ssize(stripe));
        }
        return stripes ? sum_of(*stripes) : all.value();
    };
    const uint64_t before = pass(bytes_before_arrays(shard), nullptr);
    for (const ArraySum& array : shard.arrays) {
        std::vector<uint64_t> stripes;
        const uint64_t sum = pass(array.bytes, shard.in_stripes() ? &stripes : nullptr);
        require_same(path + ": " + array.name, sum, array.checksum);
    }
    require_same(shard.arrays.empty() ? path : header_of(path),
                 shard.in_stripes() ? before : whole.value(), shard.checksum);
}

Error with_remedy(const Error& damage, std::string remedy) {
    Problem problem = damage.problem();
    problem.remedy = std::move(remedy);
    return {damage.trouble(), std::move(problem)};
}

Error of_model(const Error& damage) {
    if (damage.trouble() != Trouble::io) return damage;
    return with_remedy(
        damage, "take another checkpoint; if the change was meant, remove its manifest.json");
}

void require_model_files(const std::string& weights) {
    try {
        const ModelFiles model = files_of_model(weights);
        for (const Shard& shard : model.files) {
            if (shard.arrays.empty())
                check_shard(model.checkpoint, shard, [](int64_t) {});
            else if (shard.in_stripes())
                check_header(file_of(model.checkpoint, shard), shard);
            else
                Reader(file_of(model.checkpoint, shard), shard.bytes);
        }
    } catch (const Error& error) {
        throw of_model(error);
    }
}

std::optional<std::string> whole_before(const std::string& checkpoint) {
    std::filesystem::path path(checkpoint);
    if (!path.has_filename()) path = path.parent_path();  // behind a last slash
    const auto step = step_of_name(path.filename().string());
    if (!step) return {};
    const std::string beside = path.parent_path();
    for (const Step& older : steps_in(beside.empty() ? "." : beside) | std::views::reverse) {
        if (older.step >= *step) continue;
        try {
            const Saved saved(older.path);
            for (const Shard& shard : saved.manifest().shards)
                check_shard(older.path, shard, [](int64_t) {});
            return older.path;
        } catch (const Error&) {
            // Nor that one.
        }
    }
    return {};
}

}  // namespace ferry::checkpoint
