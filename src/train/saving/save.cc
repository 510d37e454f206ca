#include "save.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>

#include "base/checksum.h"
#include "base/log.h"
#include "checkpoint/array_file.h"
#include "checkpoint/steps.h"
#include "train/inside.h"
#include "train/setup/model_of.h"
#include "train/setup/numerics_record.h"
#include "train/state/shared_values.h"

namespace ferry::train {

using checkpoint::ArrayFile;
using checkpoint::ArrayInfo;
using checkpoint::Manifest;
using planner::Plan;

std::string checkpoint_identity_of(const Config& config, const model::Shape& shape,
                                   const TokenFileInfo& tokens) {
    std::string text;
    std::istringstream lines(describe_training(config));
    for (std::string line; std::getline(lines, line);)
        if (!line.starts_with("device = ")) text += line + "\n";
    const bool masks = config.attention.pattern != AttentionPattern::dense;
    for (const KeyValue& one : describe_values(without_idle_tiles(config, shape)))
        if (one.key.starts_with("batch.") ||
            // The table's file may lie elsewhere; its hash is in the numerics record.
            (one.key.starts_with("numerics.") && one.key != "numerics.products") ||
            (masks && one.key.starts_with("attention.")) ||
            (config.data.isolate_documents && one.key == "data.isolate_documents"))
            text += one.key + " = " + one.value + "\n";
    return text + fmt::format("model = {}\ndata.tokens = {} tokens with checksum {:016x}\n",
                              shape_text(shape), tokens.count, tokens.checksum);
}

void note_run(const RunState& state, Manifest& manifest) {
    const StepReport& last = state.report;
    manifest.step = state.step;
    manifest.updates = state.updates;
    manifest.moment_updates = state.moment_updates;
    manifest.loss_scale = state.loss_scale.value;
    manifest.scale_good = state.loss_scale.good;
    manifest.scale_skipped = state.loss_scale.skipped;
    manifest.skipped_in_a_row = state.skipped_in_a_row;
    manifest.unclipped_in_a_row = state.unclipped_in_a_row;
    manifest.last = {.loss = last.loss,
                     .gradient_norm = last.gradient_norm,
                     .clip_factor = last.clip_factor,
                     .lr = last.lr,
                     .loss_scale = last.loss_scale,
                     .seconds = last.seconds,
                     .targets = last.targets,
                     .tokens = last.tokens,
                     .skipped = last.skipped,
                     .speculative = last.speculative,
                     .committed = last.committed};
}

RunState run_of(const Manifest& manifest) {
    const checkpoint::LastStep& last = manifest.last;
    return {.step = manifest.step,
            .updates = manifest.updates,
            .moment_updates = manifest.moment_updates,
            .loss_scale = {manifest.loss_scale, manifest.scale_good, manifest.scale_skipped},
            .skipped_in_a_row = manifest.skipped_in_a_row,
            .unclipped_in_a_row = manifest.unclipped_in_a_row,
            // Of an imported step nothing is known.
            .report = {.step = last.tokens > 0 ? manifest.step : 0,
                       .loss = last.loss,
                       .gradient_norm = last.gradient_norm,
                       .clip_factor = last.clip_factor,
                       .lr = last.lr,
                       .loss_scale = last.loss_scale,
                       .targets = last.targets,
                       .tokens = last.tokens,
                       .skipped = last.skipped,
                       .speculative = last.speculative,
                       .committed = last.committed,
                       .seconds = last.seconds}};
}

namespace {

struct SavedTensor {
    int64_t layer = 0;
    const model::Tensor* tensor = nullptr;
    Kept kept = Kept::state;
    std::vector<StateArray> arrays{};
    int64_t bytes = 0;
};

// Everything that is written, in its order.
std::vector<SavedTensor> entries_of(const Plan& plan, const std::vector<model::Layer>& layers,
                                    bool errors) {
    std::vector<SavedTensor> entries;
    const auto add = [&](size_t layer, const model::Tensor& tensor, Kept kept,
                         std::vector<StateArray> arrays) {
        SavedTensor entry{.layer = static_cast<int64_t>(layer),
                          .tensor = &tensor,
                          .kept = kept,
                          .arrays = std::move(arrays)};
        for (const StateArray& array : entry.arrays)
            entry.bytes += array.width.of(tensor.whole_count());
        entries.push_back(std::move(entry));
    };
    for (size_t l = 0; l < layers.size(); ++l) {
        for (const model::Tensor& tensor : layers[l].tensors)
            add(l, tensor, Kept::state, state_arrays_of(plan, layers[l], tensor));
    }
    for (size_t l = 0; errors && l < layers.size(); ++l) {
        for (const model::Tensor& tensor : layers[l].tensors)
            if (tensor.trainable) add(l, tensor, Kept::errors, error_arrays(plan.partition));
    }
    return entries;
}

// Tensors whose arrays are in files of the same number.
using Group = std::span<const SavedTensor>;

std::vector<Group> groups_of(std::span<const SavedTensor> entries, int64_t most_bytes) {
    std::vector<Group> groups;
    size_t first = 0;
    int64_t bytes = 0;
    for (size_t i = 0; i < entries.size(); ++i) {
        if (bytes > 0 && bytes + entries[i].bytes > most_bytes) {
            groups.push_back(entries.subspan(first, i - first));
            first = i;
            bytes = 0;
        }
        bytes += entries[i].bytes;
    }
    groups.push_back(entries.subspan(first));
    return groups;
}

using Arrays = std::map<std::string_view, std::vector<ArrayInfo>>;  // by the name of their files

Arrays arrays_of(Group group) {
    Arrays arrays;
    for (const SavedTensor& entry : group) {
        for (const StateArray& array : entry.arrays)
            arrays[array.file].push_back({.name = entry.tensor->name + std::string(array.suffix),
                                          .dtype = std::string(array.dtype),
                                          .shape = array.shape(entry.tensor->whole_shape()),
                                          .bytes = array.width.of(entry.tensor->whole_count())});
    }
    return arrays;
}

// All of a checkpoint's files but the manifest, in a directory of its own.
class Writer {
public:
    Writer(const Plan& plan, const std::vector<model::Layer>& layers, const Saving& saving)
        : entries_(entries_of(plan, layers, saving.errors)),
          groups_(groups_of(entries_, saving.shard_bytes)),
          saving_(saving) {
        for (const Group group : groups_) {
            const Arrays files = arrays_of(group);
            files_ += std::ssize(files);
            files_at_once_ = std::max(files_at_once_, std::ssize(files));
            for (const auto& [file, arrays] : files) {
                bytes_ += checkpoint::header_bytes(arrays);
                for (const ArrayInfo& array : arrays) bytes_ += array.bytes;
            }
        }
    }

    const std::vector<SavedTensor>& entries() const { return entries_; }
    int64_t bytes() const { return bytes_; }
    int64_t files() const { return files_; }

    // `read` gives an entry's arrays.
    template <class Read>
    std::vector<checkpoint::Shard> write(const std::string& directory, Team& team,
                                         const Read& read) {
        std::vector<checkpoint::Shard> shards;
        checkpoint::FileWriter writer(files_at_once_);
        for (size_t g = 0; g < groups_.size(); ++g) {
            std::map<std::string_view, std::unique_ptr<ArrayFile>> files;
            for (auto& [file, arrays] : arrays_of(groups_[g])) {
                written_ += checkpoint::header_bytes(arrays);
                files[file] = std::make_unique<ArrayFile>(
                    writer, std::filesystem::path(directory) / name_of(file, g), std::move(arrays));
            }
            for (const SavedTensor& entry : groups_[g])
                read(entry, [&](std::span<const std::span<const std::byte>> arrays) {
                    std::vector<checkpoint::NextBytes> next;
                    for (size_t a = 0; a < arrays.size(); ++a) {
                        next.push_back({files.at(entry.arrays[a].file).get(), arrays[a]});
                        written_ += std::ssize(arrays[a]);
                    }
                    checkpoint::write_side_by_side(std::move(next), team);
                    if (saving_.progress) saving_.progress(written_, bytes_);
                });
            for (auto& [file, array_file] : files) shards.push_back(array_file->finish());
        }
        return shards;
    }

    // Which shard has a weight, as transformers asks for it; "": there is one alone.
    std::string index() const {
        if (groups_.size() == 1) return {};
        nlohmann::ordered_json map = nlohmann::ordered_json::object();
        auto& object = map.get_ref<nlohmann::ordered_json::object_t&>();
        int64_t bytes = 0;
        for (size_t g = 0; g < groups_.size(); ++g) {
            for (const SavedTensor& entry : groups_[g]) {
                if (entry.kept == Kept::errors) continue;
                object.push_back({entry.tensor->name, name_of("model", g)});
                bytes += entry.arrays.front().width.of(entry.tensor->whole_count());
            }
        }
        const nlohmann::ordered_json index{{"metadata", {{"total_size", bytes}}},
                                           {"weight_map", std::move(map)}};
        return index.dump(2) + "\n";
    }

private:
    std::string name_of(std::string_view file, size_t group) const {
        if (groups_.size() == 1) return std::string(file) + ".safetensors";
        return fmt::format("{}-{:05}-of-{:05}.safetensors", file, group + 1, groups_.size());
    }

    std::vector<SavedTensor> entries_;
    std::vector<Group> groups_;
    const Saving& saving_;
    int64_t bytes_ = 0, files_ = 0, files_at_once_ = 0, written_ = 0;
};

// Throws where so much more has no room.
void require_room(const checkpoint::Steps& directory, int64_t bytes, int64_t step) {
    constexpr int64_t kBeside = kMiB;  // manifest, directories
    const int64_t free = directory.free_bytes(), wanted = bytes + kBeside;
    if (free < 0 || free >= wanted) return;
    throw Error(
        Trouble::io,
        {.what = "there is no room for the checkpoint of step " + std::to_string(step),
         .where = directory.directory(),
         .measured = fmt::format("{} free, {} bytes missing", format_bytes(free), wanted - free),
         .limit = format_bytes(wanted),
         .remedy = directory.named_by() == checkpoint::NamedBy::call
                       ? "free that much there, or call it with a directory on another drive"
                       : "free that much there, or keep fewer (checkpoint.keep); older "
                         "checkpoints are as they were"});
}

}  // namespace

int64_t checkpoint_bytes(const Plan& plan, const std::vector<model::Layer>& layers,
                         const Saving& saving) {
    return Writer(plan, layers, saving).bytes();
}

int64_t checkpoint_files(const Plan& plan, const std::vector<model::Layer>& layers,
                         const Saving& saving) {
    constexpr int64_t kTexts = 2;  // the model's description and the manifest
    return Writer(plan, layers, saving).files() + kTexts;
}

int64_t stored_checkpoint_bytes(const Plan& plan) {
    int64_t bytes = 0;
    const auto add = [&](swap::ObjectId object) {
        if (object != swap::kNoObject && plan.objects[object].home == swap::Tier::nvme)
            bytes += plan.objects[object].bytes;
    };
    // Neither of other ranks' shards nor where zeros fill up this one's.
    const auto is_read = [&](const planner::Chunk& chunk) {
        const auto& tensors = plan.layers[static_cast<size_t>(chunk.layer)].tensors;
        return chunk.owner == plan.partition.rank &&
               std::ranges::any_of(tensors, [&](const model::Tensor& tensor) {
                   return tensor.offset < chunk.first + chunk.count &&
                          chunk.first < tensor.offset + tensor.count;
               });
    };
    for (const planner::Chunk& chunk : plan.chunks) {
        if (!is_read(chunk)) continue;
        if (chunk.trainable) add(chunk.state);
        if (!chunk.trainable || plan.state.split) add(chunk.weight);  // else it is cast again
    }
    return bytes;
}

bool reads_own_part(const Plan& plan) {
    return plan.partition.ranks == plan.partition.of_run() && !plan.has_feedback();
}

int64_t own_checkpoint_bytes(const Plan& plan) {
    int64_t bytes = 0;
    for (const SavedTensor& entry : entries_of(plan, plan.layers, false)) {
        const zero::Run own = own_run(plan.partition, plan.layers[static_cast<size_t>(entry.layer)],
                                      {entry.tensor->offset, entry.tensor->count});
        for (const StateArray& array : entry.arrays) bytes += array.width.of(own.count);
    }
    return bytes;
}

bool reads_meanwhile(const Plan& plan) {
    const auto in_host = [&](swap::ObjectId object) {
        return plan.objects[object].home == swap::Tier::host;
    };
    return reads_own_part(plan) && std::ranges::all_of(plan.chunks, [&](const auto& chunk) {
               if (chunk.replica) return true;  // its owner's is read
               if (chunk.trainable && !in_host(chunk.state)) return false;
               return (chunk.trainable && !plan.state.split) || in_host(chunk.weight);
           });
}

void write_checkpoint(const Plan& plan, const std::vector<model::Layer>& layers,
                      Unwritten unwritten, const Saving& saving, Team& team,
                      const ReadArrays& read) {
    Writer writer(plan, layers, saving);
    checkpoint::Steps& steps = *saving.directory;
    require_room(steps, writer.bytes(), unwritten.manifest.step);
    try {
        steps.add(unwritten.manifest, [&](const std::string& directory) {
            std::vector<checkpoint::Shard> shards =
                writer.write(directory, team, [&](const SavedTensor& entry, const ArraySink& sink) {
                    read(entry.layer, *entry.tensor, entry.kept, sink);
                });
            for (const auto& [name, text] :
                 {std::pair{"model.safetensors.index.json", writer.index()},
                  {"config.json", unwritten.description}})
                if (!text.empty())
                    shards.push_back(checkpoint::write_text_shard(directory, name, text));
            return shards;
        });
    } catch (const Error& error) {
        // Says what is missing, where it is for want of room: what was written is gone again.
        if (error.trouble() == Trouble::io)
            require_room(steps, writer.bytes(), unwritten.manifest.step);
        throw;
    }
    if (saving.progress) saving.progress(writer.bytes(), writer.bytes());
}

void read_checkpoint(const Plan& plan, const std::vector<model::Layer>& layers, bool errors,
                     const ReadArrays& read, const ArraySink& sink,
                     const std::function<bool()>& next) {
    for (const SavedTensor& entry : entries_of(plan, layers, errors)) {
        read(entry.layer, *entry.tensor, entry.kept, sink);
        if (!next()) return;
    }
}

std::optional<Error> save_checkpoint(Engine& engine, const std::string& directory,
                                     const std::string& program) {
    const Inside inside(engine);
    std::optional<checkpoint::Steps> steps;
    const auto claim = [&] { steps.emplace(directory, checkpoint::NamedBy::call); };
    if (auto refused = inside.on_first_rank(claim)) return refused;
    return inside.error_of_any(
        inside.save({.directory = steps ? &*steps : nullptr, .program = program}));
}

}  // namespace ferry::train
