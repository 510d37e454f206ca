#include "machine_file.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>
#include <span>
#include <utility>

#include "base/files.h"
#include "base/json_reader.h"
#include "base/text.h"
#include "io_site.h"
#include "machine_entries.h"

namespace ferry::tools {

using cost::Measurements;
using nlohmann::json;

MachineFile MachineFile::read(const std::string& file) {
    MachineFile found;
    found.name_ = file;
    found.content_ = read_entries(file, false);
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
        refuse_file(name_, where + ": \"drive\" is no number", shown_json(drive));
    return cost::Path{
        .bytes_per_s = positive(name_, *fields, where, "mixed_read_bytes_per_s") +
                       positive(name_, *fields, where, "mixed_write_bytes_per_s"),
        .drive = drive.get<int64_t>(),
        .in_memory = fields->value("file_system", json()) == kTmpfs,
        .cores_per_byte = 1e-9 * none_or_more(name_, *fields, where, "mixed_cpu_s_per_gb"),
        .at_once = count_or_zero(name_, *fields, where, kAtOnce, kMostAtOnce)};
}

namespace {

std::vector<std::string> kernel_names() {
    std::vector<std::string> names;
    for (const cost::Row& row : cost::operations()) names.emplace_back(row.name);
    return names;
}

int64_t index_of(const std::string& file, const json& one, const std::string& where,
                 const char* key, const std::vector<std::string>& known) {
    const json word = one.is_object() ? one.value(key, json()) : json();
    const std::string name = word.is_string() ? word.get<std::string>() : std::string();
    const auto found = std::find(known.begin(), known.end(), name);
    if (found == known.end())
        refuse_file(file, fmt::format("{}: \"{}\" is none of those that ferry has", where, key),
                    shown_json(word));
    return found - known.begin();
}

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
        for (const OfGroup& group : groups_of_ranks()) {
            const std::string bytes_per_s = group.bytes_per_s(), overhead_s = group.overhead_s();
            if (!ranks->contains(bytes_per_s)) continue;
            found_.*group.rate = {positive(file_, *ranks, where, bytes_per_s.c_str()),
                                  positive(file_, *ranks, where, overhead_s.c_str())};
        }
    }

    void read_kernels(const json& known) {
        const json times = known.value("times", json());
        if (!times.is_array() || times.empty())
            refuse_file(file_, "kernels: \"times\" is no list of them");
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

}  // namespace

Measurements MachineFile::measurements(const MeasurementsOf& what) const {
    return Reader(name_, content_).read(what);
}

}  // namespace ferry::tools
