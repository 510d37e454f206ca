#include "machine_text.h"

#include <spdlog/fmt/fmt.h>
#include <sys/utsname.h>

#include <ctime>
#include <fstream>
#include <nlohmann/json.hpp>

#include "topology/topology.h"

namespace ferry::tools {
namespace {

std::string processor() {
    std::ifstream file("/proc/cpuinfo");
    for (std::string line; std::getline(file, line);) {
        if (line.rfind("model name", 0) == 0) return line.substr(line.find(':') + 2);
    }
    return "unknown processor";
}

std::string kernel() {
    utsname name{};
    uname(&name);
    return std::string(name.sysname) + ' ' + name.release;
}

std::string today() {
    const std::time_t now = std::time(nullptr);
    std::tm day{};
    localtime_r(&now, &day);
    return fmt::format("{:04}-{:02}-{:02}", day.tm_year + 1900, day.tm_mon + 1, day.tm_mday);
}

}  // namespace

nlohmann::json machine_json() {
    const Topology topology = discover_topology();
    return {{"processor", processor()},
            {"cores", topology.cores()},
            {"memory_bytes", topology.memory_limit_bytes},
            {"kernel", kernel()},
            {"date", today()}};
}

std::string machine_text() {
    return fmt::format("{}, {} cores, {}, {}", processor(), discover_topology().cores(), kernel(),
                       today());
}

}  // namespace ferry::tools
