#include <spdlog/sinks/stdout_color_sinks.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <cstdlib>

#include "base/log.h"
#include "base/text.h"
#include "ferry/error.h"

namespace ferry {
namespace {

// Whoever made the error quotes users' text with in_quotes(); what they forgot must not flood a log
// either. The longest path that the system takes is 4,096 bytes.
std::string bounded(const std::string& text) {
    constexpr size_t kMost = 2000;
    return text.size() <= kMost ? printable(text) : shown(text, kMost);
}

std::string message_of(const Problem& problem) {
    std::string text = bounded(problem.what);
    const auto add = [&text](std::string_view label, const std::string& value) {
        if (value.empty()) return;
        text.append("\n  ").append(label).append(bounded(value));
    };
    add("where:    ", problem.where);
    add("measured: ", problem.measured);
    add("limit:    ", problem.limit);
    add("do:       ", problem.remedy);
    return text;
}

// As text of a pattern of spdlog's.
std::string escaped(const std::string& text) {
    std::string out;
    for (const char c : text) out.append(c == '%' ? 2 : 1, c);
    return out;
}

spdlog::logger& logger() {
    static const std::shared_ptr<spdlog::logger> kInstance = [] {
        auto made = std::make_shared<spdlog::logger>(
            "ferry", std::make_shared<spdlog::sinks::stderr_color_sink_mt>());
        const char* level = std::getenv("FERRY_LOG");
        made->set_level(level ? spdlog::level::from_str(level) : spdlog::level::info);
        const char* label = std::getenv("FERRY_LOG_LABEL");
        const std::string labelled = label && *label ? std::string(label) + ": " : "";
        made->set_pattern("%H:%M:%S.%e %^%l%$ " + escaped(labelled) + "%v");
        return made;
    }();
    return *kInstance;
}

}  // namespace

Error::Error(Trouble trouble, Problem problem)
    : std::runtime_error(message_of(problem)), trouble_(trouble), problem_(std::move(problem)) {}

void bug(const char* condition, std::string_view detail, std::source_location where) {
    logger().critical("bug at {}:{}: {} {}", where.file_name(), where.line(), condition, detail);
    logger().flush();
    std::abort();
}

void log_debug(std::string_view message) { logger().debug(printable(message)); }
void log_info(std::string_view message) { logger().info(printable(message)); }
void log_warn(std::string_view message) { logger().warn(printable(message)); }

}  // namespace ferry
