#include "machine_writing.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <span>

#include "base/files.h"
#include "io_site.h"
#include "machine_entries.h"
#include "machine_text.h"
#include "tools/output/writable.h"

namespace ferry::tools {

using cost::Measurements;
using nlohmann::json;

namespace {

// A path's name may be no UTF-8.
std::string text_of(const json& content) {
    return content.dump(2, ' ', false, json::error_handler_t::replace) + "\n";
}

double rounded(double bytes_per_s) { return std::round(bytes_per_s * 1e-6) * 1e6; }

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

// Keeps what it does not know of the old one.
void replace(json& list, const json& key, const json& fields) {
    if (list.is_null()) list = json::array();
    auto found =
        std::find_if(list.begin(), list.end(), [&](const json& one) { return is_about(one, key); });
    if (found == list.end()) found = list.insert(list.end(), json::object());
    found->update(key);
    found->update(fields);
}

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

}  // namespace

void check_machine_file(const std::string& file) {
    // Before it is opened: a pipe would wait for its writer.
    const FileKind kind = kind_of(file);
    if (kind != FileKind::none && kind != FileKind::regular)
        refuse_file(file,
                    kind == FileKind::directory ? "it is a directory" : "it is no regular file", "",
                    "name a file");
    read_entries(file, true);
    try_draft("--save", file);
}

json settings_json(const std::vector<IoSettings>& paths) {
    json all = json::array();
    for (const IoSettings& settings : paths) all.push_back(fields_of(settings));
    return all;
}

void save_paths(const std::string& file, const std::vector<IoSettings>& paths) {
    json content = read_entries(file, true);
    for (const json& fields : settings_json(paths))
        replace(content["paths"], {{"path", fields["path"]}}, fields);
    write_whole("--save", file, text_of(content));
}

void save_measurements(const std::string& file, const MeasurementsOf& what,
                       const Measurements& measured) {
    json content = read_entries(file, true);
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

void save_comm(const std::string& file, const MeasurementsOf& what, const Measurements& measured) {
    json content = read_entries(file, true);
    json rates = json_of(kRanks, measured);
    for (const OfGroup& group : groups_of_ranks()) {
        const auto& [bytes_per_s, overhead_s] = measured.*group.rate;
        if (bytes_per_s == 0) continue;
        rates[group.bytes_per_s()] = field_of(bytes_per_s);
        rates[group.overhead_s()] = field_of(overhead_s);
    }
    replace(content["ranks"], key_of_ranks(what), rates);
    write_whole("--save", file, text_of(content));
}

}  // namespace ferry::tools
