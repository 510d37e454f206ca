// The GPU of a machine file, for plans that are made without it.
#include <algorithm>

#include "machine_entries.h"
#include "machine_file.h"

namespace ferry::tools {

using nlohmann::json;

namespace {

std::string text(const json& one, const char* key) {
    const json word = one.is_object() ? one.value(key, json()) : json();
    return word.is_string() ? word.get<std::string>() : std::string();
}

}  // namespace

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
