#include "machine_file.h"

#include <spdlog/fmt/fmt.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>
#include <span>

#include "base/files.h"
#include "base/json_reader.h"
#include "base/text.h"
#include "base/words.h"
#include "io_site.h"
#include "machine_text.h"
#include "tools/output/writable.h"

namespace ferry::tools {
namespace {

using nlohmann::json;

const char* key_of(model::Saved what) {
    constexpr model::OfSaved<const char*> kKeys{"attention_seconds", "mlp_seconds",
                                                "projection_seconds"};
    return kKeys[model::at(what)];
}

constexpr const char *kOf = "of", *kOfHost = "host", *kOfRank = "rank";
// Of a path: a chunk goes through one ring.
constexpr const char* kAtOnce = "chunks_at_once";
// Of kernels, memory and processors: ranks of the host that were measured at the same time.
constexpr const char* kRanksAtOnce = "ranks_at_once";
// Ranks in each group of `ranks`, and the rates within these groups.
constexpr const char *kTensor = "tensor", *kSequence = "sequence", *kPerHost = "ranks_per_host";

const std::array<std::string, 5> kLists = {"paths", "memory", "devices", "kernels", "ranks"};

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
    for (const std::string& list : kLists) {
        if (content.contains(list) && !content[list].is_array())
            refuse(file, fmt::format("the machine file's \"{}\" is no list", list));
    }
    // Other keys are the user's own notes, but for those that look like one of these.
    for (const auto& item : content.items()) {
        const std::string near = nearest_word(item.key(), kLists);
        if (item.key() == "ferry_machine" || near.empty() || near == item.key()) continue;
        refuse(file, "the machine file has a key that ferry does not know",
               "\"" + shown(item.key(), 100) + "\"",
               "call it \"" + near + "\", or give it a name unlike that");
    }
    return content;
}

double rounded(double bytes_per_s) { return std::round(bytes_per_s * 1e-6) * 1e6; }

// The number of the file system that a path lies on: paths of the same one share a drive. -1: it
// is not here.
int64_t drive_of(const std::string& path) {
    struct stat status {};
    return stat(path.c_str(), &status) == 0 ? static_cast<int64_t>(status.st_dev) : -1;
}

json fields_of(const IoSettings& settings) {
    const auto rate = [](int64_t bytes, const Sample& sample) {
        return rounded(static_cast<double>(bytes) / sample.seconds);
    };
    const auto cpu = [](const Sample& sample) {
        return std::round(sample.cpu_s_per_gb() * 1e4) * 1e-4;
    };
    const Sample& mixed = settings.mixed;
    json fields{{"path", settings.path},
                {"drive", drive_of(settings.path)},
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
    // In memory a file takes one writer at a time, and these transfers were of several.
    if (settings.file_system != kTmpfs) fields[kAtOnce] = settings.rings;
    return fields;
}

// What a key stands for that an entry lacks: memory's numbers are a host's, ranks share nothing.
json by_default(const std::string& key) {
    if (key == kOf) return kOfHost;
    if (key == kRanksAtOnce) return 1;
    return key == kTensor || key == kSequence || key == kPerHost ? json(1) : json();
}

// Whether an entry of a list is about this.
bool is_about(const json& one, const json& key) {
    return one.is_object() && std::ranges::all_of(key.items(), [&](const auto& item) {
               return one.value(item.key(), by_default(item.key())) == item.value();
           });
}
const json* entry(const json& content, const char* list, const json& key) {
    if (!content.contains(list)) return nullptr;
    const json& all = content[list];
    const auto found =
        std::ranges::find_if(all, [&](const json& one) { return is_about(one, key); });
    return found == all.end() ? nullptr : &*found;
}

// Keeps what it does not know of the old one.
void replace(json& list, const json& key, const json& fields) {
    if (list.is_null()) list = json::array();
    auto found =
        std::find_if(list.begin(), list.end(), [&](const json& one) { return is_about(one, key); });
    if (found == list.end()) found = list.insert(list.end(), json::object());
    found->update(key);
    found->update(fields);
}

// The numbers of an entry, by key.
struct Field {
    const char* key;
    double cost::Measurements::*value;
};
using cost::Measurements;
constexpr std::array kMemory{Field{"update_bytes_per_s", &Measurements::dram_bytes_per_s},
                             Field{"check_bytes_per_s", &Measurements::check_bytes_per_s},
                             Field{"update_overhead_s", &Measurements::update_overhead_s},
                             Field{"out_of_place", &Measurements::out_of_place}};
constexpr std::array kDevice{Field{"copy_bytes_per_s", &Measurements::copy_bytes_per_s},
                             Field{"update_bytes_per_s", &Measurements::device_bytes_per_s}};
// These may be missing.
constexpr const char* kCopyWithin = "copy_within_bytes_per_s";
constexpr const char* kMomentum = "momentum_bytes_per_s";
constexpr std::array kRanks{Field{"bytes_per_s", &Measurements::comm_bytes_per_s},
                            Field{"overhead_s", &Measurements::comm_overhead_s}};

double field_of(double value) {
    constexpr double kLeast = 1e-6;  // none is 0, which would be unknown
    if (value >= 1e9) return rounded(value);
    // Of a slow network a megabyte a second is much.
    return value >= 1e6 ? std::round(value * 1e-3) * 1e3 : std::max(kLeast, value);
}

json json_of(std::span<const Field> fields, const Measurements& measured) {
    json entry{{"measured", machine_json()["date"]}};
    for (const auto& [key, value] : fields) entry[key] = field_of(measured.*value);
    return entry;
}

json key_of_memory(int threads, const char* of, int at_once) {
    return {{"threads", threads}, {kOf, of}, {kRanksAtOnce, at_once}};
}

json key_of_device(const std::string& device, int at_once) {
    return {{"device", device}, {kRanksAtOnce, at_once}};
}

json key_of_kernels(const MeasurementsOf& what) {
    const cost::KernelsOf& of = what.kernels;
    return {{"model", of.model},         {"compute", of.compute}, {"device", of.device},
            {"libraries", of.libraries}, {"threads", of.threads}, {"under_load", of.under_load},
            {kRanksAtOnce, what.at_once}};
}

json key_of_ranks(const MeasurementsOf& what) {
    return {{"ranks", what.count.ranks},
            {"on_a_host", what.count.on_a_host},
            {"by", what.by},
            {kTensor, what.groups.tensor},
            {kSequence, what.groups.sequence},
            {kPerHost, what.ranks_per_host}};
}
// The same ranks in no groups.
json key_of_ungrouped(MeasurementsOf what) {
    what.groups = {};
    what.ranks_per_host = 1;
    return key_of_ranks(what);
}

// The rates within groups, by the words that their keys begin with.
struct OfGroup {
    std::string of;
    cost::GroupRate Measurements::*rate;
    std::string bytes_per_s() const { return of + "_bytes_per_s"; }
    std::string overhead_s() const { return of + "_overhead_s"; }
};
const std::array kGroups{OfGroup{kTensor, &Measurements::with_slices},
                         OfGroup{kSequence, &Measurements::with_sequence},
                         OfGroup{"in_host", &Measurements::in_host},
                         OfGroup{"across_hosts", &Measurements::across_hosts},
                         OfGroup{"between_stages", &Measurements::between_stages}};

// No machine's numbers come near these ends: what is beyond them, or between the lower one and 0,
// makes infinities and zeros of times.
constexpr double kLeastNumber = 1e-15, kMostNumber = 1e18;

double positive(const std::string& file, const json& of, const std::string& where,
                const char* key) {
    if (!of.contains(key))
        refuse(file, fmt::format("{}: the number \"{}\" is missing", where, key));
    const json& value = of[key];
    if (!value.is_number() || !(value.get<double>() > 0))
        refuse(file, fmt::format("{}: \"{}\" must be a number above 0", where, key),
               shown_json(value));
    if (value.get<double>() < kLeastNumber || value.get<double>() > kMostNumber)
        refuse(file,
               fmt::format("{}: \"{}\" must be of {} to {}", where, key, kLeastNumber, kMostNumber),
               shown_json(value));
    return value.get<double>();
}

// A number that older files lack.
double none_or_more(const std::string& file, const json& of, const std::string& where,
                    const char* key) {
    const json value = of.value(key, json(0.0));
    if (!value.is_number() || value.get<double>() < 0 || value.get<double>() > kMostNumber)
        refuse(file, fmt::format("{}: \"{}\" must be a number of 0 to {}", where, key, kMostNumber),
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
    for (const cost::OperationRow& row : cost::operations()) names.emplace_back(row.name);
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
    for (const IoSettings& settings : paths) all.push_back(fields_of(settings));
    return all;
}

void save_paths(const std::string& file, const std::vector<IoSettings>& paths) {
    json content = read_file(file, true);
    for (const json& fields : settings_json(paths))
        replace(content["paths"], {{"path", fields["path"]}}, fields);
    write_whole("--save", file, text_of(content));
}

void save_measurements(const std::string& file, const MeasurementsOf& what,
                       const Measurements& measured) {
    json content = read_file(file, true);
    const char* of = measured.memory_of == cost::Of::host ? kOfHost : kOfRank;
    replace(content["memory"], key_of_memory(what.kernels.threads, of, what.at_once),
            json_of(kMemory, measured));
    json device = json_of(kDevice, measured);
    if (measured.device_copy_bytes_per_s > 0)
        device[kCopyWithin] = rounded(measured.device_copy_bytes_per_s);
    if (!measured.computes_on_host) {
        device["memory_bytes"] = what.device_bytes;
        device["overhead_bytes"] = what.needs.overhead;
    }
    replace(content["devices"], key_of_device(what.kernels.device, what.at_once), device);
    json times = json::array();
    for (const auto& [kind, seconds] : measured.kernels.seconds) {
        times.push_back({{"kernel", cost::name_of(static_cast<cost::Op>(kind[0]))},
                         {"layer", kLayers[static_cast<size_t>(kind[1])]},
                         {"size", kind[2]},
                         {"seconds", seconds}});
    }
    json kernels = {{"scratch_bytes", what.needs.scratch},
                    {"times", times},
                    {"measured", machine_json()["date"]}};
    if (measured.product_flops_per_s > 0)
        kernels["gemm_flops_per_s"] = rounded(measured.product_flops_per_s);
    if (measured.momentum_bytes_per_s > 0)
        kernels[kMomentum] = rounded(measured.momentum_bytes_per_s);
    for (const model::Saved result : model::kAllSaved) {
        const double seconds = measured.kernels.saved_s[at(result)];
        if (seconds > 0) kernels[key_of(result)] = seconds;
    }
    if (!times.empty()) replace(content["kernels"], key_of_kernels(what), kernels);
    write_whole("--save", file, text_of(content));
}

std::string text_of_ranks(const MeasurementsOf& what) {
    const auto over = [](const char* of, int ranks) {
        return ranks > 1 ? fmt::format("{} over {}, ", of, ranks) : std::string();
    };
    const std::string hosts =
        what.ranks_per_host > 1 ? fmt::format("hosts of {}, ", what.ranks_per_host) : "";
    return fmt::format("{} ranks, {} on a host, {}{}{}by {}", what.count.ranks,
                       what.count.on_a_host, over("tensors", what.groups.tensor),
                       over("sequences", what.groups.sequence), hosts, what.by);
}

void save_comm(const std::string& file, const MeasurementsOf& what, const Measurements& measured) {
    json content = read_file(file, true);
    json rates = json_of(kRanks, measured);
    for (const OfGroup& group : kGroups) {
        const auto& [bytes_per_s, overhead_s] = measured.*group.rate;
        if (bytes_per_s == 0) continue;
        rates[group.bytes_per_s()] = field_of(bytes_per_s);
        rates[group.overhead_s()] = field_of(overhead_s);
    }
    replace(content["ranks"], key_of_ranks(what), rates);
    write_whole("--save", file, text_of(content));
}

// ---------------------------------------------------------------- reading

MachineFile MachineFile::read(const std::string& file) {
    MachineFile found;
    found.name_ = file;
    found.content_ = read_file(file, false);
    return found;
}

std::optional<cost::Path> MachineFile::path(const std::string& path) const {
    constexpr uint64_t kMostAtOnce = 64;  // rings of a volume
    const std::string absolute = absolute_path(path);
    const json* fields = entry(content_, "paths", {{"path", absolute}});
    if (!fields) return std::nullopt;
    const std::string where = "paths, " + absolute;
    const json drive = fields->value("drive", json(drive_of(absolute)));
    if (!drive.is_number_integer())
        refuse(name_, where + ": \"drive\" is no number", shown_json(drive));
    return cost::Path{
        .bytes_per_s = positive(name_, *fields, where, "mixed_read_bytes_per_s") +
                       positive(name_, *fields, where, "mixed_write_bytes_per_s"),
        .drive = drive.get<int64_t>(),
        .in_memory = fields->value("file_system", json()) == kTmpfs,
        .cores_per_byte = 1e-9 * none_or_more(name_, *fields, where, "mixed_cpu_s_per_gb"),
        .at_once = count_or_zero(name_, *fields, where, kAtOnce, kMostAtOnce)};
}

namespace {

class Reader {
public:
    Reader(const std::string& file, const json& content) : file_(file), content_(content) {}

    Measurements read(const MeasurementsOf& what) {
        found_.threads = what.kernels.threads;
        found_.computes_on_host = what.kernels.on_host();
        const int at_once = what.at_once;
        read_memory(what.kernels.threads, at_once, what.count.on_a_host);
        const json* device =
            entry(content_, "devices", key_of_device(what.kernels.device, at_once));
        if (!device) device = entry(content_, "devices", key_of_device(what.kernels.device, 1));
        if (device) {
            const std::string where = "devices, " + what.kernels.device;
            read(kDevice, *device, where);
            if (device->contains(kCopyWithin))
                found_.device_copy_bytes_per_s = positive(file_, *device, where, kCopyWithin);
        }
        if (what.count.ranks > 1) read_ranks(what);
        const json* kernels = entry(content_, "kernels", key_of_kernels(what));
        if (kernels) read_kernels(*kernels);
        if (kernels && kernels->contains(kMomentum))
            found_.momentum_bytes_per_s = positive(file_, *kernels, "kernels", kMomentum);
        // How fast this device multiplies does not depend on the model.
        if (!kernels)
            kernels = entry(content_, "kernels",
                            {{"device", what.kernels.device}, {"compute", what.kernels.compute}});
        if (kernels && kernels->contains("gemm_flops_per_s"))
            found_.product_flops_per_s = positive(file_, *kernels, "kernels", "gemm_flops_per_s");
        return std::move(found_);
    }

private:
    void read(std::span<const Field> fields, const json& from, const std::string& where) {
        for (const auto& [key, value] : fields) found_.*value = positive(file_, from, where, key);
    }

    // What a rank reaches beside the others it has. What it reaches alone it keeps as far as the
    // host's memory goes for all of them.
    void read_memory(int threads, int at_once, int ranks_on_host) {
        const std::string where = fmt::format("memory, threads {}", threads);
        const json* host = entry(content_, "memory", key_of_memory(threads, kOfHost, 1));
        const json* rank = entry(content_, "memory", key_of_memory(threads, kOfRank, 1));
        const json* beside = entry(content_, "memory", key_of_memory(threads, kOfRank, at_once));
        if (beside && at_once > 1) {
            read(kMemory, *beside, where);
            found_.memory_of = cost::Of::rank;
        } else if (rank && ranks_on_host > 1) {
            read(kMemory, *rank, where);
            found_.memory_of = cost::Of::rank;
            found_.dram_bytes_per_s =
                std::min(found_.dram_bytes_per_s, most_of_a_host() / ranks_on_host);
        } else if (host) {
            read(kMemory, *host, where);
        }
    }
    // The rate of the most threads that were measured. Infinite: none were.
    double most_of_a_host() const {
        double rate = std::numeric_limits<double>::infinity();
        int64_t most = 0;
        for (const json& one : content_["memory"]) {
            if (!is_about(one, {{kOf, kOfHost}})) continue;
            const json threads = one.value("threads", json());
            if (!threads.is_number_integer() || threads.get<int64_t>() <= most) continue;
            most = threads.get<int64_t>();
            rate =
                positive(file_, one, fmt::format("memory, threads {}", most), "update_bytes_per_s");
        }
        return rate;
    }

    // Of groups that nobody measured the rates are those among all ranks.
    void read_ranks(const MeasurementsOf& what) {
        const json* ranks = entry(content_, "ranks", key_of_ranks(what));
        if (!ranks) ranks = entry(content_, "ranks", key_of_ungrouped(what));
        if (!ranks) return;
        const std::string where = "ranks, " + text_of_ranks(what);
        read(kRanks, *ranks, where);
        for (const OfGroup& group : kGroups) {
            const std::string bytes_per_s = group.bytes_per_s(), overhead_s = group.overhead_s();
            if (!ranks->contains(bytes_per_s)) continue;
            found_.*group.rate = {positive(file_, *ranks, where, bytes_per_s.c_str()),
                                  positive(file_, *ranks, where, overhead_s.c_str())};
        }
    }

    void read_kernels(const json& known) {
        const json times = known.value("times", json());
        if (!times.is_array() || times.empty())
            refuse(file_, "kernels: \"times\" is no list of them");
        for (const model::Saved result : model::kAllSaved) {
            if (known.contains(key_of(result)))
                found_.kernels.saved_s[at(result)] =
                    positive(file_, known, "kernels", key_of(result));
        }
        for (const json& one : times) {
            const std::string where = "kernels, times: " + shown_json(one);
            const int64_t op = index_of(file_, one, where, "kernel", kernel_names());
            const int64_t layer = index_of(file_, one, where, "layer", kLayers);
            constexpr uint64_t kMostElements = 1ULL << 50;
            const int64_t size =
                count_in(file_, one.value("size", json()), where, "size", kMostElements);
            found_.kernels.seconds[{op, layer, size}] = positive(file_, one, where, "seconds");
        }
    }

    const std::string& file_;
    const json& content_;
    Measurements found_{};
};

std::string text(const json& one, const char* key) {
    const json word = one.is_object() ? one.value(key, json()) : json();
    return word.is_string() ? word.get<std::string>() : std::string();
}
}  // namespace

Measurements MachineFile::measurements(const MeasurementsOf& what) const {
    return Reader(name_, content_).read(what);
}

std::optional<train::AbsentDevice> MachineFile::gpu(const cost::KernelsOf& model) const {
    const auto list = [this](const char* name) { return content_.value(name, json::array()); };
    const auto is_gpu = [](const std::string& device) {
        return !device.empty() && device != cost::KernelsOf::kHost;
    };
    constexpr int64_t kMostBytes = 1LL << 50, kMostThreads = 1 << 16;
    const auto threads_in = [&](const json& one, const char* where) {
        return static_cast<int>(count_or_zero(name_, one, where, "threads", kMostThreads));
    };
    train::AbsentDevice found;
    for (const json& one : list("kernels")) {
        if (!is_about(one, {{"model", model.model}, {"compute", model.compute}}) ||
            !is_gpu(text(one, "device")))
            continue;
        found.architecture = text(one, "device");
        found.threads = std::max(1, threads_in(one, "kernels"));
        found.kernels = {.model = model.model,
                         .compute = model.compute,
                         .device = found.architecture,
                         .libraries = text(one, "libraries"),
                         .threads = found.threads,
                         .under_load = one.value("under_load", json()) == true};
        found.needs.scratch = count_or_zero(name_, one, "kernels", "scratch_bytes", kMostBytes);
        break;
    }
    for (const json& one : list("devices")) {
        const std::string name = text(one, "device");
        if (found.architecture.empty() ? !is_gpu(name) : name != found.architecture) continue;
        found.architecture = name;
        found.memory_bytes =
            count_or_zero(name_, one, "devices, " + name, "memory_bytes", kMostBytes);
        found.needs.overhead =
            count_or_zero(name_, one, "devices, " + name, "overhead_bytes", kMostBytes);
        break;
    }
    if (found.architecture.empty()) return std::nullopt;
    for (const json& one : list("memory")) {
        if (!found.kernels.model.empty()) break;
        found.threads = std::max(found.threads, threads_in(one, "memory"));
    }
    return found;
}

}  // namespace ferry::tools
