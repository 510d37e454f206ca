// A run's weights as a directory that transformers loads.
#include <fcntl.h>
#include <spdlog/fmt/fmt.h>
#include <spdlog/fmt/ranges.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <memory>
#include <thread>

#include "base/files.h"
#include "base/log.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/saved.h"
#include "checkpoint/tensors_ahead.h"
#include "ferry/export.h"
#include "ferry/team.h"
#include "model/huggingface.h"
#include "planner/planner.h"
#include "train/resuming/loaded_weights.h"
#include "train/saving/export.h"
#include "train/setup/model_of.h"

namespace ferry::train {
namespace {

// Files that belong to a model and hold no weights, as far as they are there.
constexpr std::array<std::string_view, 12> kCompanions{"tokenizer.json",
                                                       "tokenizer_config.json",
                                                       "tokenizer.model",
                                                       "special_tokens_map.json",
                                                       "added_tokens.json",
                                                       "vocab.json",
                                                       "vocab.txt",
                                                       "merges.txt",
                                                       "chat_template.jinja",
                                                       "chat_template.json",
                                                       "generation_config.json",
                                                       "preprocessor_config.json"};

// The largest tokenizers take some 40 MB.
constexpr TextFile kCompanion{.name = "a file that belongs into the export",
                              .remedy = "make it readable, or move it out of the model's directory",
                              .most_bytes = 256 * kMiB};

[[noreturn]] void refuse(const std::string& directory, std::string what, std::string measured) {
    throw Error(Trouble::usage, {.what = std::move(what),
                                 .where = directory,
                                 .measured = std::move(measured),
                                 .remedy = "name a new directory"});
}

// Whether a path still names the directory that was opened; -1: it could not be.
bool leads_to(const std::string& path, int opened) {
    struct stat then {
    }, now{};
    if (opened < 0 || ::fstat(opened, &then) != 0) return true;
    return ::stat(path.c_str(), &now) == 0 && then.st_dev == now.st_dev &&
           then.st_ino == now.st_ino;
}

// The weights are whole by then: what is missing beside them must not cost them.
void write_companions(const std::string& directory, const ExportDirectory& claimed) {
    for (const auto& [name, text] : claimed.companions()) {
        try {
            checkpoint::write_new_text(std::filesystem::path(directory) / name, text);
        } catch (const Error& error) {
            log_warn(directory + ": the export has no " + name + ": " + error.what());
        }
    }
}

constexpr std::string_view kWeightFiles = "model";  // as a checkpoint names them

// A tensor and the index of its layer.
struct Read {
    int64_t layer = 0;
    const model::Tensor* tensor = nullptr;
};

// All tensors, in the order in which the ranks give them.
std::vector<Read> in_order(const std::vector<model::Layer>& layers) {
    std::vector<Read> reads;
    for (size_t l = 0; l < layers.size(); ++l) {
        for (const model::Tensor& tensor : layers[l].tensors)
            reads.push_back({static_cast<int64_t>(l), &tensor});
    }
    return reads;
}

// The contents of an export: tensors, their type and the model's config.json.
struct Exported {
    std::vector<checkpoint::TensorInfo> tensors{};
    DType type = DType::f32;
    std::string description{};
};

Exported exported_of(const std::vector<model::Layer>& layers, const Config& config,
                     const ExportOptions& options, const ExportDirectory& claimed) {
    Exported what{.type = options.type.value_or(numerics_of(config, {}).compute)};
    for (const Read& read : in_order(layers))
        what.tensors.push_back({read.tensor->name, read.tensor->whole_shape()});
    what.description = description_of(config, claimed.description(), what.type);
    return what;
}

// `from`: a TensorSource or a checkpoint::Filler.
template <class From>
void write_files(const std::string& directory, const Exported& what, const ExportOptions& options,
                 const ExportDirectory& claimed, const From& from) {
    checkpoint::NewFiles made;
    checkpoint::write_model(directory, what.tensors, what.type, options.shard_bytes, from, made);
    made.keep();
    write_companions(directory, claimed);
    checkpoint::write_new_text(std::filesystem::path(directory) / "config.json", what.description);
}

// Counts what was written; `progress` may be none.
class Told {
public:
    Told(const Exported& what, const ExportProgress& progress) : progress_(progress) {
        for (const auto& tensor : what.tensors) of_ += tensor.count() * size_of(what.type);
    }
    void add(int64_t bytes) {
        bytes_ += bytes;
        if (progress_) progress_(bytes_, of_);
    }

private:
    const ExportProgress& progress_;
    int64_t bytes_ = 0, of_ = 0;
};

TensorSource told(Told& told, const TensorSource& source, DType type) {
    return [&told, &source, type](size_t i, const ValueSink& sink) {
        source(i, [&](std::span<const float> values) {
            sink(values);
            told.add(std::ssize(values) * size_of(type));
        });
    };
}

checkpoint::Filler told(Told& told, const checkpoint::Filler& fill, DType) {
    return [&told, &fill](size_t i, int64_t first, std::span<std::byte> room) {
        fill(i, first, room);
        told.add(std::ssize(room));
    };
}

// All elements of tensors, one after the other, read ahead. What the ring holds goes to its file in
// one pass.
class AllAhead {
public:
    AllAhead(std::vector<checkpoint::TensorSource> tensors, DType type)
        : tensors_(std::move(tensors)), type_(type), ahead_(team_) {
        for (const checkpoint::TensorSource& tensor : tensors_) {
            const int64_t count = tensor.stored->count();
            const int64_t width = tensor.bytes / std::max<int64_t>(1, count);
            for (int64_t first = 0; first < count; first += kStep) {
                ahead_.want(tensor, first * width, std::min(kStep, count - first) * width);
                ahead_.end_step();
            }
        }
    }

    void fill(size_t i, int64_t first, std::span<std::byte> room) {
        const int64_t width = size_of(type_), end = first + std::ssize(room) / width;
        while (first < end) {
            if (first % kStep == 0) ahead_.next();
            const int64_t count = std::min(end, round_down(first, kStep) + kStep) - first;
            const auto part = room.first(static_cast<size_t>(count * width));
            copy(*tensors_[i].stored, first, part);
            room = room.subspan(part.size());
            first += count;
        }
    }

private:
    static constexpr int64_t kStep = 2 * kMiB;  // elements

    void copy(const checkpoint::StoredTensor& stored, int64_t first, std::span<std::byte> room) {
        constexpr int64_t kPart = 64 * kKiB;
        const int64_t width = size_of(type_), count = std::ssize(room) / width;
        team_.parallel(ceil_div(count, kPart), [&](int64_t part) {
            const int64_t at = part * kPart;
            ahead_.read_as(stored, first + at, type_,
                           room.subspan(static_cast<size_t>(at * width),
                                        static_cast<size_t>(std::min(kPart, count - at) * width)));
        });
    }

    const std::vector<checkpoint::TensorSource> tensors_;
    const DType type_;
    Team team_{static_cast<int>(std::max(1U, std::thread::hardware_concurrency()))};
    checkpoint::TensorsAhead ahead_;
};

template <class From>
void write(const Exported& what, const ExportOptions& options, const ExportDirectory& claimed,
           const From& from, const ExportProgress& progress) {
    const ExportDirectory::Destination place = claimed.place();
    Told written(what, progress);
    try {
        write_files(place.path, what, options, claimed, told(written, from, what.type));
    } catch (const Error& error) {
        // One file that is whole elsewhere is no model.
        if (!place.instead_of) throw Error(error.trouble(), error.problem());
        log_warn(std::string("nor can the export be written beside it: ") + error.what());
        ::rmdir(place.path.c_str());  // which takes an empty one only
        throw Error(*place.instead_of);
    }
    if (!place.instead_of) return;
    Problem problem = place.instead_of->problem();
    problem.remedy = "the whole export is in " + place.path + ": move it to another name";
    throw WholeElsewhere(place.instead_of->trouble(), std::move(problem));
}

void write_ahead(std::vector<checkpoint::TensorSource> tensors, const Exported& what,
                 const ExportOptions& options, const ExportDirectory& claimed,
                 const ExportProgress& progress) {
    AllAhead ahead(std::move(tensors), what.type);
    const checkpoint::Filler fill = [&](size_t i, int64_t first, std::span<std::byte> room) {
        ahead.fill(i, first, room);
    };
    write(what, options, claimed, fill, progress);
}

}  // namespace

ExportDirectory::ExportDirectory(std::string path, const Config& config) : path_(std::move(path)) {
    if (!config.model.path.empty()) {
        const std::filesystem::path model(config.model.path);
        description_ = read_text_file(model / "config.json", kModelFile);
        for (const std::string_view name : kCompanions) {
            // A link to nothing, as a broken cache has, is a file that is missing, and no choice.
            std::error_code unknown;
            const auto found = std::filesystem::symlink_status(model / name, unknown);
            if (found.type() == std::filesystem::file_type::not_found) continue;
            companions_.push_back({std::string(name), read_text_file(model / name, kCompanion)});
        }
    }
    try {
        claim();
    } catch (...) {
        give_back();
        throw;
    }
}

void ExportDirectory::claim() {
    std::error_code reason;
    made_ = std::filesystem::create_directory(path_, reason);
    if (kind_of(path_) != FileKind::directory)
        refuse(path_, "the directory cannot be made", reason ? reason.message() : "");
    if (::access(path_.c_str(), W_OK | X_OK) != 0)
        refuse(path_, "nothing can be written there", std::strerror(errno));
    // Two runs that find it empty would mix their files. Where nothing can be locked, they may.
    lock_ = open_above_standard(path_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (lock_ >= 0 && ::flock(lock_, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK)
        refuse(path_, "another ferry is about to write there", "the directory is locked");
    remove_leftovers();
    if (!std::filesystem::is_empty(path_))
        refuse(path_, "the directory is not empty",
               std::filesystem::directory_iterator(path_)->path().filename());
    // It may take no file for all that its mode says, or give none its name.
    try {
        const Draft trial(std::filesystem::path(path_) / "config.json");
    } catch (const Error& error) {
        if (!error.problem().limit.empty()) throw;  // the process's limit, no fault of the place
        refuse(path_, "nothing can be written there", error.problem().measured);
    }
}

// Drafts of an export that was killed: of what it wrote, nothing has its name yet.
void ExportDirectory::remove_leftovers() const {
    for (const auto& entry : std::filesystem::directory_iterator(path_)) {
        if (!is_leftover(entry.path().filename().string())) continue;
        std::error_code reason;
        std::filesystem::remove(entry.path(), reason);
        log_info("removed " + entry.path().string() + ", which an export left that was killed");
    }
}

// The run took its time. What another run exports there, or whoever cleared the place put there,
// makes no model with this one's files.
void ExportDirectory::check_still_claimed() const {
    const auto lost = [this](std::string what, std::string measured) {
        throw Error(Trouble::io, {.what = std::move(what),
                                  .where = path_,
                                  .measured = std::move(measured),
                                  .remedy = "export to a new directory, and leave that alone until "
                                            "the run has ended"});
    };
    if (!leads_to(path_, lock_))
        lost("the export's directory was removed or replaced during the run",
             ::access(path_.c_str(), F_OK) == 0 ? "another one is there" : std::strerror(errno));
    std::error_code unknown;  // such a directory may yet be written to
    for (const auto& entry : std::filesystem::directory_iterator(path_, unknown)) {
        const std::string name = entry.path().filename();
        if (name == "config.json" || name.ends_with(".safetensors") ||
            name.ends_with(".safetensors.index.json"))
            lost("files of another model came into the export's directory during the run", name);
    }
}

// With a random name, and for this user alone. Where what was beside it went with it, nearer to the
// root; only who asked for a directory there gets one.
ExportDirectory::Destination ExportDirectory::place() const {
    try {
        check_still_claimed();
        const Draft trial(std::filesystem::path(path_) / "config.json");
        return {.path = path_};
    } catch (const Error& error) {
        std::filesystem::path asked = path_;
        if (!asked.has_filename()) asked = asked.parent_path();  // behind a last slash
        const std::string name = asked.filename().string() + ".XXXXXX";
        auto above = asked.parent_path();
        do {
            std::string made = above / name;
            if (::mkdtemp(made.data()) != nullptr) return {made, error};
            if (errno != ENOENT || above.empty()) break;
            above = above.parent_path();
        } while (above != above.root_path() || above.empty());
        throw;
    }
}

ExportDirectory::~ExportDirectory() { give_back(); }

void ExportDirectory::give_back() {
    if (made_ && leads_to(path_, lock_)) ::rmdir(path_.c_str());  // which takes an empty one only
    if (lock_ >= 0) ::close(lock_);
}

void give_weights(Engine& engine) {
    for (const Read& read : in_order(Inside(engine).layers()))
        Inside(engine).read_tensor(read.layer, *read.tensor, [](std::span<const float>) {});
}

std::optional<NotWritten> write_weights(Engine& engine,
                                        const std::function<void(const TensorSource&)>& write) {
    const std::vector<Read> reads = in_order(Inside(engine).layers());
    size_t taken = 0;
    bool taking = false;
    std::optional<NotWritten> failed;
    const auto take = [&](const ValueSink& sink) {
        const Read& read = reads[taken];
        Inside(engine).read_tensor(read.layer, *read.tensor, [&](std::span<const float> values) {
            try {
                if (!failed) sink(values);
            } catch (const Error& error) {
                failed = {error};
            }
        });
        ++taken;
    };
    try {
        write([&](size_t i, const ValueSink& sink) {
            FERRY_CHECK(i == taken, std::to_string(i));
            taking = true;
            take(sink);
            taking = false;
            if (failed) throw Error(failed->why);
        });
    } catch (const Error& error) {
        if (taking) throw;  // the engine's
        failed = {error, dynamic_cast<const WholeElsewhere*>(&error) != nullptr};
    }
    while (failed && !Inside(engine).plan().partition.decides_alone() && taken < reads.size())
        take({});
    return failed;
}

std::optional<NotWritten> export_model(Engine& engine, const Config& config,
                                       const ExportOptions& options,
                                       const ExportDirectory* directory,
                                       const ExportProgress& progress) {
    if (directory == nullptr) {
        give_weights(engine);
        return std::nullopt;
    }
    return write_weights(engine, [&](const TensorSource& source) {
        write(exported_of(Inside(engine).layers(), config, options, *directory), options,
              *directory, source, progress);
    });
}

std::optional<Error> export_to(Engine& engine, const Config& config, const ExportOptions& options,
                               const ExportProgress& progress) {
    const Inside inside(engine);
    std::optional<ExportDirectory> claimed;
    if (auto refused = inside.on_first_rank([&] { claimed.emplace(options.directory, config); }))
        return refused;
    const auto failed =
        export_model(engine, config, options, claimed ? &*claimed : nullptr, progress);
    return inside.error_of_any(failed ? std::optional(failed->why) : std::nullopt);
}

void export_weights(const std::string& weights, const Config& config, const ExportOptions& options,
                    const ExportDirectory& directory, const ExportProgress& progress) {
    const model::Shape shape = model_of(config).shape;
    const auto layers = model::layers_of(shape, {}, false);
    checkpoint::require_model_files(weights);
    const LoadedWeights loaded(weights, shape, layers);
    const checkpoint::ModelFiles model = checkpoint::files_of_model(weights);
    for (const checkpoint::Shard& file : model.files)
        if (!file.in_stripes()) checkpoint::check_shard(model.checkpoint, file, [](int64_t) {});
    const Exported what = exported_of(layers, config, options, directory);
    std::vector<checkpoint::TensorSource> tensors;
    for (const Read& read : in_order(layers)) tensors.push_back(loaded.source_of(*read.tensor));
    write_ahead(std::move(tensors), what, options, directory, progress);
}

namespace {

// An array of a checkpoint that holds weights; it is there.
const checkpoint::Saved::Array& exported_array(const checkpoint::Saved& saved,
                                               const std::string& name) {
    const checkpoint::Saved::Array& found = *saved.find(name);
    if (found.stored->type) return found;
    throw Error(Trouble::io, {.what = "weights of a type that ferry does not write",
                              .where = saved.path() + ": " + name,
                              .measured = found.stored->dtype,
                              .limit = "F32, BF16 or F16",
                              .remedy = "use another checkpoint: ferry ckpt ls lists them"});
}

void require_shape(const checkpoint::StoredTensor& stored, const std::vector<int64_t>& shape,
                   const std::string& path) {
    if (stored.shape == shape) return;
    throw Error(Trouble::io, {.what = "an array has another shape than its tensor",
                              .where = path + ": " + stored.name,
                              .measured = fmt::format("[{}]", fmt::join(stored.shape, ", ")),
                              .limit = fmt::format("[{}]", fmt::join(shape, ", ")),
                              .remedy = "use another checkpoint: ferry ckpt ls lists them"});
}

}  // namespace

void export_checkpoint(const checkpoint::Saved& saved, const ExportOptions& options,
                       const ExportDirectory& directory, const ExportProgress& progress) {
    Exported what;
    std::string description;
    std::vector<const checkpoint::Saved::Array*> arrays;
    for (const checkpoint::Shard& shard : saved.manifest().shards) {
        const std::filesystem::path file = std::filesystem::path(saved.path()) / shard.file;
        if (shard.file == "config.json") description = read_text_file(file, kModelFile);
        if (!shard.file.starts_with(kWeightFiles)) continue;
        for (const checkpoint::ArraySum& array : shard.arrays) {
            arrays.push_back(&exported_array(saved, array.name));
            what.tensors.push_back({array.name, arrays.back()->stored->shape});
        }
    }
    if (arrays.empty())
        throw Error(Trouble::io, {.what = "the checkpoint holds no weights",
                                  .where = saved.path(),
                                  .limit = "a shard of the model",
                                  .remedy = "use another checkpoint: ferry ckpt ls lists them"});
    const DType computed = *arrays.front()->stored->type;
    what.type = options.type.value_or(computed);
    what.description = model::with_type(description, saved.path(), what.type);
    std::vector<checkpoint::TensorSource> tensors;
    for (size_t i = 0; i < arrays.size(); ++i) {
        const std::string master = what.tensors[i].name + ".master";
        const bool wider = what.type != computed && saved.find(master) != nullptr;
        tensors.push_back((wider ? exported_array(saved, master) : *arrays[i]).source());
        require_shape(*tensors.back().stored, what.tensors[i].shape, saved.path());
    }
    if (!saved.in_stripes())
        for (const checkpoint::Shard& shard : saved.manifest().shards)
            checkpoint::check_shard(saved.path(), shard, [](int64_t) {});
    write_ahead(std::move(tensors), what, options, directory, progress);
}

}  // namespace ferry::train
