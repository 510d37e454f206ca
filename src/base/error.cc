#include <spdlog/sinks/stdout_color_sinks.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>

#include "base/bugs.h"
#include "base/log.h"
#include "base/of_rank.h"
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

std::atomic<const LogSink*> g_sink{nullptr};
thread_local int t_bugs_throw = 0;
thread_local bool t_later_rank = false;

void say(LogLevel level, std::string_view message, Warning about = Warning::other) {
    if (const LogSink* sink = g_sink.load(std::memory_order_acquire))
        return sink->line(level, about, message);
    constexpr spdlog::level::level_enum kLevels[] = {spdlog::level::debug, spdlog::level::info,
                                                     spdlog::level::warn, spdlog::level::critical};
    logger().log(kLevels[static_cast<size_t>(level)], message);
}

}  // namespace

Error::Error(Trouble trouble, Problem problem)
    : std::runtime_error(message_of(problem)), trouble_(trouble), problem_(std::move(problem)) {}

void bug(const char* condition, std::string_view detail, std::source_location where) {
    std::string text = std::string("bug at ") + where.file_name() + ":" +
                       std::to_string(where.line()) + ": " + condition + " ";
    text += detail;
    say(LogLevel::bug, text);
    if (t_bugs_throw > 0) throw Bug(bounded(text));
    if (!g_sink.load(std::memory_order_acquire)) logger().flush();
    std::abort();
}

BugsThrow::BugsThrow() noexcept { ++t_bugs_throw; }
BugsThrow::~BugsThrow() { --t_bugs_throw; }

void set_log_sink(const LogSink* sink) noexcept { g_sink.store(sink, std::memory_order_release); }
void log_debug(std::string_view message) { say(LogLevel::debug, printable(message)); }
void log_info(std::string_view message) { say(LogLevel::info, printable(message)); }
void log_warn(std::string_view message) { say(LogLevel::warn, printable(message)); }
void log_warn_of_run(std::string_view message, Warning about) {
    if (!t_later_rank) say(LogLevel::warn, printable(message), about);
}
OfRank::OfRank(int rank) noexcept : was_later_(t_later_rank) { t_later_rank = rank > 0; }
OfRank::~OfRank() { t_later_rank = was_later_; }

}  // namespace ferry
