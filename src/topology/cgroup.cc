#include "cgroup.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <fstream>
#include <optional>
#include <span>
#include <sstream>

namespace ferry::topology {
namespace {

std::optional<std::string> first_line(const std::string& path) {
    std::ifstream file(path);
    std::string line;
    if (!file || !std::getline(file, line)) return std::nullopt;
    return line;
}

template <class Number>
void keep_least(Number& least, Number found) {
    if (found > 0 && (least == 0 || found < least)) least = found;
}

// Nothing where there is no such file or no number in it ("max").
std::optional<int64_t> read_bytes(const std::string& path) {
    const auto text = first_line(path);
    if (!text) return std::nullopt;
    char* end = nullptr;
    const long long bytes = std::strtoll(text->c_str(), &end, 10);
    if (end == text->c_str()) return std::nullopt;
    return bytes;
}

// The sum of those lines of a memory.stat that have these names.
int64_t sum_of(const std::string& path, std::span<const std::string_view> names) {
    std::ifstream file(path);
    std::string name;
    int64_t bytes = 0, sum = 0;
    while (file >> name >> bytes) {
        if (std::ranges::find(names, name) != names.end()) sum += bytes;
    }
    return sum;
}

// The names of the files in one version of control groups.
struct MemoryFiles {
    const char *limit, *usage;
    std::array<std::string_view, 3> reclaimable;  // lines of memory.stat
};
constexpr MemoryFiles kMemoryV1{"/memory.limit_in_bytes",
                                "/memory.usage_in_bytes",
                                {"total_active_file", "total_inactive_file", ""}};
constexpr MemoryFiles kMemoryV2{
    "/memory.max", "/memory.current", {"active_file", "inactive_file", "slab_reclaimable"}};

void read_memory(const std::string& folder, const MemoryFiles& names, CgroupLimits& limits) {
    const auto limit = read_bytes(folder + names.limit);
    // v1 writes "no limit" as the largest multiple of a page.
    if (!limit || *limit <= 0 || *limit >= (int64_t{1} << 62)) return;
    const int64_t used = read_bytes(folder + names.usage).value_or(0) -
                         sum_of(folder + "/memory.stat", names.reclaimable);
    const int64_t left = std::clamp<int64_t>(*limit - used, 0, *limit);
    const bool first = limits.memory_bytes == 0;
    limits.memory_left_bytes = first ? left : std::min(limits.memory_left_bytes, left);
    keep_least(limits.memory_bytes, *limit);
}

// v2: "quota period" or "max period".
void read_cpu_v2(const std::string& path, CgroupLimits& limits) {
    const auto text = first_line(path);
    double quota = 0, period = 0;
    if (text && std::istringstream(*text) >> quota >> period && period > 0) {
        keep_least(limits.cpus, quota / period);
    }
}

void read_cpu_v1(const std::string& folder, CgroupLimits& limits) {
    const auto quota = first_line(folder + "/cpu.cfs_quota_us");
    const auto period = first_line(folder + "/cpu.cfs_period_us");
    if (!quota || !period) return;
    const double length = std::atof(period->c_str());
    if (length > 0) keep_least(limits.cpus, std::atof(quota->c_str()) / length);  // -1: no limit
}

template <class Read>
void for_each_ancestor(const std::string& root, std::string group, const Read& read) {
    while (!group.empty() && group.back() == '/') group.pop_back();
    while (!group.empty()) {
        read(root + group);
        group.resize(group.rfind('/') == std::string::npos ? 0 : group.rfind('/'));
    }
    read(root);
}

bool names(std::string_view controllers, std::string_view wanted) {
    size_t at = 0;
    while (at <= controllers.size()) {
        const size_t comma = std::min(controllers.find(',', at), controllers.size());
        if (controllers.substr(at, comma - at) == wanted) return true;
        at = comma + 1;
    }
    return false;
}

}  // namespace

CgroupLimits read_cgroup(std::string_view membership, const std::string& mount) {
    CgroupLimits limits;
    std::istringstream lines{std::string(membership)};
    std::string line;
    while (std::getline(lines, line)) {  // hierarchy:controllers:group
        const size_t first = line.find(':');
        const size_t second = first == std::string::npos ? first : line.find(':', first + 1);
        if (second == std::string::npos) continue;
        const std::string controllers = line.substr(first + 1, second - first - 1);
        const std::string group = line.substr(second + 1);
        if (controllers.empty()) {  // v2, or the v2 side of a mixed set-up
            for (const std::string& root : {mount, mount + "/unified"}) {
                for_each_ancestor(root, group, [&](const std::string& folder) {
                    read_memory(folder, kMemoryV2, limits);
                    read_cpu_v2(folder + "/cpu.max", limits);
                });
            }
        }
        if (names(controllers, "memory")) {
            for_each_ancestor(mount + "/memory", group, [&](const std::string& folder) {
                read_memory(folder, kMemoryV1, limits);
            });
        }
        if (names(controllers, "cpu")) {
            for (const std::string& root : {mount + "/cpu", mount + "/cpu,cpuacct"}) {
                for_each_ancestor(root, group,
                                  [&](const std::string& folder) { read_cpu_v1(folder, limits); });
            }
        }
    }
    return limits;
}

}  // namespace ferry::topology
