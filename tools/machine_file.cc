#include "machine_file.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "base/files.h"
#include "base/json_reader.h"
#include "io_site.h"
#include "writable.h"

namespace ferry::tools {
namespace {

using nlohmann::json;

const char* key_of(model::Saved what) {
    return what == model::Saved::attention ? "attention_seconds" : "mlp_seconds";
}

constexpr const char* kOtherFile =
    "give another file, or write it with `ferry bench --all --save FILE`";

[[noreturn]] void refuse(const std::string& file, std::string what, std::string measured = {},
                         std::string remedy = kOtherFile) {
    throw Error(Trouble::usage, {.what = std::move(what),
                                 .where = file,
                                 .measured = std::move(measured),
                                 .remedy = std::move(remedy)});
}

// A path's name may be no UTF-8.
std::string text_of(const json& content) {
    return content.dump(2, ' ', false, json::error_handler_t::replace) + "\n";
}

json read_file(const std::string& file, bool may_be_new) {
    std::error_code ignored;
    if (may_be_new && !std::filesystem::exists(file, ignored))
        return json{{"ferry_machine", kMachineFormat}};
    const std::string text =
        read_text_file(file, {.name = "the machine file", .remedy = kOtherFile});
    json content = parse_json(text, {.where = file,
                                     .what = "the file exists and is no machine file of ferry's",
                                     .remedy = kOtherFile,
                                     .comments = true});
    const json format = content.is_object() ? content.value("ferry_machine", json()) : json();
    if (!format.is_number_unsigned() || format.get<uint64_t>() == 0)
        refuse(file, "the file exists and is no machine file of ferry's");
    if (format.get<uint64_t>() > kMachineFormat)
        refuse(file, "the machine file was written by a newer ferry", shown_json(format));
    for (const char* list : {"paths", "memory", "devices", "kernels", "ranks"}) {
        if (content.contains(list) && !content[list].is_array())
            refuse(file, fmt::format("the machine file's \"{}\" is no list", list));
    }
    return content;
}

double rounded(double bytes_per_s) { return std::round(bytes_per_s * 1e-6) * 1e6; }

json figures_of(const IoSettings& settings) {
    const auto rate = [](int64_t bytes, const Sample& sample) {
        return rounded(static_cast<double>(bytes) / sample.seconds);
    };
    const auto cpu = [](const Sample& sample) {
        return std::round(sample.cpu_s_per_gb() * 1e4) * 1e-4;
    };
    const Sample& mixed = settings.mixed;
    return {{"path", settings.path},
            {"file_system", settings.file_system},
            {"backend", settings.backend},
            {"direct", settings.direct},
            {"block_bytes", settings.block_bytes},
            {"queue_depth", settings.queue_depth},
            {"rings", settings.rings},
            {"read_bytes_per_s", rate(settings.read.bytes_read, settings.read)},
            {"write_bytes_per_s", rate(settings.write.bytes_written, settings.write)},
            {"mixed_read_bytes_per_s", rate(mixed.bytes_read, mixed)},
            {"mixed_write_bytes_per_s", rate(mixed.bytes_written, mixed)},
            {"read_cpu_s_per_gb", cpu(settings.read)},
            {"write_cpu_s_per_gb", cpu(settings.write)},
            {"mixed_cpu_s_per_gb", cpu(mixed)},
            {"measured", machine_json()["date"]}};
}

// The entry of a list that is about `value`, or null.
const json* entry(const json& content, const char* list, const char* key, const json& value) {
    if (!content.contains(list)) return nullptr;
    for (const json& one : content[list]) {
        if (one.is_object() && one.value(key, json()) == value) return &one;
    }
    return nullptr;
}

// Keeps what it does not know of the old one.
void replace(json& list, const char* key, const json& figures) {
    if (list.is_null()) list = json::array();
    const auto found = std::find_if(list.begin(), list.end(), [&](const json& one) {
        return one.is_object() && one.value(key, json()) == figures[key];
    });
    if (found == list.end())
        list.push_back(figures);
    else
        found->update(figures);
}

// No machine's figures come near these ends: what is beyond them, or between the lower one and 0,
// makes infinities and zeros of times.
constexpr double kLeastFigure = 1e-15, kMostFigure = 1e18;

double positive(const std::string& file, const json& of, const std::string& where,
                const char* key) {
    if (!of.contains(key))
        refuse(file, fmt::format("{}: the figure \"{}\" is missing", where, key));
    const json& value = of[key];
    if (!value.is_number() || !(value.get<double>() > 0))
        refuse(file, fmt::format("{}: \"{}\" must be a number above 0", where, key),
               shown_json(value));
    if (value.get<double>() < kLeastFigure || value.get<double>() > kMostFigure)
        refuse(file,
               fmt::format("{}: \"{}\" must be of {} to {}", where, key, kLeastFigure, kMostFigure),
               shown_json(value));
    return value.get<double>();
}

// A figure that older files lack.
double none_or_more(const std::string& file, const json& of, const std::string& where,
                    const char* key) {
    const json value = of.value(key, json(0.0));
    if (!value.is_number() || value.get<double>() < 0 || value.get<double>() > kMostFigure)
        refuse(file, fmt::format("{}: \"{}\" must be a number of 0 to {}", where, key, kMostFigure),
               shown_json(value));
    return value.get<double>();
}

// Beyond the end of int64_t it would wrap.
int64_t count_in(const std::string& file, const json& value, const std::string& where,
                 const char* key, uint64_t most) {
    if (!value.is_number_unsigned() || value.get<uint64_t>() > most)
        refuse(file, fmt::format("{}: \"{}\" must be a whole number of 0 to {}", where, key, most),
               shown_json(value));
    return value.get<int64_t>();
}

// A count that older files lack.
int64_t count_or_zero(const std::string& file, const json& of, const std::string& where,
                      const char* key, uint64_t most) {
    if (!of.is_object() || !of.contains(key)) return 0;
    return count_in(file, of[key], where, key, most);
}

const std::vector<std::string> kLayers{"embedding", "block", "head"};

std::vector<std::string> kernel_names() {
    std::vector<std::string> names;
    for (const planner::Row& row : planner::operations()) names.emplace_back(row.name);
    return names;
}

int64_t index_of(const std::string& file, const json& one, const std::string& where,
                 const char* key, const std::vector<std::string>& known) {
    const json word = one.is_object() ? one.value(key, json()) : json();
    const std::string name = word.is_string() ? word.get<std::string>() : std::string();
    const auto found = std::find(known.begin(), known.end(), name);
    if (found == known.end())
        refuse(file, fmt::format("{}: \"{}\" is none of those that ferry has", where, key),
               shown_json(word));
    return found - known.begin();
}

}  // namespace

void check_machine_file(const std::string& file) {
    // Before it is opened: a pipe would wait for its writer.
    const FileKind kind = kind_of(file);
    if (kind != FileKind::none && kind != FileKind::regular)
        refuse(file, kind == FileKind::directory ? "it is a directory" : "it is no regular file",
               "", "name a file");
    read_file(file, true);
    try_draft("--save", file);
}

json settings_json(const std::vector<IoSettings>& paths) {
    json all = json::array();
    for (const IoSettings& settings : paths) all.push_back(figures_of(settings));
    return all;
}

void save_paths(const std::string& file, const std::vector<IoSettings>& paths) {
    json content = read_file(file, true);
    for (const json& figures : settings_json(paths)) replace(content["paths"], "path", figures);
    write_whole("--save", file, text_of(content));
}

void save_figures(const std::string& file, const FiguresOf& what, const train::Figures& figures) {
    json content = read_file(file, true);
    const train::Machine& machine = figures.machine;
    const json date = machine_json()["date"];
    const json memory = {{"threads", what.threads},
                         {"update_bytes_per_s", rounded(machine.links.dram_bytes_per_s)},
                         {"check_bytes_per_s", rounded(machine.check_bytes_per_s)},
                         {"update_overhead_s", std::max(1e-6, machine.update_overhead_s)},
                         {"out_of_place", machine.out_of_place},
                         {"measured", date}};
    replace(content["memory"], "threads", memory);
    json device = {{"device", what.device},
                   {"copy_bytes_per_s", rounded(machine.links.copy_bytes_per_s)},
                   {"update_bytes_per_s", rounded(machine.links.device_bytes_per_s)},
                   {"measured", date}};
    if (!machine.computes_on_host) {
        device["memory_bytes"] = what.device_bytes;
        device["overhead_bytes"] = what.needs.overhead;
    }
    replace(content["devices"], "device", device);
    json times = json::array();
    for (const auto& [kind, seconds] : figures.kernels.seconds) {
        times.push_back({{"kernel", planner::name_of(static_cast<planner::Op>(kind[0]))},
                         {"layer", kLayers[static_cast<size_t>(kind[1])]},
                         {"size", kind[2]},
                         {"seconds", seconds}});
    }
    json kernels = {{"of", what.kernels},
                    {"scratch_bytes", what.needs.scratch},
                    {"times", times},
                    {"measured", date}};
    if (figures.kernels.gemm_flops_per_s > 0)
        kernels["gemm_flops_per_s"] = rounded(figures.kernels.gemm_flops_per_s);
    for (const model::Saved result : model::kAllKept) {
        const double seconds = figures.kernels.saved_s[at(result)];
        if (seconds > 0) kernels[key_of(result)] = seconds;
    }
    if (!times.empty()) replace(content["kernels"], "of", kernels);
    write_whole("--save", file, text_of(content));
}

std::string ranks_text(const train::RankCount& count, std::string_view by) {
    return fmt::format("{} ranks, {} on a host, by {}", count.ranks, count.on_a_host, by);
}

void save_comm(const std::string& file, const std::string& ranks, const CommFigures& figures) {
    json content = read_file(file, true);
    replace(content["ranks"], "of",
            {{"of", ranks},
             {"bytes_per_s", rounded(figures.bytes_per_s)},
             {"overhead_s", figures.overhead_s},
             {"measured", machine_json()["date"]}});
    write_whole("--save", file, text_of(content));
}

// ---------------------------------------------------------------- reading

MachineFile MachineFile::read(const std::string& file) {
    MachineFile found;
    found.name_ = file;
    found.content_ = read_file(file, false);
    return found;
}

std::optional<PathFigures> MachineFile::path(const std::string& path) const {
    const std::string absolute = absolute_path(path);
    const json* figures = entry(content_, "paths", "path", absolute);
    if (!figures) return std::nullopt;
    const std::string where = "paths, " + absolute;
    return PathFigures{
        .mixed_bytes_per_s = positive(name_, *figures, where, "mixed_read_bytes_per_s") +
                             positive(name_, *figures, where, "mixed_write_bytes_per_s"),
        .in_memory = figures->value("file_system", json()) == "tmpfs",
        .cores_per_byte = 1e-9 * none_or_more(name_, *figures, where, "mixed_cpu_s_per_gb")};
}

std::optional<train::Machine> MachineFile::machine(const FiguresOf& what) const {
    const json* memory = entry(content_, "memory", "threads", what.threads);
    const json* device = entry(content_, "devices", "device", what.device);
    if (!memory || !device) return std::nullopt;
    const std::string where = fmt::format("memory, threads {}", what.threads);
    return train::Machine{
        .links = {.copy_bytes_per_s =
                      positive(name_, *device, "devices, " + what.device, "copy_bytes_per_s"),
                  .dram_bytes_per_s = positive(name_, *memory, where, "update_bytes_per_s"),
                  .device_bytes_per_s =
                      positive(name_, *device, "devices, " + what.device, "update_bytes_per_s")},
        .check_bytes_per_s = positive(name_, *memory, where, "check_bytes_per_s"),
        .update_overhead_s = positive(name_, *memory, where, "update_overhead_s"),
        .out_of_place = positive(name_, *memory, where, "out_of_place"),
        .threads = what.threads,
        .computes_on_host = what.device == "cpu"};
}

std::optional<CommFigures> MachineFile::comm(const FiguresOf& what) const {
    const json* known = entry(content_, "ranks", "of", what.ranks);
    if (!known) return std::nullopt;
    const std::string where = "ranks, " + what.ranks;
    return CommFigures{.bytes_per_s = positive(name_, *known, where, "bytes_per_s"),
                       .overhead_s = positive(name_, *known, where, "overhead_s")};
}

std::optional<train::AbsentDevice> MachineFile::gpu(const std::string& model_text) const {
    const auto list = [this](const char* name) { return content_.value(name, json::array()); };
    const auto text = [](const json& one, const char* key) {
        const json word = one.is_object() ? one.value(key, json()) : json();
        return word.is_string() ? word.get<std::string>() : std::string();
    };
    constexpr int64_t kMostBytes = 1LL << 50, kMostThreads = 1 << 16;
    train::AbsentDevice found;
    for (const json& one : list("kernels")) {
        const std::string of = text(one, "of");
        if (!of.starts_with(model_text + "device cuda")) continue;
        found.kernels = of;
        found.needs.scratch = count_or_zero(name_, one, "kernels", "scratch_bytes", kMostBytes);
        // "...device cuda sm_90; ...; 16 threads"
        const size_t begin = model_text.size() + std::string("device ").size();
        found.architecture = of.substr(begin, of.find(';', begin) - begin);
        const int64_t threads = std::strtoll(of.c_str() + of.rfind(';') + 1, nullptr, 10);
        found.threads = static_cast<int>(std::clamp<int64_t>(threads, 1, kMostThreads));
        break;
    }
    for (const json& one : list("devices")) {
        const std::string name = text(one, "device");
        if (found.architecture.empty() ? !name.starts_with("cuda") : name != found.architecture)
            continue;
        found.architecture = name;
        found.memory_bytes =
            count_or_zero(name_, one, "devices, " + name, "memory_bytes", kMostBytes);
        found.needs.overhead =
            count_or_zero(name_, one, "devices, " + name, "overhead_bytes", kMostBytes);
        break;
    }
    if (found.architecture.empty()) return std::nullopt;
    for (const json& one : list("memory")) {
        if (!found.kernels.empty()) break;
        const int64_t threads = count_or_zero(name_, one, "memory", "threads", kMostThreads);
        found.threads = std::max(found.threads, static_cast<int>(threads));
    }
    return found;
}

std::optional<train::KernelTimes> MachineFile::kernels(const FiguresOf& what) const {
    const json* known = entry(content_, "kernels", "of", what.kernels);
    if (!known) return std::nullopt;
    const json times = known->value("times", json());
    if (!times.is_array() || times.empty()) refuse(name_, "kernels: \"times\" is no list of them");
    train::KernelTimes found;
    if (known->contains("gemm_flops_per_s"))
        found.gemm_flops_per_s = positive(name_, *known, "kernels", "gemm_flops_per_s");
    for (const model::Saved result : model::kAllKept) {
        if (known->contains(key_of(result)))
            found.saved_s[at(result)] = positive(name_, *known, "kernels", key_of(result));
    }
    for (const json& one : times) {
        const std::string where = "kernels, times: " + shown_json(one);
        const int64_t op = index_of(name_, one, where, "kernel", kernel_names());
        const int64_t layer = index_of(name_, one, where, "layer", kLayers);
        constexpr uint64_t kMostElements = 1ULL << 50;
        const int64_t size =
            count_in(name_, one.value("size", json()), where, "size", kMostElements);
        found.seconds[{op, layer, size}] = positive(name_, one, where, "seconds");
    }
    return found;
}

}  // namespace ferry::tools
