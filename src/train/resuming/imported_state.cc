#include "imported_state.h"

#include <spdlog/fmt/fmt.h>
#include <spdlog/fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <filesystem>

#include "base/files.h"
#include "checkpoint/saved.h"
#include "checkpoint/steps.h"
#include "model/huggingface.h"
#include "prove_files.h"

namespace ferry::train {
namespace {

using What = StateArray::What;

constexpr std::string_view kMaster = ".master", kFirst = ".exp_avg", kSecond = ".exp_avg_sq",
                           kFirstScales = ".exp_avg_scales", kSecondScales = ".exp_avg_sq_scales";
constexpr std::array kSuffixes{kMaster, kFirst, kSecond, kFirstScales, kSecondScales};
constexpr std::string_view kCodes = "U8";

std::string_view scales_of(std::string_view moment) {
    return moment == kSecond ? kSecondScales : kFirstScales;
}

bool is_of_scales(std::string_view suffix) {
    return suffix == kFirstScales || suffix == kSecondScales;
}

// Files of a directory that may hold state: all but the weights.
std::vector<std::filesystem::path> state_files_in(const std::filesystem::path& directory) {
    std::vector<std::filesystem::path> files;
    if (kind_of(directory) != FileKind::directory) return files;
    for (const auto& entry : std::filesystem::directory_iterator(directory)) {
        const std::string name = entry.path().filename();
        if (name.ends_with(".safetensors") && !name.starts_with("model"))
            files.push_back(entry.path());
    }
    std::ranges::sort(files);
    return files;
}

bool is_state(std::string_view name) {
    return std::ranges::any_of(kSuffixes,
                               [&](std::string_view suffix) { return name.ends_with(suffix); });
}

// One of the arrays that are kept of moments, of these values.
void store(std::span<const float> values, const StateArray& array, optim::Map map,
           std::span<std::byte> out) {
    if (array.dtype == "BF16") {
        auto* const rounded = reinterpret_cast<uint16_t*>(out.data());
        std::ranges::transform(values, rounded, [](float value) { return to_bf16(value); });
        return;
    }
    const bool coded =
        array.what == What::first_scale || array.what == What::second_scale || array.dtype == "U8";
    if (!coded) {
        std::memcpy(out.data(), values.data(), values.size_bytes());
        return;
    }
    std::array<uint8_t, kMomentBlock> codes{};
    for (size_t block = 0; block < values.size() / kMomentBlock; ++block) {
        float scale = 0;
        optim::encode_block(map, values.subspan(block * kMomentBlock, kMomentBlock), codes.data(),
                            &scale);
        if (array.dtype == "U8")
            std::memcpy(out.data() + block * kMomentBlock, codes.data(), kMomentBlock);
        else
            std::memcpy(out.data() + block * sizeof scale, &scale, sizeof scale);
    }
}

}  // namespace

ImportedState::ImportedState(const std::string& path, const model::Shape& shape,
                             const std::vector<model::Layer>& layers)
    : path_(path), weights_(path, shape, layers) {
    Arrays found;
    for (const std::filesystem::path& file : state_files_in(path)) {
        auto opened = std::make_unique<checkpoint::Weights>(file);
        bool used = false;
        for (const checkpoint::StoredTensor& stored : opened->tensors()) {
            if (!is_state(stored.name)) continue;
            used = true;
            if (!found.emplace(stored.name, Array{opened.get(), &stored}).second)
                throw Error(Trouble::usage, {.what = "an array of the state is in two files",
                                             .where = file.string() + ": " + stored.name,
                                             .remedy = "leave one of them"});
        }
        if (used) files_.push_back(std::move(opened));
    }
    bind(std::move(found), model::optional_prefix(shape.family), layers);
}

// By ferry's names. As of weights, the base model's prefix may be missing; what belongs to no
// tensor means that the model is another one.
void ImportedState::bind(Arrays found, std::string_view prefix,
                         const std::vector<model::Layer>& layers) {
    for (const model::Layer& layer : layers) {
        for (const model::Tensor& tensor : layer.tensors) {
            for (const std::string_view suffix : kSuffixes) {
                const std::string name = tensor.name + std::string(suffix);
                auto at = found.find(name);
                if (at == found.end() && name.starts_with(prefix))
                    at = found.find(std::string_view(name).substr(prefix.size()));
                if (at == found.end()) continue;
                const std::vector<int64_t> shape =
                    is_of_scales(suffix) ? std::vector{ceil_div(tensor.count, kMomentBlock)}
                                         : tensor.shape;
                if (at->second.stored->shape != shape)
                    refuse("an array of the state has another shape than its tensor", at->first,
                           fmt::format("[{}]", fmt::join(at->second.stored->shape, ", ")),
                           fmt::format("[{}]", fmt::join(shape, ", ")),
                           "check that state and model belong together");
                arrays_.emplace(name, at->second);
                has_masters_ |= suffix == kMaster;
                has_moments_ |= suffix != kMaster;
                found.erase(at);
            }
        }
    }
    if (!found.empty())
        refuse("the state holds an array of a tensor that the model does not have",
               found.begin()->first, fmt::format("{} such arrays", found.size()), "",
               "check that state and model belong together");
}

void ImportedState::refuse(std::string what, const std::string& name, std::string measured,
                           std::string limit, std::string remedy) const {
    throw Error(Trouble::usage, {.what = std::move(what),
                                 .where = path_ + ": " + name,
                                 .measured = std::move(measured),
                                 .limit = std::move(limit),
                                 .remedy = std::move(remedy)});
}

const ImportedState::Array* ImportedState::find(const model::Tensor& tensor,
                                                std::string_view suffix) const {
    const auto found = arrays_.find(tensor.name + std::string(suffix));
    return found == arrays_.end() ? nullptr : &found->second;
}

void ImportedState::require(const planner::Plan& plan) const {
    for (const model::Layer& layer : plan.layers) {
        for (const model::Tensor& tensor : layer.tensors) {
            if (!tensor.trainable) continue;
            require_array(tensor, kMaster, has_masters_);
            bool first = false, second = false;
            for (const StateArray& array : state_arrays_of(plan, layer, tensor)) {
                if (array.what != What::first_moment && array.what != What::second_moment) continue;
                first = first || array.what == What::first_moment;
                second = second || array.what == What::second_moment;
                require_array(tensor, array.suffix, has_moments_);
            }
            // Adam's first moment is no momentum of SGD's, Muon's or Lion's.
            if (first && !second && find(tensor, kSecond) != nullptr)
                refuse("the state is another method's", tensor.name + std::string(kSecond),
                       "a second moment", "optimizer.method keeps none of this tensor",
                       "set the method that made it, or take the files of moments away");
        }
    }
}

void ImportedState::require_array(const model::Tensor& tensor, std::string_view suffix,
                                  bool wanted) const {
    const std::string name = tensor.name + std::string(suffix);
    const Array* found = find(tensor, suffix);
    if (found == nullptr && wanted)
        refuse("the state lacks an array of a tensor", name, "missing",
               suffix == kMaster ? "the masters of all tensors that train, or none"
                                 : "the moments of all tensors that train, or none",
               "write the others too, or take the files of this kind away");
    if (found == nullptr || found->stored->type) return;
    if (suffix != kMaster && found->stored->dtype == kCodes) return require_codes(tensor, suffix);
    refuse("state of a type that is not read", name, found->stored->dtype,
           suffix == kMaster ? "F32, BF16 or F16" : "F32, BF16, F16, or U8 with scales",
           "write it in one of these");
}

void ImportedState::require_codes(const model::Tensor& tensor, std::string_view suffix) const {
    const Array* scales = find(tensor, scales_of(suffix));
    const std::string name = tensor.name + std::string(scales_of(suffix));
    if (scales == nullptr)
        refuse("the codes of moments have no scales", name, "missing",
               "one for each block of 256 codes", "write them too, or moments in F32");
    if (!scales->stored->type)
        refuse("state of a type that is not read", name, scales->stored->dtype, "F32, BF16 or F16",
               "write it in one of these");
}

void ImportedState::prove(Team& team, StartUp& start_up) const {
    const std::filesystem::path path = checkpoint::without_end(path_);
    if (const auto manifest = checkpoint::manifest_of_model(path))
        prove_files(path, manifest->shards, team, 0, 1, start_up);
}

void ImportedState::read_moments(const model::Layer& layer, const StateArray& array, int64_t first,
                                 std::span<std::byte> out,
                                 const StateIo::FirstMoment& of_first) const {
    const bool is_second = array.what == What::second_moment || array.what == What::second_scale;
    const std::string_view suffix = is_second ? kSecond : kFirst;
    const int64_t count = std::ssize(out) / array.width.bytes * array.width.elements;
    // Of padding, what a new run has.
    std::vector<float> values(static_cast<size_t>(count), is_second ? 0.0f : of_first.value);
    const optim::Map map = is_second ? optim::Map::without_sign : of_first.map;
    const auto for_parts = [&](const auto& body) {
        for (const model::Tensor& tensor : layer.tensors) {
            const int64_t from = std::max(first, tensor.offset),
                          to = std::min(first + count, tensor.offset + tensor.count);
            if (from < to) body(tensor, from, to - from);
        }
    };
    for_parts([&](const model::Tensor& tensor, int64_t from, int64_t elements) {
        if (!has_as_kept(tensor, array))
            read_values(tensor, suffix, map, from - tensor.offset,
                        std::span(values).subspan(static_cast<size_t>(from - first),
                                                  static_cast<size_t>(elements)));
    });
    store(values, array, map, out);
    for_parts([&](const model::Tensor& tensor, int64_t from, int64_t elements) {
        if (!has_as_kept(tensor, array)) return;
        const Array& found = *find(tensor, array.suffix);
        found.file->read_bytes(*found.stored, array.width.of(from - tensor.offset),
                               out.subspan(static_cast<size_t>(array.width.of(from - first)),
                                           static_cast<size_t>(array.width.of(elements))));
    });
}

bool ImportedState::has_as_kept(const model::Tensor& tensor, const StateArray& array) const {
    const bool coded = array.dtype == kCodes || is_of_scales(array.suffix);
    const Array* found = coded ? find(tensor, array.suffix) : nullptr;
    return found != nullptr && found->stored->dtype == array.dtype;
}

void ImportedState::read_values(const model::Tensor& tensor, std::string_view suffix,
                                optim::Map map, int64_t first, std::span<float> out) const {
    const Array* found = find(tensor, suffix);
    if (found == nullptr) return;
    if (found->stored->type) return found->file->read(*found->stored, first, out);
    const Array& scaled = *find(tensor, scales_of(suffix));
    const int64_t block = first / kMomentBlock, end = first + std::ssize(out);
    std::vector<uint8_t> codes(out.size());
    std::vector<float> scales(static_cast<size_t>(ceil_div(end, kMomentBlock) - block));
    found->file->read_bytes(*found->stored, first, std::as_writable_bytes(std::span(codes)));
    scaled.file->read(*scaled.stored, block, scales);
    for (size_t i = 0; i < out.size(); ++i) {
        const int64_t of = (first + static_cast<int64_t>(i)) / kMomentBlock - block;
        out[i] = optim::share_of(map, codes[i]) * scales[static_cast<size_t>(of)];
    }
}

StateIo::Contents ImportedState::contents(StateIo::FirstMoment first) const {
    StateIo::Contents contents{
        .master =
            [this](const model::Layer& layer, int64_t at, std::span<float> out) {
                weights_.fill(layer, at, out);
                const int64_t end = at + std::ssize(out);
                for (const model::Tensor& tensor : layer.tensors) {
                    const int64_t from = std::max(at, tensor.offset),
                                  to = std::min(end, tensor.offset + tensor.count);
                    const Array* found = from < to ? find(tensor, kMaster) : nullptr;
                    if (found)
                        found->file->read(*found->stored, from - tensor.offset,
                                          out.subspan(static_cast<size_t>(from - at),
                                                      static_cast<size_t>(to - from)));
                }
            },
        .first_moment = first};
    if (has_moments_)
        contents.moments = [this, first](const model::Layer& layer, const StateArray& array,
                                         int64_t at, std::span<std::byte> out) {
            read_moments(layer, array, at, out, first);
        };
    return contents;
}

}  // namespace ferry::train
