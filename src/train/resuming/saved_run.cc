#include "saved_run.h"

#include <spdlog/fmt/fmt.h>
#include <spdlog/fmt/ranges.h>

#include <algorithm>
#include <iterator>
#include <set>
#include <sstream>
#include <vector>

#include "base/checksum.h"
#include "base/log.h"
#include "prove_files.h"

namespace ferry::train {

using planner::Plan;

namespace {

void refuse_another(const std::string& path, const std::string& mine, const std::string& theirs) {
    std::istringstream mine_lines(mine), their_lines(theirs);
    std::string line, their;
    // Where a key was added or removed, that line differs from its neighbour.
    while (std::getline(their_lines, their) && std::getline(mine_lines, line) && line == their) {
    }
    constexpr std::string_view kFollows = "schedule.total_steps";  // steps, where it is not set
    if (line.starts_with(kFollows) && their.starts_with(kFollows))
        throw Error(
            Trouble::usage,
            {.what = "the run cannot be resumed: its learning rate has another course",
             .where = path + ", " + std::string(kFollows),
             .measured = line + " (as many as steps, where it is not set)",
             .limit = "the checkpoint has " + their,
             .remedy = "steps may differ if the schedule stays: --set " + std::string(kFollows) +
                       "=" + their.substr(std::string_view(" = ").size() + kFollows.size())});
    throw Error(Trouble::usage,
                {.what = "the run cannot be resumed: the checkpoint is of another configuration",
                 .where = path + ", " + line.substr(0, line.find(" = ")),
                 .measured = line,
                 .limit = "the checkpoint has " + their,
                 .remedy = "resume with the configuration it was written by; steps, budgets.*, "
                           "swap.*, io.*, evaluate.*, checkpoint.*, zero.*, device and the number "
                           "of ranks may differ, which stays once momentum is exchanged. To start "
                           "a new run from its weights, set "
                           "model.path to it"});
}

// Offsets within `layer` of what a tensor and [first, first + count) have in common.
struct Common {
    int64_t from = 0, to = 0;
};
Common common_of(const model::Tensor& tensor, int64_t first, int64_t count) {
    return {std::max(first, tensor.offset), std::min(first + count, tensor.offset + tensor.count)};
}

}  // namespace

template <class Work>
void SavedRun::naming_another(const Work& work) const {
    try {
        work();
    } catch (const Error& error) {
        if (error.trouble() != Trouble::io) throw;
        log_warn(path_ + " is damaged; looking for a checkpoint before it that is whole");
        const auto whole = checkpoint::whole_before(path_);
        throw checkpoint::with_remedy(
            error, whole ? "the newest that is whole: --resume " + *whole
                         : "there is none before it that is whole: start afresh, in another "
                           "checkpoint.dir");
    }
}

SavedRun::SavedRun(std::string path) : path_(std::move(path)) {
    naming_another([this] { saved_ = std::make_unique<checkpoint::Saved>(path_); });
}

std::string SavedRun::text() const {
    const std::string all = write_manifest(manifest());
    return fmt::format("the checkpoint of step {}, {:016x}", manifest().step,
                       checksum(std::as_bytes(std::span(all))));
}

void SavedRun::require(const std::string& identity, int64_t steps) const {
    if (manifest().training != identity) refuse_another(path_, identity, manifest().training);
    if (manifest().step <= steps) return;
    throw Error(Trouble::usage,
                {.what = "the run cannot be resumed: the checkpoint is beyond its last step",
                 .where = "steps",
                 .measured = fmt::format("steps = {}", steps),
                 .limit = fmt::format("{} is of step {}", path_, manifest().step),
                 .remedy = fmt::format("set steps to {} or more, or resume from an older one",
                                       manifest().step)});
}

void SavedRun::require(const Plan& plan) const {
    for (const model::Layer& layer : plan.layers)
        for (const model::Tensor& tensor : layer.tensors)
            for (const StateArray& array : state_arrays_of(plan, layer, tensor))
                require(tensor, array);
}

void SavedRun::require_errors(const Plan& plan, int64_t first) const {
    const int ranks = plan.partition.ranks;
    if (manifest().ranks != ranks)
        throw Error(Trouble::usage,
                    {.what = "the run cannot be resumed by another number of ranks: since momentum "
                             "is exchanged, each keeps the error of what it has sent",
                     .where = path_,
                     .measured = fmt::format("{} ranks", ranks),
                     .limit = fmt::format("{} ranks, as of update {}", manifest().ranks, first),
                     .remedy = fmt::format("resume with {} ranks, or from a checkpoint of at most "
                                           "{} updates",
                                           manifest().ranks, first - 1)});
    for (const model::Layer& layer : plan.layers)
        for (const model::Tensor& tensor : layer.tensors)
            for (const StateArray& array : error_arrays(plan.partition))
                if (tensor.trainable) require(tensor, array);
}

void SavedRun::require(const model::Tensor& tensor, const StateArray& array) const {
    const std::string name = tensor.name + std::string(array.suffix);
    const auto* found = saved_->find(name);
    const std::vector<int64_t> shape = array.shape(tensor.whole_shape());
    if (found && found->stored->dtype == array.dtype && found->stored->shape == shape) return;
    const auto shown_of = [](std::string_view type, const std::vector<int64_t>& sizes) {
        return fmt::format("{} [{}]", type, fmt::join(sizes, ", "));
    };
    throw Error(
        Trouble::usage,
        {.what = "the checkpoint's arrays are not those of this run",
         .where = path_ + ": " + name,
         .measured = found ? shown_of(found->stored->dtype, found->stored->shape) : "missing",
         .limit = shown_of(array.dtype, shape),
         .remedy = "resume with the configuration it was written by, optimizer.fp32_moments too"});
}

void SavedRun::prove(Team& team, int part, int parts, StartUp& start_up) const {
    if (saved_->in_stripes()) return;
    naming_another([&] { prove_files(path_, manifest().shards, team, part, parts, start_up); });
}

void SavedRun::prove_errors(const Plan& plan, Team& team, int part, int parts,
                            StartUp& start_up) const {
    if (!saved_->in_stripes()) return;  // prove() does it
    std::set<std::string, std::less<>> names;
    for (const model::Layer& layer : plan.layers) {
        for (const model::Tensor& tensor : layer.tensors) {
            if (!tensor.trainable) continue;
            for (const StateArray& array : state_arrays_of(plan, layer, tensor))
                if (array.what == StateArray::What::first_moment ||
                    array.what == StateArray::What::second_moment)
                    names.insert(tensor.name + array.suffix);
            for (const StateArray& array : error_arrays(plan.partition))
                names.insert(tensor.name + array.suffix);
        }
    }
    std::vector<checkpoint::Shard> files;
    std::ranges::copy_if(
        manifest().shards, std::back_inserter(files), [&](const checkpoint::Shard& shard) {
            return std::ranges::any_of(shard.arrays, [&](const checkpoint::ArraySum& array) {
                return names.contains(array.name);
            });
        });
    naming_another([&] { prove_files(path_, files, team, part, parts, start_up); });
}

// What the chunk is filled from; and what is not loaded but belongs to the checkpoint, once.
void SavedRun::want(const Plan& plan, const StateIo::ChunkRun& part) {
    const planner::Chunk& chunk = *part.chunk;
    const model::Layer& layer = plan.layers[static_cast<size_t>(chunk.layer)];
    const int64_t first = chunk.first + part.at;
    for (const model::Tensor& tensor : layer.tensors) {
        const auto [from, to] = common_of(tensor, first, part.count);
        if (from >= to) continue;
        for (const StateArray& array : state_arrays_of(plan, layer, tensor)) {
            const bool is_cast = array.what == StateArray::What::weight && tensor.trainable;
            const bool is_moment =
                array.what != StateArray::What::weight && array.what != StateArray::What::master;
            const bool loads = !is_cast && (!is_moment || chunk.trainable);
            if (!loads && !(plan.owns(chunk) && plan.partition.stage.has(chunk.layer))) continue;
            const auto& source = saved_->find(tensor.name + std::string(array.suffix))->source();
            for (const model::SliceRun& run :
                 model::runs_of(tensor, from - tensor.offset, to - from)) {
                const int64_t begin = array.width.of(run.from);
                ahead_->want(source, begin, array.width.of(run.from + run.count) - begin);
            }
        }
    }
    ahead_->end_step();
}

template <class Body>
void SavedRun::each_part(const model::Layer& layer, const StateArray& array, int64_t first,
                         std::span<std::byte> out, const Body& body) const {
    const Width width = array.width;
    const int64_t count = std::ssize(out) / width.bytes * width.elements;
    for (const model::Tensor& tensor : layer.tensors) {
        const auto [from, to] = common_of(tensor, first, count);
        if (from >= to) continue;
        const auto& found = *saved_->find(tensor.name + std::string(array.suffix));
        for (const model::SliceRun& run : model::runs_of(tensor, from - tensor.offset, to - from))
            body(found, width.of(run.from),
                 out.subspan(static_cast<size_t>(width.of(tensor.offset + run.at - first)),
                             static_cast<size_t>(width.of(run.count))));
    }
}

void SavedRun::read_proved(const model::Layer& layer, const StateArray& array, int64_t first,
                           std::span<std::byte> out) const {
    each_part(layer, array, first, out,
              [this](const checkpoint::Saved::Array& from, int64_t at, std::span<std::byte> to) {
                  saved_->read(from, at, to);
              });
}

StateIo::Contents SavedRun::contents(const Plan& plan, const StateIo::FirstMoment& first_moment,
                                     Team& team, int64_t memory) {
    const bool narrow = plan.compute != DType::f32;
    return {.master =
                [this, narrow](const model::Layer& layer, int64_t first, std::span<float> out) {
                    std::ranges::fill(out, 0.0f);
                    for (const model::Tensor& tensor : layer.tensors) {
                        const auto [from, to] = common_of(tensor, first, std::ssize(out));
                        if (from >= to) continue;
                        const bool master = narrow && tensor.trainable;
                        const auto* array =
                            saved_->find(master ? tensor.name + ".master" : tensor.name);
                        for (const model::SliceRun& run :
                             model::runs_of(tensor, from - tensor.offset, to - from)) {
                            const auto at = static_cast<size_t>(tensor.offset + run.at - first);
                            ahead_->read_floats(*array->stored, run.from,
                                                out.subspan(at, static_cast<size_t>(run.count)));
                        }
                    }
                },
            .first_moment = first_moment,
            .moments =
                [this](const model::Layer& layer, const StateArray& array, int64_t first,
                       std::span<std::byte> out) {
                    each_part(
                        layer, array, first, out,
                        [this](const checkpoint::Saved::Array& from, int64_t at,
                               std::span<std::byte> to) { ahead_->read(*from.stored, at, to); });
                },
            .begin =
                [this, &plan, &team, memory](std::span<const StateIo::ChunkRun> parts) {
                    naming_another([&] {
                        ahead_ = std::make_unique<checkpoint::TensorsAhead>(team, memory);
                        for (const StateIo::ChunkRun& part : parts) want(plan, part);
                    });
                },
            .next = [this] { naming_another([this] { ahead_->next(); }); }};
}

}  // namespace ferry::train
